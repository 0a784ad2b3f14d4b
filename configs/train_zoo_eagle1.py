r"""The zoo's EAGLE-1 head: smooth-L1 on the target's features, cross-entropy on its distribution.

    python -m experiments.train_head --config=configs/train_zoo_eagle1.py --workdir=runs/eagle1 \
        --config.data.responses=runs/zoo_text/responses.jsonl

The responses are made as for the EAGLE-3 head. Cost: 28 CPU-minutes. Expected: a tau of about
3.5 on the 16 functions of the evaluation.
"""

from ml_collections import ConfigDict

from configs import train_zoo_eagle3


def get_config() -> ConfigDict:
    """Returns EAGLE-3's config with another objective, whose loss has the published weights."""
    config = train_zoo_eagle3.get_config()
    config.objective = "eagle1"
    config.head.update({"draft_vocab_size": 0, "taps": (), "norm_before_residual": False})
    config.loss.noise = 0.05
    config.steps = 1500
    config.optimizer.matrix_lr = 0.02
    return config
