"""Any pair of Hugging Face directories on the questions of Spec-Bench, or on any prompts file.

    python -m experiments.decode --config=configs/decode_specbench.py \\
        --config.target=PATH --config.drafts=PATH,ngram --config.data=question.jsonl

Cost: with models of a billion parameters, hours on a CPU and minutes on an accelerator; add
``--config.dtype=bfloat16`` there. Expected: greedy rows are identical to plain decoding's in
float32; in bfloat16, rounding can change a few of them, and the report shows how close the two best
tokens were.
"""

from ml_collections import ConfigDict

from configs import decode_default


def get_config() -> ConfigDict:
    """Returns the default config for longer prompts; set target and draft."""
    config = decode_default.get_config()
    config.target = ""
    config.drafts = "ngram"
    config.data = "specbench"
    config.num_prompts = 13  # one per category
    config.max_prompt_tokens = 384
    config.max_new_tokens = 128
    return config
