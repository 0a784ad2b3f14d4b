"""The zoo's draft: 0.46M parameters, distilled from the zoo's target.

    python -m experiments.train_lm --config=configs/train_zoo_draft.py --workdir=runs/zoo_draft

``--config.teacher=PATH`` distils another model, a Hugging Face directory; the draft shares
its tokenizer.
"""

from ml_collections import ConfigDict

from configs import train_zoo_target


def get_config() -> ConfigDict:
    """The target's config with a smaller model, a teacher, and cheaper steps."""
    config = train_zoo_target.get_config()
    config.teacher = "zoo/target"
    config.model.update({
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    })  # fmt: skip
    config.own_share = 0.33
    config.steps = 900
    config.long_share = 0.1
    config.eval_every = 150
    return config
