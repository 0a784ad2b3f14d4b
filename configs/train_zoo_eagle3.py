r"""The zoo's EAGLE-3 head, trained with training-time test, half on the target's own text.

    python -m experiments.regenerate --config=configs/regenerate_zoo.py --workdir=runs/zoo_text
    python -m experiments.train_head --config=configs/train_zoo_eagle3.py --workdir=runs/eagle3 \
        --config.data.responses=runs/zoo_text/responses.jsonl

What the paper leaves out, one at a time: --config.loss.num_steps=1 (no training-time test) and
--config.head.taps=8, (the state behind the last layer alone, no fused features).
"""

from ml_collections import ConfigDict

from configs import train_head_default


def get_config() -> ConfigDict:
    """The default with more steps and a draft vocabulary."""
    config = train_head_default.get_config()
    config.head.draft_vocab_size = 1792  # leaves 0.4 % of the tokens out; 1536 would 2.6 %
    config.head.taps = (2, 5, 8)  # of eight layers the published rule leaves the last three out
    config.head.norm_before_residual = True  # else the target's last state drowns the layer's
    config.loss.num_steps = 3
    config.steps = 1000
    config.batch = 8
    config.optimizer.matrix_lr = 0.05
    config.optimizer.warmup = 50
    config.eval.every = 250
    return config
