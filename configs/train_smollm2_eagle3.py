r"""The EAGLE-3 head of the zoo for SmolLM2, trained on text that it wrote alone.

    python -m experiments.regenerate --workdir=runs/smollm2_text --config.target=zoo/smollm2 \
        --config.prompt_source=self --config.num_prompts=3000 --config.batch=64 \
        --config.min_prompt_tokens=4 --config.turns.temperature=0.8 --config.turns.top_p=1.0 \
        --config.turns.max_tokens=88
    python -m experiments.train_head --config=configs/train_smollm2_eagle3.py \
        --workdir=runs/smollm2_eagle3 \
        --config.data.responses=runs/smollm2_text/responses.jsonl \
        --config.data.view_cache=runs/views

experiments.make_head does both and fits them to the time there is. The text was stopped after 1,307
answers. --config.head.init_from=zoo/smollm2-eagle3 goes on from the head. Cost: about 46 and 85
minutes on two CPU cores. Expected: tau 1.99 on held-out prompts that the target wrote.
"""

from ml_collections import ConfigDict

from configs import train_head_default


def get_config() -> ConfigDict:
    """Returns the default config with a draft vocabulary and windows of whole conversations."""
    config = train_head_default.get_config()
    config.target = "zoo/smollm2"
    config.head.draft_vocab_size = 8192  # of 49,152; omits 3.7 % of the tokens
    config.loss.num_steps = 2
    config.data.has_document_masks = True
    config.steps = 1500
    config.batch = 2
    config.length = 514
    config.optimizer.matrix_lr = 0.03
    config.eval.every = 500
    config.eval.num_draft = 4
    config.export_from = "last"  # 16 prompts are too few to choose among the last states
    return config
