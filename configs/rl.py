"""GRPO on the zoo's target, with a reward that Python's own parser gives.

    python -m experiments.rl --workdir=runs/rl
    python -m experiments.rl --workdir=runs/rl_eagle3 --config.drafter=zoo/eagle3

Prompts are the first lines of the standard library's functions; the reward is the share of the
output's lines up to which the text parses.

Cost: 8 CPU-seconds a step, 8 CPU-minutes in all. Expected: the reward rises from 0.3 to 0.5 in 26
steps. On a CPU 64 rows are faster without drafts: --config.drafter=none.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Returns the config; sizes are in tokens."""
    config = ConfigDict()
    config.seed = 0  # of the rollouts and of the order of the prompts
    config.target = "zoo/target"  # the model to train: a zoo name, a directory or a hub id
    config.dtype = ""  # to compute in; empty: float32 on a CPU, else bfloat16
    config.mesh = ""  # devices to train on together, such as data:4,tensor:2; empty: one
    # Prompts: signatures (of the standard library's functions), or a file of questions; the first
    # turn of each is asked, and prompts_per_step of them, at even distances, are held out.
    config.prompts = "signatures"
    config.prompt_tokens = 32  # maximum tokens of a prompt
    config.max_new_tokens = 48  # maximum tokens of an output
    config.prompts_per_step = 8  # groups of a step
    config.samples = 8  # of each prompt
    config.reward = "experiments.grpo.rewards:parses"  # module:function of prompt and output
    config.reward_on = "text"  # text or ids, what the reward reads
    config.sampler = ConfigDict(
        {  # of the rollouts; the ratio is that of these distributions
            "temperature": 1.0,  # above 0
            "top_k": 0,  # most likely tokens that are kept; 0: all
            "top_p": 1.0,  # probability that is kept
            "min_p": 0.0,  # least probability, relative to the largest
        }
    )
    config.drafter = "ngram"  # none, ngram, suffix (over past rollouts), or a head or a draft
    config.num_draft = 3  # K
    config.strategy = "match"  # match (the tokens of plain decoding), or residual
    # speculative; plain (without drafts); or invariant and invariant-plain, whose bits are equal
    # (with match and without stages).
    config.rollouts = "speculative"
    # ((32, 4), (16, 6)): once at most 32 rows are running, only they are decoded, with K = 4; then
    # 16 with K = 6. Programs of other shapes may round differently.
    config.stages = ()
    # Of the behaviour policy: recomputed by a training pass, or those of the rollouts.
    config.old_logprobs = "recomputed"
    config.epochs = 1  # updates on the rollouts of a step
    config.accumulate = 1  # parts of a batch, one after the other: less memory
    config.clip = (0.2, 0.2)  # how far the ratio may fall below 1, and rise above it
    config.is_scaled = True  # divide advantages by the standard deviation of their group
    config.kl_weight = 0.01  # of the model's distance to the reference; 0: there is none
    config.reference_every = 0  # steps after which the policy becomes the reference; 0: never
    config.optimizer = ConfigDict(
        {  # AdamW
            "lr": 2e-4,  # constant rate
            "clip": 1.0,  # maximum norm of the gradient
        }
    )
    config.steps = 60  # of the whole run
    config.eval_every = 20  # steps between two evaluations on held-out prompts; 0: at the end
    config.compare_every = 0  # steps between two comparisons with plain decoding; 0: none
    config.log_every = 1  # steps between two lines of metrics.jsonl
    config.checkpoint_every_s = 60.0  # seconds between two checkpoints
    config.export_dtype = "bfloat16"  # of the exported weights
    return config
