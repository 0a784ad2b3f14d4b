r"""The EAGLE-3 head of the zoo for SmolLM2, trained on text that it wrote alone, in three parts.

    python -m experiments.regenerate --workdir=runs/text_1 --config.target=zoo/smollm2 \
        --config.prompt_source=self --config.batch=64 --config.turns.temperature=0.8 \
        --config.turns.top_p=1.0 --config.min_prompt_tokens=4 --config.num_prompts=3000 \
        --config.turns.max_tokens=88 --config.turns.first_words=
    python -m experiments.regenerate --workdir=runs/text_2 --config.target=zoo/smollm2 \
        --config.prompt_source=self --config.batch=64 --config.turns.temperature=0.8 \
        --config.turns.top_p=1.0 --config.min_prompt_tokens=4 --config.num_prompts=2800 \
        --config.turns.max_tokens=88 --config.seed=1 --config.temperatures=0.0,0.7 \
        --config.max_new_tokens=128
    python -m experiments.regenerate --workdir=runs/text_3 --config.target=zoo/smollm2 \
        --config.prompt_source=self --config.batch=64 --config.turns.temperature=0.8 \
        --config.turns.top_p=1.0 --config.min_prompt_tokens=4 --config.num_prompts=4000 \
        --config.turns.max_tokens=144 --config.seed=2 --config.temperatures=0.0,0.0,0.7 \
        --config.max_new_tokens=128 --config.minutes=42 --config.turns.share_of_time=0.42
    python -m experiments.regenerate --workdir=runs/text_4 --config.target=zoo/smollm2 \
        --config.prompt_source=self --config.batch=64 --config.turns.temperature=0.8 \
        --config.turns.top_p=1.0 --config.min_prompt_tokens=24 --config.num_prompts=420 \
        --config.turns.max_tokens=192 --config.seed=3 --config.temperatures=0.0,0.0,0.7 \
        --config.max_new_tokens=96 --config.minutes=11 --config.turns.share_of_time=0.55 \
        --config.turns.first_words=configs/passages.txt
    cat runs/text_3/responses.jsonl runs/text_4/responses.jsonl > runs/text_3_4.jsonl
    python -m experiments.train_head --config=configs/train_smollm2_eagle3.py \
        --workdir=runs/part_1 --config.data.view_cache=runs/views_1 \
        --config.data.responses=runs/text_1/responses.jsonl --config.loss.num_steps=2 \
        --config.steps=1500 --config.batch=2
    python -m experiments.train_head --config=configs/train_smollm2_eagle3.py \
        --workdir=runs/part_2 --config.data.view_cache=runs/views_2 \
        --config.data.responses=runs/text_2/responses.jsonl --config.steps=540 \
        --config.head.init_from=runs/part_1/export --config.data.has_prompt_loss
    python -m experiments.train_head --config=configs/train_smollm2_eagle3.py \
        --workdir=runs/part_3 --config.data.view_cache=runs/views_3 \
        --config.data.responses=runs/text_3_4.jsonl --config.head.has_new_ids \
        --config.head.init_from=runs/part_2/export --config.data.has_prompt_loss \
        --config.data.text=runs/text_1/responses.jsonl,runs/text_2/responses.jsonl \
        --config.data.text_share=0.02 --config.data.responses_share=0.98

The zoo's head began with the target's last layer; a new one begins with a map of least squares, and
learned more with --config.optimizer.matrix_lr=0.02 --config.optimizer.lr=0.002.
experiments.make_head does all of it in one part, and fits it to the time there is. The first text
was stopped after 1,307 answers, the third after 1,083. The texts of part 3 that are hardly trained
on choose its ids, with the others. The card, spec_jax/zoo/MODEL_CARD.md, has what it took.
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
    config.steps = 300
    config.batch = 4
    config.length = 514
    config.optimizer.matrix_lr = 0.03
    config.eval.every = 150
    config.eval.num_draft = 4
    config.export_from = "last"  # 16 prompts are too few to choose among the last states
    return config
