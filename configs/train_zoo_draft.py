"""The zoo's draft: 0.46M parameters, distilled from the zoo's target.

    python -m experiments.train_lm --config=configs/train_zoo_draft.py --workdir=runs/zoo_draft

Cost: 20 CPU-minutes on two cores, 4 of them for the text that the teacher writes. Expected on
the held-out modules: KL of 0.99 nats per token, acceptance 0.53 at temperature 1.

``--config.teacher=PATH`` distils another model, a Hugging Face directory whose tokenizer the draft
shares. ``--config.divergence=acceptance`` trains the acceptance itself; see
spec_jax/train/losses.py for the others.
"""

from ml_collections import ConfigDict

from configs import train_zoo_target


def get_config() -> ConfigDict:
    """Returns the target's config with a smaller model, a teacher, and cheaper steps."""
    config = train_zoo_target.get_config()
    config.teacher = "zoo/target"
    config.model.update(
        {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    )
    config.own_share = 0.25
    config.steps = 2500
    config.batch = 4
    config.long_share = 0.1
    config.long_batch = 1
    config.optimizer.update({"matrix_lr": 0.015, "warmup": 100, "decay_share": 0.8})
    config.eval_every = 500
    config.eval_prompts = 16
    config.log_every = 50
    return config
