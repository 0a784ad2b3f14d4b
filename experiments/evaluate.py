r"""Compares drafts with plain decoding, by category and batch size.

    python -m experiments.evaluate
    python -m experiments.evaluate --config.target=PATH \
        --config.drafts=HEAD1,HEAD2,ngram
    python -m experiments.evaluate --config.data=question.jsonl \
        --config.batches=1,4,16,32
    python -m experiments.evaluate \
        --config.drafter=docs.examples.my_drafter:make
    python -m experiments.evaluate --profile

Every draft, K, tree and temperature takes turns with plain decoding of the same
tokens, question by question. Every turn of a conversation is answered. Later
turns follow the answers of plain decoding, so all methods answer the same
prompts. Intervals are 95 % confidence intervals over the questions. Greedy
heads are also compared with the unrolling that trains them ("teacher-forced"):
each tests the other.

A run leaves config.json, environment.json, report.json, report.md, report.html,
plots, and answers.jsonl with one line for each answer. If a run is stopped, the
same command with its --workdir continues it. With --profile rounds of every
cell are traced into profile/ of the folder, and the report says where their
time goes.
"""

from __future__ import annotations

import functools

from configs import evaluate_zoo
from experiments.comparison import run
from experiments.run import cli

# ``evaluate(config, workdir=None, *, has_profile=False)`` returns the report.
evaluate = functools.partial(run.run, "evaluate", "Evaluation")


def main() -> None:
    cli.enable_compilation_cache()
    evaluate(_CONFIG.value, _WORKDIR.value, has_profile=_PROFILE.value)


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        evaluate_zoo,
        "Folder of this run, continued if it holds answers; by default runs/evaluate/TIME.",
    )
    _PROFILE = cli.define_profile()
    cli.run(main)
