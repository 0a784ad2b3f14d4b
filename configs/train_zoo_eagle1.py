r"""The zoo's EAGLE-1 head: the target's next feature by smooth-L1, its law by cross-entropy.

    python -m experiments.train_head --config=configs/train_zoo_eagle1.py --workdir=runs/eagle1 \
        --config.data.responses=runs/zoo_text/responses.jsonl
"""

from ml_collections import ConfigDict

from configs import train_zoo_eagle3


def get_config() -> ConfigDict:
    """EAGLE-3's with another objective; its loss has the published weights."""
    config = train_zoo_eagle3.get_config()
    config.objective = "eagle1"
    config.head.update({"draft_vocab_size": 0, "taps": (), "norm_before_residual": False})
    config.loss.noise = 0.05
    config.steps = 1500
    config.optimizer.matrix_lr = 0.02
    return config
