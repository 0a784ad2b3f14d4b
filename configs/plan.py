"""A deployment planned without its hardware: what fits, what a round moves, which K pays.

    pip install -e '.[tpu]'  # for GPUs '.[plan-gpu]', which needs neither CUDA nor a device
    python -m experiments.plan --config.target=llama-3.1-8b --config.topology=v5e:2x4
    python -m experiments.plan --config.draft=eagle3 --config.num_draft=1,3,5 \\
        --config.batch=8,32,128 --config.topology=v5e:2x4,v5p:2x2x1 --config.acceptance=0.75
    python -m experiments.plan --config.program=train --config.is_fully_sharded \\
        --config.target=llama-3.2-1b --config.draft= --config.length=1024

Cost: 5 to 120 CPU-seconds for each program, 150 for a training step of an eagle3 head, and
about 2 GB of memory. With several values, each combination is one
program, beside plain decoding's; what a run's folder holds is not compiled again. Expected: a
table, report.md and plan.png; small batches gain from drafts, large ones lose.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the config. Lists are text with commas."""
    config = ConfigDict()
    config.target = "llama-3.1-8b"  # a preset, or a Hugging Face directory or its config.json
    config.draft = "llama-3.2-1b"  # likewise; or eagle3, mtp, self:8, ngram; empty: plain
    config.draft_vocab_size = 32000  # U, of an eagle3 head
    # Or prefill; or train: a step of an eagle3 or mtp draft, else of the target.
    config.program = "decode"
    config.topology = "v5e:2x4"  # chips and their shape, or GPUs, such as h100:8; with commas
    # Such as data:2,tensor:4. Empty: the one with the best floor (with a tree, of plain decoding);
    config.mesh = ""  # in training, all along data.
    config.is_draft_replicated = False  # replicate the draft on the mesh
    config.batch = "8"  # rows over all devices; in training, windows
    config.slots = "2048"  # S, slots of the cache for each row; of prefill, tokens of a prompt
    config.prefill_chunk = "512"  # of prefill, tokens of a prompt that a pass has at most
    config.prompt_tokens = 0  # in decoding, of each request of a queue; 0: no queue is reported
    config.new_tokens = 256  # ... that each of these requests emits
    config.length = "2048"  # in training, tokens of a window
    config.is_fully_sharded = False  # in training, split weights and moments over data too
    config.num_steps = 7  # in training a head, K of training-time test
    config.has_document_masks = False  # in training a head, windows hold several documents
    config.is_remat = True  # in training a head, compute its activations again, not store them
    config.num_draft = "5"  # K, of chains; ignored with a tree
    config.tree = ""  # children by depth, such as 3,2,1; or a dynamic tree, 59:6:10 (see decode)
    config.dtype = "bfloat16"  # of weights and caches
    config.temperature = 0.0  # of target and draft
    config.top_k = 0  # 0: off
    config.acceptance = "0.8"  # rate at each position; the last one holds for all after it
    # ... or a report of experiments.decode or .evaluate that measured them: PATH, or PATH:ROW
    config.is_compiled = True  # compile the programs; False: the analytic floors alone
    return config
