"""An EAGLE-3 head for a target, from the target alone: text, training, evaluation, export.

    python -m experiments.make_head --workdir=runs/head
    python -m experiments.make_head --workdir=DIR --config.target=PATH --config.minutes=60

Cost: the minutes that are given. Expected: a head that the last lines load, here and in servers.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """Returns the config; what is None is chosen for the target and the machine, and said."""
    config = ConfigDict()
    config.target = "zoo/target"  # a zoo name, a Hugging Face directory, a GGUF file or a hub id
    config.minutes = 60.0  # of everything: the text, the training, the evaluation
    config.objective = "eagle3"  # or eagle1, mtp, dspark, ... of experiments.train_head
    config.draft_vocab_size = placeholder(int)  # U; by default 8192, or all of fewer ids; 0: all
    config.k = 4  # drafted tokens a round, in training, evaluation and the export
    # Of the text, see experiments.regenerate; by default "self", a file if ``prompts`` names one,
    # and for the zoo's target the library that it was trained on.
    config.prompt_source = placeholder(str)
    config.prompts = ""  # a file of prompts or conversations
    config.first_words = "english"  # of the turns that the target writes: or a file, or empty
    config.max_new_tokens = 192  # maximum output tokens of a response
    config.num_prompts = placeholder(int)  # by default as many as there is time for
    config.steps = placeholder(int)  # of training, likewise
    config.epochs = 3.0  # how often each token of the text is trained on
    config.rows = placeholder(int)  # decoded together for the text; by default 32, 512 off a CPU
    config.batch = placeholder(int)  # windows of a step; by default 4, 32 off a CPU
    config.length = placeholder(int)  # tokens of a window; by default 258, 1026 off a CPU
    config.num_questions = 16  # prompts held out, on which the head is evaluated
    config.seed = 0  # of the text and of the first weights
    return config
