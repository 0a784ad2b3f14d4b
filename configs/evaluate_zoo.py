"""Methods compared with plain decoding of the same tokens: tau, acceptance, speed, by category.

    python -m experiments.evaluate
    python -m experiments.evaluate --config.drafts=zoo/eagle1,runs/mine/export,ngram
    python -m experiments.evaluate --config.data=HumanEval.jsonl.gz --config.batches=1,4,16,32
    python -m experiments.evaluate --config.num_prompts=600 --config.max_new_tokens=128

Cost: about three minutes on two CPU cores. Expected: all but zoo/dflash have a higher tau
than the standalone draft. docs/evaluate.md explains what comes out.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from spec_jax.config.sampler import options


def get_config() -> ConfigDict:
    """Returns the config; lengths are in tokens."""
    config = ConfigDict()
    config.target = "zoo/target"  # a zoo name, a Hugging Face directory or a hub id
    # Zoo names, directories or hub ids, separated by commas; "ngram" and "suffix" need no model.
    # By default, for another target: the MTP modules of its directory, if it has any, and ngram.
    config.drafts = "zoo/draft,zoo/eagle1,zoo/eagle3,zoo/mtp,zoo/dflash,zoo/dspark,ngram"
    config.drafter = ""  # a custom one: module:make, see docs/write_a_drafter.md
    config.rule = ""  # a custom one: module:NAME, see docs/write_a_rule.md, or a name
    config.dtype = "float32"  # of the weights in memory; each cell in each: float32,bfloat16
    # What speed-ups are over: "same", plain decoding in the cell's dtype, or "fastest" of all.
    config.baseline = "same"
    config.scan_layers = placeholder(bool)  # stack the layers; by default on TPUs
    config.attention = "auto"  # over caches; "xla": in blocks, up to the longest row
    config.mesh = ""  # devices to run on together, such as data:2,tensor:4; empty: one
    config.is_draft_replicated = False  # replicate drafts on the mesh
    # Questions: humaneval, gsm8k, mtbench, specbench, or a file; "pieces" or "functions" of
    # held-out modules of the standard library.
    config.data = "pieces"
    # Variables of the target's chat template, as JSON: {"enable_thinking": false}; empty: none.
    config.chat_template_kwargs = ""
    config.categories = ()  # categories or groups to choose from, such as translation; empty: all
    config.num_prompts = 32  # questions, at even distances; 0: all
    config.prompt_tokens = 64  # length of a held-out piece
    config.max_prompt_tokens = placeholder(int)  # longer prompts lose their beginning
    config.max_new_tokens = 64  # output tokens of each answer
    # Prompts decoded together, at most as many as there are; several: a curve, such as 1,4,16,64.
    config.batches = (1,)
    # Drafted tokens per round, of every draft: 3 or 2,4,8; empty: the K of each in best_k, or 3.
    config.ks = (5,)
    config.best_k = ""  # NAME=K, separated by commas
    # Trees beside the chains, separated by commas: 3x2x1, children by depth, or 59:6:10, nodes,
    # levels and children of EAGLE-2's dynamic tree.
    config.trees = ""
    config.temperatures = (0.0,)  # of target and draft; 0: greedy
    config.rules = ("residual",)  # above temperature 0; at 0 it is "greedy"
    config.copying_rules = ("match",)  # likewise, of "ngram" and "suffix"
    config.ngram_max = 3  # the longest suffix that is looked up
    config.ngram_min = 1  # the shortest
    # Filters and penalties, see SamplerConfig; temperatures and seeds are chosen apart.
    stages = {name: x.default for name, x in options().items() if "stage" in x.metadata}
    config.sampler = ConfigDict(stages)
    config.draft_temperature = placeholder(float)  # above temperature 0; by default: its own
    config.repeats = 2  # turns of each batch; their median counts
    # "group" keeps the repeats of a question together and saves each question; "spread" spreads
    # repeats over the run, against drift of the machine, and saves each temperature.
    config.order = "group"
    config.has_stream = False  # show one prompt live first
    config.has_expected = False  # also report the rule's expected acceptance, if it costs nothing
    # Also report acceptance by kind of token: whitespace, identifier, digit, punctuation, other.
    config.has_acceptance_by_kind = False
    # Also report what follows accepted first children and their siblings, and how close that comes
    # to what any rule could accept. Rounds take longer while it is counted.
    config.has_acceptance_by_place = False
    config.num_shown = 2  # questions of each category whose tokens get their probabilities
    # Decode greedy rows that differ from plain decoding once more, and say of each whether rounding
    # or a bug explains it, see docs/audit.md.
    config.has_audit = False
    config.has_teacher_forced = True  # compare greedy heads with the unrolling that trains them
    config.seed = 0  # chooses the held-out pieces, and seeds sampling
    return config
