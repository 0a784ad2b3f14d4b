"""Lets a target answer prompts, to make text on which drafts for it are trained.

    python -m experiments.regenerate --workdir=runs/text
    python -m experiments.regenerate --workdir=DIR --config.prompts=FILE.jsonl
    python -m experiments.regenerate --workdir=DIR --config.prompt_source=self

With ``self`` the target first writes the prompts, as its chat template has the
user speak; what is noise or was written before is left out, and turns.jsonl and
prompts.jsonl are kept, too.

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

import itertools
import json
import math
import pathlib
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import regenerate_zoo
from experiments.run import cli, report
from experiments.run.drafts import load_drafts
from experiments.run.journal import Responses
from spec_jax import processes
from spec_jax.config import SamplerConfig, build
from spec_jax.data import python_source
from spec_jax.data.first_words import ENGLISH, load_words
from spec_jax.data.questions import of_record, read, read_record
from spec_jax.data.records import Conversation, Text, is_json, read_records, read_rows
from spec_jax.data.splits import HeldOut, is_document
from spec_jax.data.user_turns import Chosen, Opening, choose
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.queue import DecodeQueue, Usage, sampler_of
from spec_jax.engine.request import check_room
from spec_jax.engine.stats import Stats
from spec_jax.errors import ConfigError
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.evaluation.prompts import PromptEncoder, check_effect, room_for_prompt
from spec_jax.loading import DTYPES, LoadedModel, load_model
from spec_jax.progress import Notice, Progress
from spec_jax.show.tables import Section

# Changes of these change no response; of the latter only in float32, since in bfloat16 the order
# of a sum decides near ties.
_FREE = ("num_prompts", "log_every_s", "minutes")
_FREE_IN_FLOAT32 = ("batch", "refill", "mesh", "is_draft_replicated")
_OF_SELF = ("prompt_source", "turns")  # keys that only matter where the target writes prompts
_BY_IDS = ("prompts",)  # a file that may grow: each response is kept beside its prompt's ids
_PIECE = 64  # tokens of the longest piece by default
_CHARS_A_TOKEN = 16  # more than tokens of code have on average
SOURCES = ("file", "library", "self")
TURNS = "turns.jsonl"
PROMPTS = "prompts.jsonl"
_CHAT_TURN = 128  # tokens of a user's turn that the target writes, by default
_TURN_SEEDS = 1 << 31  # added to the seed, so that turns and answers have noise of their own
_ENOUGH = 64  # turns, the first by index, of which one must be a prompt
Pairs = Iterable[tuple[int, list[int]]]  # indices, each once, and prompts' ids


def resolve(config: ConfigDict) -> ConfigDict:
    """Checks a config and returns it with all references resolved.

    Raises:
      ConfigError: A key is unknown or missing, or a value is out of range.
    """
    cli.check_keys(config, regenerate_zoo.get_config())
    config = config.copy_and_resolve_references()
    if config.prompt_source is None:
        config.prompt_source = "file" if config.prompts else "library"
    source = config.prompt_source
    if config.max_prompt_tokens is None and source == "library":
        config.max_prompt_tokens = _PIECE
    longest = config.max_prompt_tokens
    sizes = ("k", "batch", "max_new_tokens", "min_prompt_tokens")
    cli.require_each(
        config,
        *((config[name] >= 1, name, "1 or more") for name in sizes),
        (0 < config.turns.share_of_time < 1, "turns.share_of_time", "a number in (0, 1)"),
        (source in SOURCES, "prompt_source", f"one of {', '.join(SOURCES)}"),
        (
            (source == "file") == bool(config.prompts),
            "prompts",
            "a file" if source == "file" else f"none, as the prompts are of {source!r}",
        ),
        (config.minutes is None or config.minutes > 0, "minutes", "a number above 0, or none"),
        (config.refill is None or config.refill >= 1, "refill", "1 or more, or none"),
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
    if source == "self":
        load_words(config.turns.first_words)
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
    variables = cli.json_object(config, "chat_template_kwargs")
    target = load_model(config.target, config.dtype, mesh=where.mesh, **layers)
    target = target.with_chat_template_kwargs(variables)
    draft = None
    speculative = None
    if config.draft:
        placed = dict(dtype=config.dtype, mesh=where.mesh, axis_rules=where.draft_axis_rules)
        given = config.draft, target, config.k, config.rule or None
        draft, speculative = load_drafts(*given, attention=config.attention, **placed)
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


class Session(NamedTuple):
    """What was decoded in one go.

    Attributes:
      stats: Of all rows.
      elapsed_s: Seconds, with compilation.
      num_left_out: Prompts that were too long.
      usage: Row-rounds until the queue was found empty.
      tail: Row-rounds since then.
    """

    stats: Stats
    elapsed_s: float
    num_left_out: int
    usage: Usage
    tail: Usage


def decode(
    config: ConfigDict,
    decoder: SpeculativeDecoder,
    journal: Responses,
    pairs: Pairs,
    total: int,
    *,
    what: str,
    longest: int,
    max_new_tokens: int,
    until_s: float = math.inf,
    **options: Any,
) -> Session:
    """Decodes what a journal lacks.

    Args:
      config: See ``configs/regenerate_zoo.py``.
      decoder: Target and draft.
      journal: Gets a line for each row that ends.
      pairs: Indices and prompts' ids.
      total: Their number.
      what: What the rows are, for progress.
      longest: The maximum tokens of a prompt; longer ones are left out.
      max_new_tokens: The maximum output tokens of a row.
      until_s: When to end, by ``time.monotonic``; rows that are decoding then are dropped.
      **options: Of the queue.
    """
    num_before = len(journal)
    begin_s = time.monotonic()
    stats = Stats()
    num_left_out = 0
    waiting: dict[int, list[int]] = {}
    sampler = options.get("sampler", decoder.target_sampler)
    with Progress(total, what, num_done=num_before, every_s=config.log_every_s) as bar:

        def queued() -> Iterator[tuple[int, list[int]]]:
            nonlocal num_left_out
            for index, ids in journal.unanswered(pairs):
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
            refill=config.refill or 1,
            max_prompt_tokens=longest,
            max_new_tokens=max_new_tokens,
            **options,
        )
        for index, row in queue:
            of_row = sampler_of(sampler, index)
            journal.add(
                {
                    "index": index,
                    "prompt_ids": waiting.pop(index),
                    "response_ids": list(row.tokens),
                    "text": row.text,
                    "finish_reason": row.finish_reason,
                    "temperature": of_row.temperature,
                    "seed": of_row.seed,
                }
            )
            stats += row.stats
            bar.step(
                f"{stats.emitted / (time.monotonic() - begin_s):.0f} tok/s"
                + useful_text(queue.usage.share),
                share=share_done(
                    queue.usage.useful + queue.tail.useful,
                    max_new_tokens,
                    len(journal) - num_before,
                    min(len(waiting), config.batch),
                    total - len(journal) - num_left_out,
                    num_before,
                ),
            )
            if time.monotonic() > until_s:
                bar.say(f"{what}: the time is over at {len(journal)} of {total}")
                break
    elapsed_s = time.monotonic() - begin_s
    return Session(stats, elapsed_s, num_left_out, queue.usage, queue.tail)


def opening_of(config: ConfigDict, target: LoadedModel) -> Opening:
    """Returns what stands around the turns that a target writes.

    Raises:
      ConfigError: The chat template fails, or first words are given for a target without one.
    """
    tokenizer = cli.tokenizer_of(target)
    if processes.count() > 1:
        raise ConfigError("prompt_source is 'self': write the prompts in one process first")
    given = config.turns.first_words
    opening = Opening.of(tokenizer, target.stop_tokens, load_words(given))
    if given not in ("", ENGLISH) and not opening.before:
        raise ConfigError(
            f"turns.first_words is {given!r}; the target has no chat template, so it writes no "
            "turns of a user: leave it out"
        )
    return opening


def write_prompts(
    config: ConfigDict,
    decoder: SpeculativeDecoder,
    opening: Opening,
    folder: pathlib.Path,
    until_s: float,
) -> tuple[Chosen, list[tuple[int, list[int]]]]:
    """Lets the target write prompts, and chooses those that are none of noise and repeats.

    A prompt depends on the config, the models and its index alone. Writes turns.jsonl, all that the
    target wrote, and prompts.jsonl, what is chosen of it.

    Args:
      config: See ``configs/regenerate_zoo.py``.
      decoder: Target and draft.
      opening: Of ``opening_of``.
      folder: The run's folder.
      until_s: When to end, by ``time.monotonic``.

    Returns:
      What was chosen, and the index and ids of each prompt.

    Raises:
      ConfigError: Nothing that was written is a prompt, or it begins otherwise.
    """
    target = decoder.target
    path = folder / TURNS
    sampler = SamplerConfig(
        config.turns.temperature, top_p=config.turns.top_p, seed=(config.seed + _TURN_SEEDS) % 2**32
    )

    def chosen(until: float = math.inf) -> Chosen:
        rows = (row for row, _ in read_rows(path)) if path.exists() else ()
        rows = (row for row in rows if row["index"] < until)
        return choose(rows, opening, target.tokenizer, config.min_prompt_tokens)

    def check(found: Chosen) -> Chosen:
        if not found.texts:
            raise ConfigError(
                f"none of {found.left_out.total()} prompts that the target wrote can be used "
                f"({'; '.join(found.sentences()[1:]) or 'the time was too short'}): give prompts, "
                "--config.prompts=FILE, or change --config.turns or min_prompt_tokens"
            )
        return found

    def pairs() -> Iterator[tuple[int, list[int]]]:
        is_judged = False
        for index in range(config.num_prompts):
            if not is_judged and all(i in turns for i in range(_ENOUGH)):
                check(chosen(_ENOUGH))  # a target that writes nothing but noise
                is_judged = True
            yield index, opening.begin(index)[1]

    with Responses(path) as turns:
        if len(turns) < config.num_prompts and time.monotonic() < until_s:
            limit = config.turns.max_tokens or (_CHAT_TURN if opening.before else _PIECE)
            decode(
                config,
                decoder,
                turns,
                pairs(),
                config.num_prompts,
                what="prompts that the target writes",
                longest=max(config.max_prompt_tokens or 0, *map(len, opening.starts)),
                max_new_tokens=limit,
                until_s=until_s,
                sampler=sampler,
                stop=opening.stop,
                stop_tokens=opening.stop_tokens,
            )
    found = check(chosen())
    rows = (opening.row(index, text) for index, text in found.texts.items())
    report.write_text(folder / PROMPTS, "".join(json.dumps(row) + "\n" for row in rows))
    ids = ((i, opening.prompt(text, target.tokenizer)) for i, text in found.texts.items())
    return found, [*ids]


def regenerate(config: ConfigDict, workdir: str | pathlib.Path) -> dict:
    """Runs or continues the experiment and returns its report.

    Args:
      config: See ``configs/regenerate_zoo.py``.
      workdir: The run's folder.

    Raises:
      SpecJaxError: A config, a model or a prompt cannot be used, or the work directory is that of
        another experiment.
    """
    begin_s = time.monotonic()
    config = resolve(config)
    is_self = config.prompt_source == "self"
    minutes = config.minutes or math.inf
    where = MeshOptions.of(config)
    with Notice("loading the models", is_line=True):
        decoder = load_decoder(config, where)
    notes: list[str] = []
    if is_self:
        opening = opening_of(config, decoder.target)
    else:
        total, prompts, notes = prompts_of(config, decoder)
    num_said = len(notes)
    for note in notes:
        print(note, flush=True)
    folder = cli.make_workdir("regenerate", workdir)
    resolved = json.loads(config.to_json())
    if not is_self:  # as runs were saved that knew nothing else
        resolved = {name: x for name, x in resolved.items() if name not in _OF_SELF}
    saved = folder / "config.json"
    sums = cli.inputs_of(resolved, _BY_IDS)
    with Responses(folder / "responses.jsonl") as responses:
        is_begun = len(responses) or is_self and (folder / TURNS).exists()
        if is_begun and processes.is_writer():
            known = cli.read_saved(saved)
            more = _FREE_IN_FLOAT32 if config.dtype == "float32" else ()
            cli.check_same(known, resolved, (*_FREE, *more))
            sums = cli.check_inputs(folder, sums)
        head = report.begin("regenerate", folder, resolved)
        report.write_json(folder / cli.INPUTS, sums)
        written = None
        if is_self:
            until_s = begin_s + 60 * minutes * config.turns.share_of_time
            written, prompts = write_prompts(config, decoder, opening, folder, until_s)
            print("\n".join(written.sentences()), flush=True)
            total = len(prompts)
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
        session = decode(
            config,
            decoder,
            responses,
            prompts,
            total,
            what="prompts",
            longest=longest,
            max_new_tokens=config.max_new_tokens,
            until_s=begin_s + 60 * minutes,
        )
        for note in notes[num_said:]:  # found on the way
            print(note, flush=True)
        stats = session.stats
        result = head | {
            "mesh": where.facts(
                decoder.target, [decoder.draft] if decoder.draft else [], config.batch
            ),
            "prompts": total,
            "left_out": session.num_left_out,
            "notes": notes,
            "responses": len(responses),
            "tokens": responses.num_tokens,
            "finish_reasons": dict(responses.finish_reasons),
            "session": {  # elapsed_s has compilation, run_s the prompts that the target wrote
                "responses": len(responses) - num_before,
                "tokens": stats.emitted,
                "elapsed_s": round(session.elapsed_s, 1),
                "run_s": round(decoder.stats.prefill_s + decoder.stats.decode_s, 1),
                "tokens_per_s": round(stats.emitted / session.elapsed_s, 1),
                "useful_share": session.usage.share,
                "useful_share_with_tail": session.usage.plus(*session.tail).share,
                "tau": stats.tau,
                "acceptance_rate": stats.acceptance_rate,
            },
        }
        sections = [Section("", [*said(result), *notes])]
        if written is not None:
            left_out = {"left_out": dict(written.left_out), "samples": written.samples}
            result["written"] = left_out | {"used": len(written.texts)}
            sections.append(Section("Prompts of the target", written.sentences()))
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
