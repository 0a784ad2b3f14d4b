"""A small EAGLE-3 head for the zoo's target, in minutes on two cores.

    python -m experiments.train_head --workdir=runs/my_head

Trains on the standard library's source alone. Cost: about four minutes on two CPU cores, one of
them compilation.

Any value may be given on the command line, in the type it has here:

    --config.target=PATH --config.data.text=chats.jsonl    another target, conversations or texts
    --config.objective=eagle1                              or mtp
    --config.data.responses=FILE                           of experiments.regenerate
    --config.head.init_from=PATH                           fine-tune a head that there is
    --config.steps=2000 --config.optimizer.name=adamw --config.optimizer.lr=1e-4
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
        "draft_vocab_size": 0,  # U, the data's most frequent tokens, of eagle3; 0: all
        "taps": (),  # of the target, see spec_jax.models.transformer.forward; (): as published
        "norm_before_residual": False,  # of eagle3: the residual stream begins normalised
        "is_warm_start": True,  # begin with the target's last layer and output head
        "init_from": "",  # a zoo name or a directory: go on from this head; its shape is kept
        "num_modules": 1,  # of mtp
        "protocol": "recycled",  # of mtp: one module for every draft; or sequential, one a draft
    })  # fmt: skip
    config.loss = ConfigDict({
        "num_steps": 3,  # K, of training-time test
        "decay": 0.8,  # step j counts decay ** j
        "divergence": "cross-entropy",  # of eagle3, see spec_jax/train/losses.py
        "labels": "target",  # of mtp: the target's law, or the text
        "noise": 0.0,  # on eagle1's features
        "feature_weight": 1.0,  # of eagle1
        "token_weight": 0.1,  # of eagle1
        "is_remat": False,  # keep less for the backward pass, and compute it again
    })  # fmt: skip
    config.data = ConfigDict({
        "text": "stdlib",  # the library's source; else files of conversations or texts, by comma
        "text_share": 0.5,
        "tests_share": 0.25,  # of the standard library's own tests
        "held_out_share": 0.02,  # of files' documents; the library has held-out modules
        "max_length": 2048,  # tokens of a file's document; 0: all
        "responses": placeholder(str),  # JSONL that experiments.regenerate wrote
        "responses_share": 0.5,
        "view_cache": placeholder(str),  # a folder for the target's states, shared by a sweep
        "view_cache_gb": 10.0,  # its most
    })  # fmt: skip
    config.steps = 150
    config.batch = 4
    config.length = 258  # tokens of a window; two fewer are trained on
    config.optimizer = ConfigDict({  # warmup counts updates, of accumulate steps each
        "name": "muon", "lr": 3e-3, "matrix_lr": 0.02, "warmup": 20, "decay_share": 0.6,
        "weight_decay": 0.0, "clip": 0.5, "accumulate": 1,
    })  # fmt: skip
    config.eval = ConfigDict({
        "every": 50,  # steps; 0: at the end alone
        "num_draft": 5,
        "prompts": "",  # "": held-out functions; else a file, see experiments/prompts.py
        "num_prompts": 16,
        "max_new_tokens": 64,
        "batch": 16,
        "windows": 16,
    })  # fmt: skip
    config.log_every = 10
    config.checkpoint_every_s = 120.0
    config.export_layout = ""  # of eagle3: SpecForge (the default), EAGLE-3 or speculators
    config.export_dtype = "bfloat16"
    config.export_from = "best"  # the state of the highest tau; or the last
    return config
