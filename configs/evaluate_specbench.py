"""Spec-Bench, or any file of questions, with a pair of Hugging Face directories.

    python -m experiments.evaluate --config=configs/evaluate_specbench.py --workdir=runs/bench \\
        --config.target=PATH --config.drafts=PATH,ngram --config.data=question.jsonl

Cost: with models of a billion parameters, a day on a CPU and hours on an accelerator; add
``--config.dtype=bfloat16`` there, and ``--config.num_prompts=80`` for a first look. A run that was
stopped goes on where it was by the same command. Expected: greedy rows are identical to plain
decoding's in float32.
"""

from ml_collections import ConfigDict

from configs import evaluate_zoo


def get_config() -> ConfigDict:
    """Returns the default config for all questions, at batches 1 to 64."""
    config = evaluate_zoo.get_config()
    config.data = "specbench"
    config.num_prompts = 0
    config.max_prompt_tokens = 1024
    config.max_new_tokens = 256
    config.batches = (1, 4, 16, 64)
    config.ks = (3, 5)
    config.has_teacher_forced = False
    return config
