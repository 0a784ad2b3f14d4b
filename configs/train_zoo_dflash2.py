r"""The zoo's DFlash 2 head: seven drafts in one pass, each chosen among sixteen by the one before.

    python -m experiments.train_head --config=configs/train_zoo_dflash2.py --workdir=runs/dflash2 \
        --config.data.responses=runs/zoo_text/responses.jsonl

Text, order and steps are those of configs/train_zoo_dflash.py. Both cross-entropies weigh the same,
as published. A step takes 2.4 CPU-seconds where DFlash's takes 1.6. Not yet run to the end.
"""

from ml_collections import ConfigDict

from configs import train_zoo_dflash


def get_config() -> ConfigDict:
    """Returns DFlash's config with another objective."""
    config = train_zoo_dflash.get_config()
    config.objective = "dflash2"
    config.head.selector_rank = 128
    config.loss.num_anchors = 36
    return config
