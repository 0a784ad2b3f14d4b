r"""The zoo's TreeFlash head: DFlash, whose states are corrected by the token before.

    python -m experiments.train_head --config=configs/train_zoo_treeflash.py \
        --workdir=runs/treeflash --config.data.responses=runs/zoo_text/responses.jsonl

Text, order, steps and cost are those of configs/train_zoo_dflash.py. A third of the loss is that of
the distributions that do not know the token before, from which the authors' trees take their
candidates; how their heads were trained is not known here. Cost: 28 CPU-minutes. Expected:
a tau of 2.9 on the 16 functions of the evaluation.
"""

from ml_collections import ConfigDict

from configs import train_zoo_dflash


def get_config() -> ConfigDict:
    """Returns DFlash's config with another objective."""
    config = train_zoo_dflash.get_config()
    config.objective = "treeflash"
    config.loss.num_anchors = 36
    return config
