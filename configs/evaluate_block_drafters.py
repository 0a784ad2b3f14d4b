"""Drafters of a block: chains and trees, rules, and what their step contributes.

    python -m experiments.evaluate --config=configs/evaluate_block_drafters.py \
        --config.drafts=runs/dspark/export,runs/dspark_base,runs/dflash/export,runs/treeflash/export
    python -m experiments.evaluate --config=configs/evaluate_block_drafters.py \
        --config.drafts=... --config.draft_temperature=1

One run compares chains with trees, `block` and `traversal` with `residual`, and shows what follows
an accepted sibling, where drafts that do not know each other are often wrong. A head without its
step, as runs/dspark_base, is made by `without_step(head)` of `spec_jax.drafters.block.steps`.
It drafts the likeliest tokens, as DFlash does; with --config.draft_temperature=1 all heads sample.

Cost: about ten minutes for two heads on two CPU cores, most of it compilation. Expected: the step
raises tau, most of all after a sibling. Publish figures of --config.num_prompts=700, and speeds of
--config.has_acceptance_by_place=False, since counting by place takes time in the rounds.
"""

from ml_collections import ConfigDict

from configs import evaluate_zoo


def get_config() -> ConfigDict:
    """Returns the default config for few prompts, at temperatures 0 and 1."""
    config = evaluate_zoo.get_config()
    config.drafts = "runs/dspark/export,runs/dspark_base"
    config.num_prompts = 24
    config.max_new_tokens = 48
    config.ks = (7,)
    config.trees = "3x2x1"
    config.temperatures = (0.0, 1.0)
    config.rules = ("residual", "block", "traversal")
    config.has_acceptance_by_place = True
    config.repeats = 1
    config.num_shown = 0
    config.has_teacher_forced = False
    return config
