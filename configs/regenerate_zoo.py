"""The zoo's target continues pieces of its training text: data for training heads.

    python -m experiments.regenerate --config=configs/regenerate_zoo.py --workdir=runs/zoo_text

Cost: about ten minutes on two CPU cores, at about 600 tokens per second. Expected: responses.jsonl
with 2,000 lines, of which one in forty ends at a stop token; every round of a row is useful until
the last prompt has been taken.

    --config.prompts=FILE.jsonl      prompts, see comparison/prompts.py, or conversations
    --config.target=PATH --config.temperatures=0.0,1.0
    --config.draft=PATH --config.k=4   a draft or a head for speed, or "ngram", ...
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from spec_jax.config.sampler import options


def get_config() -> ConfigDict:
    """Returns the config; lengths are in tokens."""
    config = ConfigDict()
    config.target = "zoo/target"  # a zoo name, a Hugging Face directory or a hub id
    config.draft = ""  # likewise, or a head, "ngram", "suffix", "self:N"; empty: none
    config.k = 2  # drafted tokens per round, if there is a draft
    config.rule = ""  # a lossless rule; empty: the default of the draft
    config.dtype = "float32"  # of the weights in memory
    config.scan_layers = placeholder(bool)  # stack the target's layers; by default on TPUs
    config.attention = "auto"  # over caches; "xla": in blocks, up to the longest row
    config.mesh = ""  # devices to run on together, such as data:2,tensor:4; empty: one
    config.is_draft_replicated = False  # replicate drafts on the mesh
    # "file"; "library", pieces of the standard library's training split; or "self": the target
    # writes them, see docs/train_a_head.md. By default a file if ``prompts`` names one.
    config.prompt_source = placeholder(str)
    config.prompts = ""  # a file of prompts or conversations
    config.turns = ConfigDict(  # how the target writes prompts
        {
            # Maximum tokens; by default 128, and 64 without a chat template.
            "max_tokens": placeholder(int),
            "temperature": 1.0,  # they are sampled
            "top_p": 0.95,  # likewise, see SamplerConfig
            # First words of each turn: "english", a list of ours; a file with one entry per line;
            # or empty, where the target writes whole turns, most of which begin alike.
            "first_words": "english",
            "share_of_time": 0.35,  # where there are ``minutes``
        }
    )
    # Variables of the target's chat template, as JSON: {"enable_thinking": false}; empty: none.
    config.chat_template_kwargs = ""
    config.held_out_share = 0.02  # of conversations, skipped: those that train_head holds out
    # 0: all of a file; may change between runs. Of those that the target writes some are left out.
    config.num_prompts = 2000
    config.min_prompt_tokens = 8  # of the pieces, and of what the target writes
    # Of the pieces; longer prompts of a file are skipped. Default: 64, and no limit for a file.
    config.max_prompt_tokens = placeholder(int)
    config.tests_share = 0.25  # of the standard library's own tests
    config.max_new_tokens = 192  # maximum output tokens of a response
    config.temperatures = (0.0, 1.0)  # prompt i has number i modulo their count
    # Filters and penalties, see SamplerConfig; temperatures and seeds are chosen apart.
    stages = {name: x.default for name, x in options().items() if "stage" in x.metadata}
    config.sampler = ConfigDict(stages)
    # Chooses the pieces. Temperature number i samples with seed + i, and anew for each prompt.
    config.seed = 0
    config.batch = 32  # rows decoded together; in float32 it may change between runs
    # Rows that end before others take their places; by default one. On an accelerator, where many
    # prompts are fed in the time of one, more than half of the batch.
    config.refill = placeholder(int)
    config.minutes = placeholder(float)  # time after which the run ends; the same command goes on
    config.log_every_s = 10  # between lines of progress
    return config
