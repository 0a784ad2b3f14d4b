"""The zoo's target: 5.4M parameters, trained on the standard library's source.

    python -m experiments.train_lm --config=configs/train_zoo_target.py --workdir=runs/zoo_target

Cost: 66 CPU-minutes on two cores, about 35 minutes if nothing else runs. Expected on the held-out
modules: 3.10 nats per token, 1.48 bits per byte. On Linux, GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in
the environment saves a tenth of the time in page faults.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """Returns the config; sizes are in tokens and steps, learning rates are peak rates."""
    config = ConfigDict()
    config.seed = 0
    config.mesh = ""  # devices to train on together, such as data:4,tensor:2; empty: one
    config.is_fully_sharded = False  # split weights and optimizer states over the data axis too
    config.teacher = placeholder(str)  # distil from this zoo name or Hugging Face directory
    config.divergence = "forward-kl"  # from the teacher, see spec_jax/train/losses.py
    config.ce_weight = 0.0  # of cross-entropy on the text, added to the divergence
    config.own_share = 0.0  # of windows that the teacher wrote
    config.own_batches = 24
    config.own_batch = 32
    config.own_prompt = 48  # tokens of the training text that it continues
    config.vocab_size = 2048
    config.data = ConfigDict({  # every token is trained on, see train_head_default.py
        "text": "stdlib",  # the library's source; or files and folders of texts or conversations
        "tests_share": 0.25,  # of the standard library's own tests
        "held_out_share": 0.02,  # of the files' documents; the library has held-out modules
        "max_length": 0,  # longer documents of files are left out; 0: none, windows cut them
    })  # fmt: skip
    config.model = ConfigDict({
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 544,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    })  # fmt: skip
    config.steps = 1400
    config.batch = 12
    config.length = 256
    config.long_share = 0.12  # the last part of the run, on longer windows
    config.long_batch = 3
    config.long_length = 1024
    config.optimizer = ConfigDict({
        "name": "muon", "lr": 3e-3, "matrix_lr": 0.02, "warmup": 60, "decay_share": 0.4,
        "weight_decay": 0.0, "clip": 1.0,
    })  # fmt: skip
    config.eval_batch = 8
    config.eval_length = 512
    config.eval_windows = 16  # during training; the final figures use all windows
    config.eval_every = 200
    config.eval_prompts = 0  # held-out prompts on which a distilled draft is measured
    config.eval_prompt_tokens = 256  # maximum tokens of a prompt of a held-out text
    config.eval_new_tokens = 64
    config.eval_num_draft = 5
    config.log_every = 10
    config.checkpoint_every_s = 180
    return config
