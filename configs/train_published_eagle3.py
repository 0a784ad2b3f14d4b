r"""EAGLE-3 with its published hyper-parameters, for a real target.

    python -m experiments.regenerate --config.target=PATH --config.prompts=chats.jsonl \
        --config.num_prompts=0 --config.max_prompt_tokens=1024 --config.max_new_tokens=1024 \
        --workdir=runs/text
    python -m experiments.train_head --config=configs/train_published_eagle3.py \
        --config.target=PATH --config.data.text=chats.jsonl \
        --config.data.responses=runs/text/responses.jsonl --workdir=runs/eagle3

Source: EAGLE-3, arXiv 2503.01840, and its training code: seven unrolled steps decayed by 0.8, a
draft vocabulary of 32,000, AdamW at 5e-5 with a warm-up of 12,000 updates of 400,000, gradients
clipped to a norm of 0.5, one window of 2,048 tokens, two accumulated, responses written by the
target.

Cost and expected result: not known, since it was never run to its end here.
"""

from ml_collections import ConfigDict

from configs import train_published_eagle1


def get_config() -> ConfigDict:
    """Returns the published values."""
    config = train_published_eagle1.get_config()
    config.objective = "eagle3"
    config.head.draft_vocab_size = 32_000
    config.loss.num_steps = 7
    config.loss.noise = 0.0
    config.loss.is_remat = True
    config.data.text_share = 0.0
    config.data.responses_share = 1.0
    config.steps = 400_000
    config.batch = 1
    config.optimizer.update({"lr": 5e-5, "warmup": 12_000, "accumulate": 2})
    config.eval.every = 2500
    return config
