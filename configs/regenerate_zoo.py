"""The zoo's target goes on with pieces of its training text: what heads learn from.

python -m experiments.regenerate --config=configs/regenerate_zoo.py --workdir=runs/zoo_text

Cost: about ten minutes on two CPU cores, at some 600 tokens a second. Expected: responses.jsonl
with 2,000 lines, one in forty ended by a stop token; every row-round useful until the last prompt
is taken.

    --config.prompts=FILE.jsonl      prompts, see experiments/prompts.py, or conversations
    --config.target=PATH --config.temperatures=0.0,1.0
    --config.draft=PATH --config.k=4   a draft for speed; also "ngram", "suffix", or empty for none
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Lengths are in tokens."""
    config = ConfigDict()
    config.target = "zoo/target"  # a zoo name or a Hugging Face directory
    config.draft = ""  # likewise, "ngram" or "suffix"; empty: plain decoding
    config.k = 2  # drafted tokens a round, where there is a draft
    config.rule = ""  # a lossless one; empty: the draft's default
    config.dtype = "float32"  # of the weights in memory
    config.scan_layers = False  # True compiles faster on accelerators, runs slower on a CPU
    config.prompts = ""  # a file; empty: pieces of the standard library's training split
    config.held_out_share = 0.02  # of conversations, left out: those that train_head holds out
    config.num_prompts = 2000  # 0: all of a file; may change between runs
    config.min_prompt_tokens = 8  # of the pieces
    config.max_prompt_tokens = 64  # a file's longer prompts are left out
    config.tests_share = 0.25  # of the standard library's own tests
    config.max_new_tokens = 192
    config.temperatures = (0.0, 1.0)  # prompts take turns
    config.sampler = ConfigDict({
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    })  # fmt: skip
    config.seed = 0  # of the pieces, and of sampling: prompt i has seed + i
    config.batch = 32  # rows decoded together; may change between runs
    config.log_every_s = 10
    return config
