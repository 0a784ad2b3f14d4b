"""The zoo on held-out functions: every draft beside plain decoding, each with a K of its own.

    python -m experiments.decode

Cost: 142 CPU-seconds, under two minutes on two quiet cores; a second run finds the compiled
programs in the user's cache. Expected: greedy rows are identical to plain decoding's, and the heads
have the highest tau. Each speed-up has a 95 % interval over the prompts; ? = not significant. More
prompts narrow it: --config.num_prompts=64.

Every value can be set on the command line, in the type that it has here:

    --config.target=PATH --config.drafts=PATH,ngram    other models
    --config.ks=3  --config.ks=2,4,8                   tuples, separated by commas
    --config.drafts=zoo/draft --config.temperatures=0.7
    --config.drafts=PATH --config.trees=3x2x1,59:6:10  trees, dynamic ones too
    --config.sampler.top_p=0.9 --config.num_prompts=16
    --config.drafter=docs.examples.my_drafter:make --config.rule=docs.examples.my_rule:rule
"""

from ml_collections import ConfigDict

from configs import evaluate_zoo


def get_config() -> ConfigDict:
    """Returns the config of ``experiments.evaluate`` for a short demonstration."""
    config = evaluate_zoo.get_config()
    config.data = "functions"
    config.num_prompts = 16
    config.max_new_tokens = 32
    # On two CPU cores the zoo's block drafters are no faster than plain decoding. To see them:
    # --config.drafts=zoo/dflash,zoo/dspark
    config.drafts = "zoo/draft,zoo/eagle1,zoo/eagle3,zoo/mtp,ngram"
    config.ks = ()
    # a good K of each on two CPU cores; compare yours with --config.ks=1,2,3,4,5,6
    config.best_k = (
        "zoo/draft=2,zoo/eagle1=3,zoo/eagle3=4,zoo/mtp=3,zoo/dflash=3,zoo/dspark=4,ngram=3"
    )
    config.temperatures = (0.0, 1.0)
    config.order = "spread"
    config.has_stream = True
    config.has_expected = True
    config.has_teacher_forced = False
    config.num_shown = 0
    return config
