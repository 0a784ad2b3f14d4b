r"""The zoo's EAGLE-3 head, trained with training-time test on the target's own text.

    python -m experiments.regenerate --config=configs/regenerate_zoo.py --workdir=runs/zoo_text
    python -m experiments.train_head --config=configs/train_head_eagle3.py --workdir=runs/eagle3 \
        --config.data.responses=runs/zoo_text/responses.jsonl
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """Sizes are in tokens and steps, rates are peak rates; see spec_jax/train."""
    config = ConfigDict()
    config.seed = 0
    config.target = "zoo/target"  # or a Hugging Face directory
    config.dtype = "float32"  # to compute in; what is trained stays float32
    config.objective = "eagle3"  # eagle1, eagle3 or mtp
    config.head = ConfigDict({
        "draft_vocab_size": 1536,  # U, the most frequent tokens of the data; 0: all
        "taps": (),  # of the target, see spec_jax.models.transformer.forward; (): as published
        "is_warm_start": True,  # begin with the target's last layer and output head
        "num_modules": 1,  # of mtp
        "protocol": "recycled",  # of mtp
    })  # fmt: skip
    config.loss = ConfigDict({
        "num_steps": 5,
        "decay": 0.8,
        "divergence": "cross-entropy",  # of eagle3, see spec_jax/train/losses.py
        "labels": "target",  # of mtp
        "noise": 0.0,  # of eagle1
        "feature_weight": 1.0,  # of eagle1
        "token_weight": 0.1,  # of eagle1
        "is_remat": False,
    })  # fmt: skip
    config.data = ConfigDict({
        "text": "stdlib",  # the library's source; else files of conversations or texts, by comma
        "text_share": 0.5,
        "tests_share": 0.25,  # of the standard library's own tests
        "held_out_share": 0.02,  # of files' documents; the library has held-out modules
        "max_length": 2048,  # tokens of a file's document; 0: all
        "responses": placeholder(str),  # JSONL that experiments.regenerate wrote
        "responses_share": 0.5,
    })  # fmt: skip
    config.steps = 1000
    config.batch = 8
    config.length = 258  # tokens of a window; two fewer are trained on
    config.optimizer = ConfigDict({
        "name": "muon", "lr": 3e-3, "matrix_lr": 0.02, "warmup": 50, "decay_share": 0.6,
        "weight_decay": 0.0, "clip": 0.5, "accumulate": 1,
    })  # fmt: skip
    config.eval = ConfigDict({
        "every": 250,
        "num_draft": 5,
        "prompts": "",  # "": held-out functions; else a file, see experiments/prompts.py
        "num_prompts": 16,
        "max_new_tokens": 64,
        "batch": 16,
        "windows": 16,
    })  # fmt: skip
    config.log_every = 10
    config.checkpoint_every_s = 120.0
    config.export_layout = "SpecForge"
    config.export_dtype = "bfloat16"
    return config
