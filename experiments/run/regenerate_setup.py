"""From the config of ``experiments.regenerate`` to a decoder and its prompts."""

from __future__ import annotations

import functools
import itertools
import pathlib
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ml_collections import ConfigDict

from configs import regenerate_zoo
from experiments.run import cli
from spec_jax.config import SamplerConfig, SpeculativeConfig, build
from spec_jax.data import python_source
from spec_jax.data.questions import read, read_record
from spec_jax.data.records import Conversation, Text, is_json, read_records
from spec_jax.data.splits import HeldOut, is_document
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.request import check_room
from spec_jax.errors import ConfigError
from spec_jax.evaluation.cells import copying_methods
from spec_jax.evaluation.mesh import MeshOptions
from spec_jax.evaluation.prompts import PromptEncoder
from spec_jax.loading import DTYPES, load_model

_CHARS_A_TOKEN = 16  # more than tokens of code have on average
Pairs = Iterable[tuple[int, list[int]]]  # indices, each once, and prompts' ids


def resolve(config: ConfigDict) -> ConfigDict:
    """Checks a config and returns it with every value in its final form.

    Raises:
      ConfigError: A key is unknown or missing, or a value is out of range.
    """
    cli.check_keys(config, regenerate_zoo.get_config())
    config = config.copy_and_resolve_references()
    check = lambda ok, name, expected: cli.require(ok, config, name, expected)
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


def load_decoder(config: ConfigDict, where: MeshOptions = MeshOptions()) -> SpeculativeDecoder:
    """Loads target and draft of a config.

    Raises:
      ConfigError: The rule changes the target's distribution, or the parts do not fit together.
      PromptError: Target or draft cannot hold the longest prompt and its response.
      WeightsError: No such model.
    """
    values = {**config.sampler, "seed": config.seed}
    samplers = [build(SamplerConfig, {**values, "temperature": t}) for t in config.temperatures]
    load = functools.partial(
        load_model, dtype=config.dtype, scan_layers=config.scan_layers, mesh=where.mesh
    )
    target, draft, speculative = load(config.target), None, None
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
    check_room(system, config.max_prompt_tokens, config.max_new_tokens)
    return decoder


class Prompts(NamedTuple):
    """What is answered.

    Attributes:
      count: The number of prompts.
      pairs: An index and the ids of each. An index always belongs to the same prompt, whatever the
        number of prompts.
      notes: Sentences on what is left out; a conversation that the chat template refuses adds one
        when its turn comes.
    """

    count: int
    pairs: Pairs
    notes: list[str]


def prompts_of(config: ConfigDict, decoder: SpeculativeDecoder) -> Prompts:
    """Returns the prompts of a config; rows of a file that are no prompts are left out."""
    path, encoder, notes = pathlib.Path(config.prompts), PromptEncoder(decoder.target), []
    if not config.prompts:
        count = config.num_prompts
        return Prompts(count, itertools.islice(_pieces(config, decoder), count), notes)
    malformed: list[str] = []
    if path.is_dir() or is_json(path):
        held_out = HeldOut.of(read_records(path, [], read_record), config.held_out_share)
        every = [*map(encoder.count, _records(path, held_out, malformed))]
        num_held_out = sum(_is_held_out(r, held_out) for r in read_records(path, [], read_record))
        if num_held_out:
            notes.append(f"{num_held_out} conversations are left out: {held_out.note}")
        pairs = _encoded(encoder, zip(_records(path, held_out, []), every), notes)
        total = sum(every)
    else:
        rows = read(config.prompts, malformed)
        total, pairs = len(rows), enumerate(map(encoder, rows))
    notes += [f"left out: {said}" for said in malformed]
    if not total:
        raise ConfigError(f"{path} has no prompt ({'; '.join(notes) or 'it is empty'})")
    if total < config.num_prompts:
        notes.append(f"{path} has {total} prompts, not {config.num_prompts}: all of them are used")
    count = min(total, config.num_prompts or total)
    return Prompts(count, itertools.takewhile(lambda pair: pair[0] < count, pairs), notes)


def _records(
    path: pathlib.Path, held_out: HeldOut, malformed: list[str]
) -> Iterator[Conversation | Text]:
    """Yields the records that training does not hold out."""
    for record in read_records(path, malformed, read_record):
        if not _is_held_out(record, held_out):
            yield record


def _encoded(
    encoder: PromptEncoder, records: Iterable[tuple[Conversation | Text, int]], notes: list[str]
) -> Iterator[tuple[int, list[int]]]:
    """Yields the prompts of records, given how many each has; a refused one keeps its indices."""
    first = 0
    for record, number in records:
        try:
            yield from enumerate(encoder.every(record), first)
        except ConfigError as error:
            notes.append(f"left out: {error}")
        first += number


def _is_held_out(record: Conversation | Text, held_out: HeldOut) -> bool:
    """Whether a record is an answered conversation that training holds out."""
    is_answered = isinstance(record, Conversation) and is_document(record)
    return is_answered and held_out.part(record, "train") is None


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
