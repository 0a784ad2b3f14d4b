r"""Shows every draft of the zoo beside plain decoding: a small evaluation.

    python -m experiments.decode
    python -m experiments.decode --config.target=PATH \
        --config.drafts=PATH,ngram --config.ks=1,2,4,8
    python -m experiments.decode --config.drafts=PATH --config.ks=4 \
        --config.trees=3x2x1,59:6:10
    python -m experiments.decode --profile

Shows one prompt live. Then every draft takes turns with plain decoding, prompt
by prompt; repeats of a prompt are spread over the run. Each draft has its own K
(config.best_k), unless --config.ks is given. A run leaves the files of
experiments.evaluate, and prints a short table. Compiled programs are stored in
spec_jax/ under $XDG_CACHE_HOME or ~/.cache, so a second run starts fast.
"""

from __future__ import annotations

import functools

from configs import decode_default
from experiments.comparison import run
from experiments.run import cli

# ``decode(config, workdir=None, *, has_profile=False)`` returns the report.
decode = functools.partial(
    run.run, "decode", "Speculative decoding compared with plain decoding", is_short=True
)


def main() -> None:
    cli.enable_compilation_cache()
    decode(_CONFIG.value, _WORKDIR.value, has_profile=_PROFILE.value)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        decode_default,
        "Folder of this run, continued if it holds answers; by default runs/decode/TIME.",
    )
    _PROFILE = cli.define_profile()
    cli.run(main)
