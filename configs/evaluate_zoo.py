"""What the zoo's drafts are worth on held-out text, with intervals.

    python -m experiments.evaluate
    python -m experiments.evaluate --config.drafts=zoo/eagle1,runs/mine/export
    python -m experiments.evaluate --config.num_prompts=600 --config.max_new_tokens=128

Cost: about two minutes on two CPU cores; the last command decodes some 30,000 rounds a draft.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Lengths are in tokens."""
    config = ConfigDict()
    config.target = "zoo/target"  # a zoo name or a Hugging Face directory
    config.drafts = "zoo/draft,zoo/eagle1,zoo/eagle3,zoo/mtp"  # names or directories
    config.dtype = "float32"  # of the weights in memory
    config.prompts = ""  # a file, see experiments/prompts.py; empty: pieces of held-out modules
    config.num_prompts = 64
    config.prompt_tokens = 64  # of a piece; of a file's prompts the most
    config.max_new_tokens = 96
    config.num_draft = 5  # K, chains
    config.temperature = 0.0  # of target and drafts
    config.batch = 32  # prompts decoded together
    config.has_costs = True  # time a pass of each, at batch 1
    config.seed = 0
    return config
