"""Lets a target answer prompts: its own text, to train what drafts for it.

    python -m experiments.regenerate --workdir=runs/text
    python -m experiments.regenerate --workdir=runs/text --config.prompts=FILE.jsonl

Of a file of conversations every answer is written anew, behind the turns before it as they are.
Rows that finish are refilled from the queue of prompts. A run leaves config.json,
responses.jsonl (a line a prompt: index, prompt_ids, response_ids, text, finish_reason,
temperature, seed; in the order in which they finished) and report.json. A work directory that
holds responses is gone on with: what is answered is skipped, and since a response depends on
the config and its index alone, the lines are those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import pathlib
import random
import time
from collections.abc import Iterable, Iterator

from ml_collections import ConfigDict

from configs import regenerate_zoo
from experiments.common import cli, report
from experiments.common.prompts import PromptEncoder, read_rows
from experiments.common.responses import Responses
from spec_jax.config import SamplerConfig, SpeculativeConfig, build
from spec_jax.data import python_source
from spec_jax.data.conversations import Encoder, is_held_out, num_prompts
from spec_jax.data.records import Conversation, holds_conversations, read_records
from spec_jax.engine.batching import DecodeQueue, sampler_of
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.request import check_room
from spec_jax.engine.stats import Stats
from spec_jax.errors import ConfigError
from spec_jax.loading import DTYPES, load_model
from spec_jax.progress import Progress

_FREE = ("num_prompts", "batch", "log_every_s")  # what changes no response
_CHARS_A_TOKEN = 16  # more than tokens of code have on average
Pairs = Iterable[tuple[int, list[int]]]  # indices, each once, and prompts' ids


def resolve(config: ConfigDict) -> ConfigDict:
    """Checks a config; returns it with every value in its final form.

    Raises:
      ConfigError: an unknown or missing key, or a value that cannot be.
    """
    cli.check_keys(config, regenerate_zoo.get_config())
    config = config.copy_and_resolve_references()

    def check(ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise ConfigError(f"{name} is {config[name]!r}; expected {expected}")

    for name in ("k", "batch", "max_prompt_tokens", "max_new_tokens", "min_prompt_tokens"):
        check(config[name] >= 1, name, "1 or more")
    is_range = config.min_prompt_tokens <= config.max_prompt_tokens
    check(is_range, "min_prompt_tokens", f"at most max_prompt_tokens {config.max_prompt_tokens}")
    least = 0 if config.prompts else 1
    check(config.num_prompts >= least, "num_prompts", "1 or more; of a file, 0 means all")
    check(not config.rule or config.draft, "rule", "none without a draft")
    check(0 <= config.tests_share <= 1, "tests_share", "a number in [0, 1]")
    check(len(config.temperatures) > 0, "temperatures", "one or more")
    check(0 <= config.held_out_share < 1, "held_out_share", "a number in [0, 1)")
    check(config.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}")
    return config


def load_decoder(config) -> SpeculativeDecoder:
    """Target, draft and rule of a config.

    Raises:
      ConfigError: the rule changes the target's law, or the parts do not fit.
      PromptError: target or draft cannot hold the longest prompt and its response.
      WeightsError: no such model.
    """
    values = {**config.sampler, "seed": config.seed}
    samplers = [build(SamplerConfig, {**values, "temperature": t}) for t in config.temperatures]
    load = functools.partial(load_model, dtype=config.dtype, scan_layers=config.scan_layers)
    target, draft, speculative = load(config.target), None, None
    if config.draft:
        has_model = config.draft not in ("ngram", "suffix")
        method = "standalone" if has_model else config.draft
        draft = load(config.draft) if has_model else None
        speculative = SpeculativeConfig(
            method, config.k, rejection_sampling_strategy=config.rule or None
        )
    decoder = SpeculativeDecoder(target, draft, speculative, target_sampler=samplers)
    system = decoder.system()
    if not system.rule.is_lossless:
        raise ConfigError(f"rule {system.rule.name!r} changes the target's law; use a lossless one")
    check_room(system, config.max_prompt_tokens, config.max_new_tokens)
    return decoder


def prompts_of(config, decoder: SpeculativeDecoder) -> tuple[int, Pairs]:
    """How many prompts there are, and the prompts; other sources of prompts belong here.

    An index always names the same prompt, however many are asked for.
    """
    if config.prompts and holds_conversations(config.prompts):
        records = functools.partial(_conversations, config)
        count = sum(map(num_prompts, records()))
        count = min(count, config.num_prompts or count)
        encoder = Encoder(decoder.target.tokenizer)
        pairs = enumerate(ids for record in records() for ids in encoder.prompts(record))
    elif config.prompts:
        rows = read_rows(pathlib.Path(config.prompts))
        count = min(len(rows), config.num_prompts or len(rows))
        pairs = enumerate(map(PromptEncoder(decoder.target), rows))
    else:
        count, pairs = config.num_prompts, _pieces(config, decoder)
    return count, itertools.islice(pairs, count)


def _conversations(config) -> Iterator[Conversation]:
    """The conversations of a file but for those that training holds out."""
    for record in read_records(config.prompts):
        if isinstance(record, Conversation) and not is_held_out(record, config.held_out_share):
            yield record


def _pieces(config, decoder: SpeculativeDecoder) -> Iterator[tuple[int, list[int]]]:
    texts = python_source.train_pieces(
        config.seed, max_chars=_CHARS_A_TOKEN * config.max_prompt_tokens,
        tests_share=config.tests_share,
    )  # fmt: skip
    for index, text in enumerate(texts):
        draw = random.Random(f"{config.seed} {index} length")
        length = draw.randint(config.min_prompt_tokens, config.max_prompt_tokens)
        yield index, decoder.encode(text)[:length]


def regenerate(config: ConfigDict, workdir: str | pathlib.Path) -> dict:
    """Runs or goes on with the experiment; returns its report.

    Raises:
      SpecJaxError: a config, a model or a prompt that cannot be used, or a work directory of
        another experiment.
    """
    config = resolve(config)
    decoder = load_decoder(config)
    total, prompts = prompts_of(config, decoder)
    folder = pathlib.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    resolved, saved = json.loads(config.to_json()), folder / "config.json"
    with contextlib.ExitStack() as stack:
        responses = stack.enter_context(Responses(folder / "responses.jsonl"))
        if len(responses):
            known = json.loads(saved.read_text()) if saved.exists() else {}
            cli.check_same(known, resolved, _FREE)
        report.write_json(saved, resolved)
        print(f"{len(responses)} prompts are answered; {total} in all", flush=True)
        num_before, begin_s, stats, num_left_out = len(responses), time.monotonic(), Stats(), 0
        waiting: dict[int, list[int]] = {}
        bar = stack.enter_context(Progress(
            total, "prompts", num_done=num_before, every_s=config.log_every_s
        ))  # fmt: skip

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
            decoder, queued(), batch=config.batch, max_prompt_tokens=config.max_prompt_tokens,
            max_new_tokens=config.max_new_tokens,
        )  # fmt: skip
        for index, row in queue:
            sampler = sampler_of(decoder.target_sampler, index)
            responses.append({
                "index": index, "prompt_ids": waiting.pop(index),
                "response_ids": list(row.tokens), "text": row.text,
                "finish_reason": row.finish_reason, "temperature": sampler.temperature,
                "seed": sampler.seed,
            })  # fmt: skip
            stats += row.stats
            bar.step(
                f"{stats.emitted / (time.monotonic() - begin_s):.0f} tok/s, useful row-rounds "
                f"{queue.usage.share:.3f}"
            )
        elapsed_s = time.monotonic() - begin_s
        result = {
            "config": resolved,
            "environment": report.environment(),
            "prompts": total,
            "left_out": num_left_out,
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
    report.write_json(folder / "report.json", result)
    return result


def main() -> None:
    if not _WORKDIR.value:
        raise ConfigError("--workdir is not given; expected the folder to begin or to go on in")
    cli.enable_compilation_cache()
    result = regenerate(_CONFIG.value, _WORKDIR.value)
    reasons = ", ".join(f"{n} by {name}" for name, n in result["finish_reasons"].items())
    session = result["session"]
    print(
        f"{result['responses']} responses of {result['tokens']} tokens ({reasons}); "
        f"{result['left_out']} prompts too long\nthis session: {session['responses']} responses, "
        f"{session['tokens_per_s']:.0f} tok/s, row-rounds useful {session['useful_share']:.3f} "
        f"({session['useful_share_with_tail']:.3f} with the tail)\n"
        f"{pathlib.Path(_WORKDIR.value) / 'responses.jsonl'}"
    )


if __name__ == "__main__":
    _CONFIG, _WORKDIR = cli.define_flags(
        regenerate_zoo,
        "Folder of config, responses and report; continued if it has responses.",
    )  # fmt: skip
    cli.run(main)
