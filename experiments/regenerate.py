"""Lets a target answer prompts, for text of its own to train drafts on.

    python -m experiments.regenerate --workdir=runs/text
    python -m experiments.regenerate --workdir=runs/text --config.prompts=FILE.jsonl

In a file of conversations, every answer is replaced by one of the target, given the original turns
before it. Rows that finish are refilled from the queue of prompts. A run leaves config.json,
environment.json, responses.jsonl (one line for each prompt: index, prompt_ids, response_ids, text,
finish_reason, temperature, seed; in the order in which they finished), report.json and report.md. A
work directory with responses is continued: answered prompts are skipped, and since a response
depends only on the config and its index, the lines equal those of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import time
from collections.abc import Iterator

from ml_collections import ConfigDict

from configs import regenerate_zoo
from experiments.run import cli, report
from experiments.run.regenerate_setup import load_decoder, prompts_of, resolve
from experiments.run.responses import Responses
from spec_jax import processes
from spec_jax.engine.queue import DecodeQueue, sampler_of
from spec_jax.engine.stats import Stats
from spec_jax.errors import ConfigError
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.progress import Progress

# Changes of these change no response; of the latter only in float32, since in bfloat16 the order
# of a sum decides near ties.
_FREE = ("num_prompts", "log_every_s")
_FREE_IN_FLOAT32 = ("batch", "mesh", "is_draft_replicated")


def regenerate(config: ConfigDict, workdir: str | pathlib.Path) -> dict:
    """Runs or continues the experiment and returns its report.

    Args:
      config: See ``configs/regenerate_zoo.py``.
      workdir: The run's folder.

    Raises:
      SpecJaxError: A config, a model or a prompt that cannot be used, or a work directory of
        another experiment.
    """
    config = resolve(config)
    where = MeshOptions.of(config)
    decoder = load_decoder(config, where)
    total, prompts, notes = prompts_of(config, decoder)
    num_said = len(notes)
    for note in notes:
        print(note, flush=True)
    folder = cli.make_workdir("regenerate", workdir)
    resolved, saved = json.loads(config.to_json()), folder / "config.json"
    with contextlib.ExitStack() as stack:
        responses = stack.enter_context(Responses(folder / "responses.jsonl"))
        if len(responses) and processes.is_writer():
            known = cli.read_saved(saved)
            more = _FREE_IN_FLOAT32 if config.dtype == "float32" else ()
            cli.check_same(known, resolved, (*_FREE, *more))
        head = report.begin("regenerate", folder, resolved)
        print(f"{len(responses)} prompts are answered; {total} in all", flush=True)
        num_before, begin_s, stats, num_left_out = len(responses), time.monotonic(), Stats(), 0
        waiting: dict[int, list[int]] = {}
        bar = stack.enter_context(
            Progress(total, "prompts", num_done=num_before, every_s=config.log_every_s)
        )

        def queued() -> Iterator[tuple[int, list[int]]]:
            nonlocal num_left_out
            for index, ids in responses.unanswered(prompts):
                if len(ids) > config.max_prompt_tokens:
                    num_left_out += 1
                    bar.step("one prompt is too long")
                    continue
                waiting[index] = ids
                yield index, ids

        queue = DecodeQueue(
            decoder,
            queued(),
            batch=config.batch,
            max_prompt_tokens=config.max_prompt_tokens,
            max_new_tokens=config.max_new_tokens,
        )
        for index, row in queue:
            sampler = sampler_of(decoder.target_sampler, index)
            responses.append(
                {
                    "index": index,
                    "prompt_ids": waiting.pop(index),
                    "response_ids": list(row.tokens),
                    "text": row.text,
                    "finish_reason": row.finish_reason,
                    "temperature": sampler.temperature,
                    "seed": sampler.seed,
                }
            )
            stats += row.stats
            bar.step(
                f"{stats.emitted / (time.monotonic() - begin_s):.0f} tok/s"
                + useful_text(queue.usage.share)
            )
        for note in notes[num_said:]:  # found on the way
            print(note, flush=True)
        elapsed_s = time.monotonic() - begin_s
        result = head | {
            "mesh": where.facts(
                decoder.target, [decoder.draft] if decoder.draft else [], config.batch
            ),
            "prompts": total,
            "left_out": num_left_out,
            "notes": notes,
            "responses": len(responses),
            "tokens": responses.num_tokens,
            "finish_reasons": dict(responses.finish_reasons),
            "session": {  # compilation is included in its time
                "responses": len(responses) - num_before,
                "tokens": stats.emitted,
                "elapsed_s": round(elapsed_s, 1),
                "tokens_per_s": round(stats.emitted / elapsed_s, 1),
                "useful_share": queue.usage.share,
                "useful_share_with_tail": queue.usage.plus(*queue.tail).share,
                "tau": stats.tau,
                "acceptance_rate": stats.acceptance_rate,
            },
        }
    blocks = [*said(result), *notes]
    report.finish(folder, result, report.document("Responses of the target", result, *blocks))
    return result


def said(result: dict) -> list[str]:
    """Returns sentences on the responses, and on the session that wrote the last of them."""
    reasons = ", ".join(f"{n} by {name}" for name, n in result["finish_reasons"].items())
    session = result["session"]
    return [
        f"{result['responses']} responses of {result['tokens']} tokens ({reasons}); "
        f"{result['left_out']} prompts too long",
        f"this session: {session['responses']} responses, {session['tokens_per_s']:.0f} tok/s"
        + useful_text(session["useful_share"])
        + useful_text(session["useful_share_with_tail"], " with the tail"),
    ]


def useful_text(share: float, of: str = "") -> str:
    """Returns ", row-rounds useful SHARE" for the end of a sentence, or "" before any round."""
    return "" if math.isnan(share) else f", row-rounds useful{of} {share:.3f}"


def main() -> None:
    if not _WORKDIR.value:
        raise ConfigError("--workdir is not given; expected a new folder, or a run to continue")
    cli.enable_compilation_cache()
    result = regenerate(_CONFIG.value, _WORKDIR.value)
    print("\n".join(said(result)))
    print(pathlib.Path(_WORKDIR.value) / "responses.jsonl")


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        regenerate_zoo, "Folder of config, responses and report; continued if it has responses."
    )
    cli.run(main)
