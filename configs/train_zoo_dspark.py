r"""The zoo's DSpark head: eight drafts in one pass, each scored again after the one before.

    python -m experiments.train_head --config=configs/train_zoo_dspark.py --workdir=runs/dspark \
        --config.data.responses=runs/zoo_text/responses.jsonl
    python -m experiments.train_head --config=configs/train_zoo_dspark.py \
        --workdir=runs/dspark_on --config.data.responses=runs/zoo_text/responses.jsonl \
        --config.seed=2 --config.head.init_from=runs/dspark/export --config.steps=3500 \
        --config.optimizer.matrix_lr=0.03 --config.optimizer.lr=0.002 \
        --config.optimizer.decay_share=0.9 --config.eval.every=500

Text, order and steps of the first command are those of configs/train_zoo_dflash.py. Its drafts
learn the target's distribution. Cost: 28 to 32 CPU-minutes. Expected: a tau of 2.9 to 3.0 on the 16
functions of the evaluation, where EAGLE-3 has 3.3 to 3.5 after as many steps, DFlash 2.3, and
DSpark with the published weights 2.8 (--config.loss.text_weight=0.1 --config.loss.target_weight=0
--config.loss.l1_weight=0.9). The second command continues from the first, with other windows; its
result is in the zoo. Cost: 95 CPU-minutes. Expected: 3.5.
"""

from ml_collections import ConfigDict

from configs import train_zoo_dflash


def get_config() -> ConfigDict:
    """Returns DFlash's config with another objective, which learns the target's distribution."""
    config = train_zoo_dflash.get_config()
    config.objective = "dspark"
    config.head.markov_rank = 128
    config.loss.num_anchors = 40
    config.loss.update({"text_weight": 0.0, "target_weight": 1.0, "l1_weight": 0.0})
    return config
