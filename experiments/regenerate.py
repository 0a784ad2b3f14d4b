"""Lets a target answer prompts, to make text on which drafts for it are trained.

    python -m experiments.regenerate --workdir=runs/text
    python -m experiments.regenerate --workdir=DIR --config.prompts=FILE.jsonl

In a file of conversations, every answer is replaced by an answer of the target,
given the original turns before it. Rows that finish are refilled from the queue
of prompts. A run leaves config.json, environment.json, inputs.json,
responses.jsonl, report.json and report.md. responses.jsonl has one line for
each prompt, in the order in which they finished: index, prompt_ids,
response_ids, text, finish_reason, temperature, seed. A work directory with
responses is continued, and answered prompts are skipped. A response depends
only on the config, the models and its index, so the lines equal those of an
uninterrupted run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import pathlib
import random
import time
from collections.abc import Iterable, Iterator

from ml_collections import ConfigDict

from configs import regenerate_zoo
from experiments.run import cli, report
from experiments.run.journal import Responses
from spec_jax import processes
from spec_jax.config import SamplerConfig, SpeculativeConfig, build
from spec_jax.data import python_source
from spec_jax.data.questions import of_record, read, read_record
from spec_jax.data.records import Conversation, Text, is_json, read_records
from spec_jax.data.splits import HeldOut, is_document
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.queue import DecodeQueue, sampler_of
from spec_jax.engine.request import check_room
from spec_jax.engine.stats import Stats
from spec_jax.errors import ConfigError
from spec_jax.evaluation.cells import copying_methods
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.evaluation.prompts import PromptEncoder, check_effect, room_for_prompt
from spec_jax.loading import DTYPES, load_model
from spec_jax.progress import Notice, Progress
from spec_jax.show.tables import Section

# Changes of these change no response; of the latter only in float32, since in bfloat16 the order
# of a sum decides near ties.
_FREE = ("num_prompts", "log_every_s")
_FREE_IN_FLOAT32 = ("batch", "mesh", "is_draft_replicated")
_BY_IDS = ("prompts",)  # a file that may grow: each response is kept beside its prompt's ids
_PIECE = 64  # tokens of the longest piece by default
_CHARS_A_TOKEN = 16  # more than tokens of code have on average
Pairs = Iterable[tuple[int, list[int]]]  # indices, each once, and prompts' ids


def resolve(config: ConfigDict) -> ConfigDict:
    """Checks a config and returns it with all references resolved.

    Raises:
      ConfigError: A key is unknown or missing, or a value is out of range.
    """
    cli.check_keys(config, regenerate_zoo.get_config())
    config = config.copy_and_resolve_references()
    if config.max_prompt_tokens is None and not config.prompts:
        config.max_prompt_tokens = _PIECE
    longest = config.max_prompt_tokens
    sizes = ("k", "batch", "max_new_tokens", "min_prompt_tokens")
    cli.require_each(
        config,
        *((config[name] >= 1, name, "1 or more") for name in sizes),
        (longest is None or longest >= 1, "max_prompt_tokens", "1 or more, or none"),
        (
            longest is None or config.min_prompt_tokens <= longest,
            "min_prompt_tokens",
            f"at most max_prompt_tokens {longest}",
        ),
        (
            config.num_prompts >= (0 if config.prompts else 1),
            "num_prompts",
            "1 or more; of a file, 0 means all",
        ),
        (not config.rule or config.draft, "rule", "none without a draft"),
        (0 <= config.tests_share <= 1, "tests_share", "a number in [0, 1]"),
        (config.temperatures, "temperatures", "one or more"),
        (0 <= config.held_out_share < 1, "held_out_share", "a number in [0, 1)"),
        (config.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}"),
    )
    return config


def load_decoder(config: ConfigDict, where: MeshOptions = MeshOptions()) -> SpeculativeDecoder:
    """Loads target and draft of a config.

    Raises:
      ConfigError: The rule changes the target's distribution, or the parts do not fit together.
      PromptError: Target or draft cannot hold the longest prompt and its response.
      WeightsError: There is no such model.
    """
    samplers = [
        build(SamplerConfig, {**config.sampler, "temperature": t, "seed": config.seed + i})
        for i, t in enumerate(config.temperatures)
    ]
    layers = dict(scan_layers=config.scan_layers, attention=config.attention)
    load = functools.partial(load_model, dtype=config.dtype, mesh=where.mesh, **layers)
    variables = cli.json_object(config, "chat_template_kwargs")
    target = load(config.target).with_chat_template_kwargs(variables)
    draft = None
    speculative = None
    if config.draft:
        has_model = config.draft not in copying_methods()
        method = "standalone" if has_model else config.draft
        draft = load(config.draft, axis_rules=where.draft_axis_rules) if has_model else None
        speculative = SpeculativeConfig(
            method, config.k, rejection_sampling_strategy=config.rule or None
        )
    where.check_drafts([] if draft is None else [draft])
    decoder = SpeculativeDecoder(
        target, draft, speculative, target_sampler=samplers, **where.options(draft)
    )
    system = decoder.system()
    if not system.rule.is_lossless:
        raise ConfigError(
            f"rule {system.rule.name!r} changes the target's distribution; use a lossless one"
        )
    check_room(system, config.max_prompt_tokens or 1, config.max_new_tokens)
    return decoder


def prompts_of(config: ConfigDict, decoder: SpeculativeDecoder) -> tuple[int, Pairs, list[str]]:
    """Returns the prompts of a config; rows of a file that are not prompts are left out.

    Returns:
      The number of prompts; an index and the ids of each; and sentences on what is left out. An
      index belongs to the same prompt for any number of prompts. When a conversation is reached
      that the chat template refuses, a sentence is added.

    Raises:
      ConfigError: There is no prompt, or a variable of the chat template has no effect.
    """
    path = pathlib.Path(config.prompts)
    encoder = PromptEncoder(decoder.target)
    variables = cli.json_object(config, "chat_template_kwargs")
    notes = []
    if not config.prompts:
        check_effect(variables, [])
        count = config.num_prompts
        return count, itertools.islice(_pieces(config, decoder), count), notes
    malformed: list[str] = []
    if path.is_dir() or is_json(path):
        held_out = HeldOut.of(read_records(path, [], read_record), config.held_out_share)
        check_effect(variables, map(of_record, _records(path, held_out, [])))
        counts = [encoder.count(record) for record in _records(path, held_out, malformed)]
        num_held_out = sum(1 for _ in read_records(path, [], read_record)) - len(counts)
        if num_held_out:
            notes.append(f"{num_held_out} conversations are left out: {held_out.note}")
        pairs = _encoded(encoder, zip(_records(path, held_out, []), counts), notes)
        total = sum(counts)
    else:
        rows = read(config.prompts, malformed)
        check_effect(variables, rows)
        total = len(rows)
        pairs = enumerate(map(encoder, rows))
    notes += [f"left out: {said}" for said in malformed]
    if not total:
        raise ConfigError(f"{path} has no prompt ({'; '.join(notes) or 'it is empty'})")
    if total < config.num_prompts:
        notes.append(f"{path} has {total} prompts, not {config.num_prompts}: all of them are used")
    count = min(total, config.num_prompts or total)
    return count, itertools.takewhile(lambda pair: pair[0] < count, pairs), notes


def _records(
    path: pathlib.Path, held_out: HeldOut, malformed: list[str]
) -> Iterator[Conversation | Text]:
    """Yields the records that training does not hold out."""
    for record in read_records(path, malformed, read_record):
        is_answered = isinstance(record, Conversation) and is_document(record)
        if not is_answered or held_out.part(record, "train") is not None:
            yield record


def _encoded(
    encoder: PromptEncoder, records: Iterable[tuple[Conversation | Text, int]], notes: list[str]
) -> Iterator[tuple[int, list[int]]]:
    """Yields the prompts of records, given how many each has; a refused record uses indices too."""
    first = 0
    for record, number in records:
        try:
            yield from enumerate(encoder.every(record), first)
        except ConfigError as error:
            notes.append(f"left out: {error}")
        first += number


def _pieces(config, decoder: SpeculativeDecoder) -> Iterator[tuple[int, list[int]]]:
    texts = python_source.train_pieces(
        config.seed,
        max_chars=_CHARS_A_TOKEN * config.max_prompt_tokens,
        tests_share=config.tests_share,
    )
    for index, text in enumerate(texts):
        draw = random.Random(f"{config.seed} {index} length")
        length = draw.randint(config.min_prompt_tokens, config.max_prompt_tokens)
        yield index, decoder.encode(text)[:length]


def regenerate(config: ConfigDict, workdir: str | pathlib.Path) -> dict:
    """Runs or continues the experiment and returns its report.

    Args:
      config: See ``configs/regenerate_zoo.py``.
      workdir: The run's folder.

    Raises:
      SpecJaxError: A config, a model or a prompt cannot be used, or the work directory is that of
        another experiment.
    """
    config = resolve(config)
    where = MeshOptions.of(config)
    with Notice("loading the models", is_line=True):
        decoder = load_decoder(config, where)
    total, prompts, notes = prompts_of(config, decoder)
    num_said = len(notes)
    for note in notes:
        print(note, flush=True)
    folder = cli.make_workdir("regenerate", workdir)
    resolved = json.loads(config.to_json())
    saved = folder / "config.json"
    sums = cli.inputs_of(resolved, _BY_IDS)
    with contextlib.ExitStack() as stack:
        responses = stack.enter_context(Responses(folder / "responses.jsonl"))
        if len(responses) and processes.is_writer():
            known = cli.read_saved(saved)
            more = _FREE_IN_FLOAT32 if config.dtype == "float32" else ()
            cli.check_same(known, resolved, (*_FREE, *more))
            sums = cli.check_inputs(folder, sums)
        head = report.begin("regenerate", folder, resolved)
        report.write_json(folder / cli.INPUTS, sums)
        print(f"{len(responses)} prompts are answered; {total} in all", flush=True)
        longest = config.max_prompt_tokens
        if longest is None:  # of a file, whose prompts are encoded to know
            with Progress(total, "encoding prompts", every_s=10.0) as encoding:
                pairs = []
                for index, ids in prompts:
                    pairs.append((index, ids))
                    encoding.step(f"{len(ids)} tokens")
            prompts = pairs
            room = room_for_prompt(decoder.target, config.max_new_tokens)
            longest = max((len(ids) for _, ids in prompts if len(ids) <= room), default=1)
        num_before = len(responses)
        begin_s = time.monotonic()
        stats = Stats()
        num_left_out = 0
        waiting: dict[int, list[int]] = {}
        bar = stack.enter_context(
            Progress(total, "prompts", num_done=num_before, every_s=config.log_every_s)
        )

        def queued() -> Iterator[tuple[int, list[int]]]:
            nonlocal num_left_out
            for index, ids in responses.unanswered(prompts):
                if len(ids) > longest:
                    num_left_out += 1
                    bar.step("one prompt is too long")
                    continue
                waiting[index] = ids
                yield index, ids

        queue = DecodeQueue(
            decoder,
            queued(),
            batch=config.batch,
            max_prompt_tokens=longest,
            max_new_tokens=config.max_new_tokens,
        )
        for index, row in queue:
            sampler = sampler_of(decoder.target_sampler, index)
            responses.add(
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
                + useful_text(queue.usage.share),
                share=share_done(
                    queue.usage.useful + queue.tail.useful,
                    config.max_new_tokens,
                    len(responses) - num_before,
                    min(len(waiting), config.batch),
                    total - len(responses) - num_left_out,
                    num_before,
                ),
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
    sections = [Section("", [*said(result), *notes])]
    report.finish(folder, result, "Responses of the target", sections)
    return result


def share_done(
    rounds: int, max_rounds: int, ended: int, running: int, left: int, before: int = 0
) -> float:
    """Returns the share of the work that is done, of rows that are decoded together.

    Rows that are running count: after the first rows have ended, most of the work is theirs.

    Args:
      rounds: The rounds of all rows so far, those that are running too.
      max_rounds: The rounds of a row, at most.
      ended: The rows that have ended.
      running: The rows that are running.
      left: All rows that have not ended.
      before: Rows that an earlier session has decoded.
    """
    of_row = min(rounds / ended, max_rounds)
    share = rounds / max(rounds + (left - running / 2) * of_row, 1)
    return (before + share * (ended + left)) / (before + ended + left)


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
