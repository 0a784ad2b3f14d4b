r"""The zoo's DFlash head: seven drafts in one pass, none of which knows the others.

    python -m experiments.train_head --config=configs/train_zoo_dflash.py --workdir=runs/dflash \
        --config.data.responses=runs/zoo_text/responses.jsonl

The responses are made as for the EAGLE-3 head. Text, order, steps and cost are those of
configs/train_zoo_eagle3.py with --config.steps=1000: num_anchors is chosen so that a step takes as
many CPU-seconds, 1.6: 27 CPU-minutes. Expected: a tau of 2.3 on the 16 functions of the evaluation.
"""

import math

from ml_collections import ConfigDict

from configs import train_zoo_eagle3


def get_config() -> ConfigDict:
    """Returns EAGLE-3's config with another objective, of two layers and blocks of eight."""
    config = train_zoo_eagle3.get_config()
    config.objective = "dflash"
    config.head.update({"draft_vocab_size": 0, "norm_before_residual": False})
    config.loss.decay = math.exp(-1 / 4)
    config.loss.num_anchors = 64
    config.steps = 1000
    config.eval.num_draft = 7
    return config
