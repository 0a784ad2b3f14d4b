r"""The zoo's DSpark head: seven drafts in one pass, each scored again after the one before.

    python -m experiments.train_head --config=configs/train_zoo_dspark.py --workdir=runs/dspark \
        --config.data.responses=runs/zoo_text/responses.jsonl

Text, order and steps are those of configs/train_zoo_dflash.py. Cost: 32 CPU-minutes. Expected: a
tau of 2.8 on the 16 functions of the evaluation, where EAGLE-3 has 3.3 after as many steps.
"""

from ml_collections import ConfigDict

from configs import train_zoo_dflash


def get_config() -> ConfigDict:
    """Returns DFlash's config with another objective, whose loss has the published weights."""
    config = train_zoo_dflash.get_config()
    config.objective = "dspark"
    config.head.markov_rank = 128
    config.loss.num_anchors = 40
    return config
