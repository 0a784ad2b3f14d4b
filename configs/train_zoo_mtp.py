r"""The zoo's MTP module: one module for all drafts, unrolled three times.

    python -m experiments.train_head --config=configs/train_zoo_mtp.py --workdir=runs/mtp \
        --config.data.responses=runs/zoo_text/responses.jsonl

The responses are made as for the EAGLE-3 head. Cost: 23 CPU-minutes.
Expected: a tau of about
3.1 on the 16 functions of the evaluation.
"""

from ml_collections import ConfigDict

from configs import train_zoo_eagle3


def get_config() -> ConfigDict:
    """Returns EAGLE-3's config with another objective."""
    config = train_zoo_eagle3.get_config()
    config.objective = "mtp"
    config.head.update({"draft_vocab_size": 0, "taps": (), "norm_before_residual": False})
    config.loss.decay = 0.6
    config.steps = 600
    return config
