r"""The zoo's P-EAGLE head: seven drafts in one pass of an EAGLE-3 head of two layers.

    python -m experiments.train_head --config=configs/train_zoo_peagle.py --workdir=runs/peagle \
        --config.data.responses=runs/zoo_text/responses.jsonl

Text, order and steps are those of configs/train_zoo_dflash.py; draft weights are the published
ones. Not yet run to the end.
"""

from ml_collections import ConfigDict

from configs import train_zoo_dflash


def get_config() -> ConfigDict:
    """Returns DFlash's config with another objective."""
    config = train_zoo_dflash.get_config()
    config.objective = "peagle"
    config.head.update({"num_layers": 2, "max_draft": 7})
    config.loss.update({"decay": 0.7, "num_anchors": 64})
    return config
