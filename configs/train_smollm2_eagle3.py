r"""The EAGLE-3 head of the zoo for SmolLM2, trained on text that it wrote alone, in two parts.

    python -m experiments.regenerate --workdir=runs/text_1 --config.target=zoo/smollm2 \
        --config.prompt_source=self --config.num_prompts=3000 --config.batch=64 \
        --config.min_prompt_tokens=4 --config.turns.temperature=0.8 --config.turns.top_p=1.0 \
        --config.turns.max_tokens=88 --config.turns.first_words=
    python -m experiments.regenerate --workdir=runs/text_2 --config.target=zoo/smollm2 \
        --config.prompt_source=self --config.num_prompts=2800 --config.batch=64 \
        --config.min_prompt_tokens=4 --config.turns.temperature=0.8 --config.turns.top_p=1.0 \
        --config.turns.max_tokens=88 --config.seed=1 --config.temperatures=0.0,0.7 \
        --config.max_new_tokens=128
    python -m experiments.train_head --config=configs/train_smollm2_eagle3.py \
        --workdir=runs/part_1 --config.data.responses=runs/text_1/responses.jsonl \
        --config.data.view_cache=runs/views --config.loss.num_steps=2 --config.steps=1500 \
        --config.batch=2
    python -m experiments.train_head --config=configs/train_smollm2_eagle3.py \
        --workdir=runs/part_2 --config.data.responses=runs/text_2/responses.jsonl \
        --config.data.view_cache=runs/views --config.head.init_from=runs/part_1/export \
        --config.data.has_prompt_loss

experiments.make_head does all of it in one part, and fits it to the time there is. The first text
was stopped after 1,307 answers. Cost: 46 and 48 minutes for the texts, 85 and 71 for the training,
on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import train_head_default


def get_config() -> ConfigDict:
    """Returns the default config with a draft vocabulary and windows of whole conversations."""
    config = train_head_default.get_config()
    config.target = "zoo/smollm2"
    config.head.draft_vocab_size = 8192  # of 49,152
    config.loss.num_steps = 3
    config.data.has_document_masks = True
    config.steps = 540
    config.batch = 4
    config.length = 514
    config.optimizer.matrix_lr = 0.03
    config.eval.every = 180
    config.eval.num_draft = 4
    config.export_from = "last"  # 16 prompts are too few to choose among the last states
    return config
