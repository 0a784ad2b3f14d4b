r"""Recursive fine-tuning of one MTP module with FastMTP's hyper-parameters, for a real target.

    python -m experiments.train_head --config=configs/train_published_mtp.py \
        --config.target=PATH --config.head.init_from=PATH --workdir=runs/mtp \
        --config.data.responses=runs/text/responses.jsonl

``head.init_from`` is the module that ships with the target; without it a new one is trained.
``--config.export_with_target`` also writes it into a copy of the target, for servers.
Source: FastMTP, arXiv 2509.18362: three recursive steps with weights 0.6 ** j, cross-entropy on the
target's own responses. Later steps read the module's own earlier outputs, as drafting does.

Cost and expected result: not known, since it was never run to its end here.
"""

from ml_collections import ConfigDict

from configs import train_published_eagle3


def get_config() -> ConfigDict:
    """Returns the published weights of the steps, with EAGLE-3's schedule."""
    config = train_published_eagle3.get_config()
    config.objective = "mtp"
    config.head.draft_vocab_size = 0
    config.loss.update({"num_steps": 3, "decay": 0.6, "labels": "text"})
    return config
