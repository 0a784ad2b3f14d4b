r"""EAGLE-1 with its published hyper-parameters, for a real target.

    python -m experiments.train_head --config=configs/train_published_eagle1.py \
        --config.target=PATH --config.data.text=sharegpt.jsonl --workdir=runs/eagle1

Source: EAGLE, arXiv 2401.15077, and its training code: AdamW at 3e-5 with a warm-up of 2,000
steps of 800,000, four windows of 2,048 tokens per step, features with noise of width 0.2, fixed
texts of ShareGPT. The original clips each gradient value at 0.5, we clip the norm.

Cost and expected result: not known, since it was never run to its end here.
"""

from ml_collections import ConfigDict

from configs import train_head_default


def get_config() -> ConfigDict:
    """Returns the published values; the rate is constant from the warm-up until near the end."""
    config = train_head_default.get_config()
    config.dtype = "bfloat16"
    config.objective = "eagle1"
    config.head.is_warm_start = False
    config.loss.noise = 0.2
    config.data.text_share = 1.0
    config.steps = 800_000
    config.batch = 4
    config.length = 2048  # tokens of a window, of which all but two are trained on
    config.optimizer.update(
        {"name": "adamw", "lr": 3e-5, "warmup": 2000, "decay_share": 0.01, "clip": 0.5}
    )
    config.eval.update({"every": 5000, "num_prompts": 64, "max_new_tokens": 256})
    config.checkpoint_every_s = 900.0
    return config
