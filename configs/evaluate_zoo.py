"""The acceptance of the zoo's drafts on held-out text, with confidence intervals.

    python -m experiments.evaluate
    python -m experiments.evaluate --config.drafts=zoo/eagle1,runs/mine/export
    python -m experiments.evaluate --config.num_prompts=600 --config.max_new_tokens=128

Cost: about two minutes on two CPU cores; the last command decodes about 30,000 rounds per draft.
Expected: the heads and the module have a higher tau than the standalone draft.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the config; lengths are in tokens."""
    config = ConfigDict()
    config.target = "zoo/target"  # a zoo name, a Hugging Face directory or a hub id
    # Zoo names, directories or hub ids, separated by commas.
    config.drafts = "zoo/draft,zoo/eagle1,zoo/eagle3,zoo/mtp"
    config.drafter = ""  # one more, of your own: module:make, see docs/write_a_drafter.md
    config.rule = ""  # module:NAME of a rule of your own, or a name; empty: the default one
    config.dtype = "float32"  # of the weights in memory
    config.mesh = ""  # devices to run on together, such as data:2,tensor:4; empty: one
    config.is_draft_replicated = False  # keep drafts whole on every device of the mesh
    config.prompts = ""  # a file of rows, see docs/train_a_head.md; empty: held-out modules
    config.num_prompts = 64  # texts that every draft continues; more: narrower intervals
    config.prompt_tokens = 64  # length of a piece; maximum length of a file's prompts
    config.max_new_tokens = 96  # output tokens of each prompt
    config.num_draft = 5  # K, of chains
    config.temperature = 0.0  # of target and drafts
    config.batch = 32  # prompts decoded together
    config.has_costs = True  # also time a pass of each draft, at batch 1
    config.seed = 0  # chooses the prompts
    return config
