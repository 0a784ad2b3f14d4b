r"""Recursive fine-tuning of one MTP module at FastMTP's hyper-parameters, for a real target.

    python -m experiments.train_head --config=configs/train_published_mtp.py \
        --config.target=PATH --config.head.init_from=PATH --workdir=runs/mtp \
        --config.data.responses=runs/text/responses.jsonl

``head.init_from`` is the module that ships with the target; without it a fresh one is trained.
Source: FastMTP, arXiv 2509.18362: three recursive steps weighted 0.6 ** j, cross-entropy on the
target's own responses. Here later steps read the module's own earlier ones, as drafting does.
Never run to its end here.
"""

from ml_collections import ConfigDict

from configs import train_published_eagle3


def get_config() -> ConfigDict:
    """The published weights of the steps, on EAGLE-3's schedule."""
    config = train_published_eagle3.get_config()
    config.objective = "mtp"
    config.head.draft_vocab_size = 0
    config.loss.update({"num_steps": 3, "decay": 0.6, "labels": "text"})
    return config
