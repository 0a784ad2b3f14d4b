"""Every K of the zoo's draft and head, in float32 and bfloat16, over the fastest plain decoding.

    python -m experiments.evaluate --config=configs/evaluate_dtypes.py
    python -m experiments.evaluate --config=configs/evaluate_dtypes.py --config.ks=2,4 --profile
    python -m experiments.evaluate --config=configs/evaluate_dtypes.py --config.data=humaneval

Cost: about half an hour on two quiet CPU cores, a third of it compilation. Expected: the table says
which draft, K and dtype to decode with on this machine, for text like these prompts.
"""

from ml_collections import ConfigDict

from configs import evaluate_zoo


def get_config() -> ConfigDict:
    """Returns the default config for eight functions, at every K up to 8 and batches 1 and 4."""
    config = evaluate_zoo.get_config()
    config.drafts = "zoo/draft,zoo/eagle3"
    config.dtype = "float32,bfloat16"
    config.baseline = "fastest"
    config.data = "functions"
    config.num_prompts = 8
    config.max_prompt_tokens = 256
    config.max_new_tokens = 96
    config.batches = (1, 4)
    config.ks = (1, 2, 3, 4, 5, 6, 7, 8)
    config.repeats = 5
    config.order = "spread"
    config.has_teacher_forced = False
    config.num_shown = 0
    return config
