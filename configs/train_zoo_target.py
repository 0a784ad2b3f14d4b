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
    config.seed = 0  # of the first weights and of the order of the data
    config.mesh = ""  # devices to train on together, such as data:4,tensor:2; empty: one
    config.is_fully_sharded = False  # split weights and optimizer states over the data axis too
    config.teacher = placeholder(str)  # distil from this zoo name or Hugging Face directory
    config.divergence = "forward-kl"  # from the teacher, see spec_jax/train/losses.py
    config.ce_weight = 0.0  # of cross-entropy on the text, added to the divergence
    config.own_share = 0.0  # of windows that the teacher wrote
    config.own_batches = 24  # batches of windows that the teacher writes before training
    config.own_batch = 32  # windows of each
    config.own_prompt = 48  # tokens of the training text that it continues
    config.vocab_size = 2048  # of the tokenizer that is trained; a teacher brings its own
    config.data = ConfigDict(
        {  # every token is trained on, see train_head_default.py
            "text": "stdlib",  # the library's source; or files and folders, comma-separated
            "tests_share": 0.25,  # of the standard library's own tests
            "held_out_share": 0.02,  # of the files' documents; the library has held-out modules
            # Variables of the chat template, as JSON: {"enable_thinking": false}; empty: none.
            "chat_template_kwargs": "",
            "max_length": 0,  # longer documents of files are left out; 0: none, windows cut them
        }
    )
    config.model = ConfigDict(
        {
            "model_type": "llama",  # the family; all keys as in a config.json
            "hidden_size": 256,  # width
            "intermediate_size": 544,  # width within the feed-forward layers
            "num_hidden_layers": 8,  # layers
            "num_attention_heads": 8,  # query heads
            "num_key_value_heads": 4,  # key-value heads; fewer: each serves several queries
            "head_dim": 32,  # width of a head
            "max_position_embeddings": 1024,  # maximum tokens of a text
            "tie_word_embeddings": True,  # whether embedding and output share their weights
        }
    )
    config.model_json = ""  # or, in place of all of this, a config.json of any family
    config.steps = 1400  # training steps of the whole run
    config.batch = 12  # windows of a step
    config.length = 256  # tokens of a window
    config.long_share = 0.12  # the last part of the run, on longer windows
    config.long_batch = 3  # windows of a step in that part
    config.long_length = 1024  # tokens of a window in that part
    config.optimizer = ConfigDict(
        {
            "name": "muon",  # muon or adamw
            "lr": 3e-3,  # peak rate of adamw, and in muon of what is no matrix
            "matrix_lr": 0.02,  # peak rate of muon's matrices
            "warmup": 60,  # updates of rising rates
            "decay_share": 0.4,  # the last part of the run, with falling rates
            "weight_decay": 0.0,  # share that an update takes off the weights, times the rate
            "clip": 1.0,  # maximum norm of the gradient
        }
    )
    config.eval_batch = 8  # held-out windows evaluated together
    config.eval_length = 512  # tokens of a held-out window
    config.eval_windows = 16  # during training; the final figures use all windows
    config.eval_every = 200  # steps between two evaluations
    config.eval_prompts = 0  # held-out prompts on which a distilled draft is measured
    config.eval_prompt_tokens = 256  # maximum tokens of a prompt of a held-out text
    config.eval_new_tokens = 64  # output tokens of each
    config.eval_num_draft = 5  # K when tau is measured
    config.log_every = 10  # steps between two lines of metrics.jsonl
    config.checkpoint_every_s = 180  # seconds between two checkpoints
    return config
