"""The zoo on held-out functions: plain, n-gram, standalone, EAGLE and MTP decoding compared.

    python -m experiments.decode

Cost: 133 CPU-seconds, two to three minutes on two quiet cores; a second run finds the compiled
programs in the user's cache. Expected: greedy rows are identical to plain decoding's, and the heads
have the highest tau. Each speed-up has a 95 % interval over the prompts; what it does not tell from
1 is marked by a question mark. More prompts narrow it: --config.num_prompts=64.

Every value can be set on the command line, in the type that it has here:

    --config.target=PATH --config.draft=PATH      other models; --config.draft= for none
    --config.ks=3  --config.ks=2,4,8              tuples, separated by commas
    --config.methods=standalone --config.temperatures=0.7
    --config.head=PATH --config.trees=3x2x1,59:6:10    an EAGLE head; trees, dynamic ones too
    --config.sampler.top_p=0.9 --config.num_prompts=16
    --config.drafter=docs.examples.my_drafter:make --config.rule=docs.examples.my_rule:rule
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """Returns the config; lengths are in tokens."""
    config = ConfigDict()
    config.target = "zoo/target"  # a zoo name, a Hugging Face directory or a hub id
    config.draft = "zoo/draft"  # likewise; empty: no draft, so without "standalone"
    # For "eagle": zoo names, directories or hub ids of heads; "random-eagle-1", "random-eagle-3".
    config.head = "zoo/eagle1,zoo/eagle3"
    config.mtp = "zoo/mtp"  # for "mtp": likewise; "random"
    config.dtype = "float32"  # of the weights in memory
    config.scan_layers = False  # True compiles faster on accelerators, runs slower on a CPU
    config.mesh = ""  # devices to run on together, such as data:2,tensor:4; empty: one
    config.is_draft_replicated = False  # keep drafts whole on every device of the mesh
    # Prompts: humaneval, gsm8k, mtbench, specbench, or a file; empty: held-out functions.
    config.data = ""
    config.prompts = ""  # the earlier name of data; where it is given, it counts
    config.num_prompts = 16  # each batch of them is a pair of the speed-ups' intervals
    config.max_prompt_tokens = placeholder(int)  # longer prompts lose their beginning
    config.max_new_tokens = 32  # output tokens of each prompt
    config.batch = 1  # prompts decoded together
    config.methods = ("plain", "ngram", "standalone", "eagle", "mtp")  # skipped without a draft
    config.ks = (3,)  # drafted tokens per round
    # Trees beside the chains, separated by commas: 3x2x1, children by depth, or 59:6:10, nodes,
    # levels and children of EAGLE-2's dynamic tree.
    config.trees = ""
    config.temperatures = (0.0, 1.0)  # of target and draft; 0: greedy
    config.standalone_rules = ("residual",)  # above temperature 0; at 0 it is "greedy"
    config.head_rules = ("residual",)  # of "eagle" and "mtp"
    config.ngram_rules = ("match",)  # of "suffix" too
    # A drafter of your own beside the methods: module:make, see docs/write_a_drafter.md.
    config.drafter = ""
    # A rule beside the others: module:NAME of your own, see docs/write_a_rule.md, or a name.
    config.rule = ""
    config.ngram_max = 3  # the longest suffix that is looked up
    config.ngram_min = 1  # the shortest
    config.sampler = ConfigDict({
        "top_k": 0,  # keep the k likeliest tokens; 0: all
        "top_p": 1.0,  # keep the likeliest tokens up to this probability
        "min_p": 0.0,  # drop tokens below this share of the likeliest one
        "repetition_penalty": 1.0,  # divides logits of tokens in prompt and output; 1: none
        "presence_penalty": 0.0,  # subtracted from logits of tokens in the output
        "frequency_penalty": 0.0,  # subtracted once for each time in the output
    })  # fmt: skip
    config.draft_temperature = placeholder(float)  # above temperature 0; by default the target's
    config.seed = 0  # chooses the prompts, and seeds sampling
    config.repeats = 2  # turns of each batch; their median counts; of a single batch, each
    config.has_stream = True  # show one prompt live first
    config.has_expected = True  # also report the expected acceptance, where it costs nothing
    # Decode greedy rows that differ from plain decoding once more, and say of each whether rounding
    # or a bug explains it, see docs/audit.md.
    config.has_audit = False
    return config
