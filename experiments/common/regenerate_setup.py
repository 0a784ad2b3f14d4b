"""From the config of ``experiments.regenerate`` to a decoder and its prompts."""

from __future__ import annotations

import functools
import itertools
import pathlib
import random
from collections.abc import Iterable, Iterator

from ml_collections import ConfigDict

from configs import regenerate_zoo
from experiments.common import cli
from experiments.common.prompts import PromptEncoder, read_rows
from spec_jax.config import SamplerConfig, SpeculativeConfig, build
from spec_jax.data import python_source
from spec_jax.data.records import Conversation, Text, is_json, read_records
from spec_jax.data.splits import HeldOut, is_document
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.request import check_room
from spec_jax.errors import ConfigError
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


def load_decoder(
    config: ConfigDict, where: cli.MeshOptions = cli.MeshOptions()
) -> SpeculativeDecoder:
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
        has_model = config.draft not in ("ngram", "suffix")
        method = "standalone" if has_model else config.draft
        draft = load(config.draft, rules=where.draft_rules) if has_model else None
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


def prompts_of(config, decoder: SpeculativeDecoder) -> tuple[int, Pairs]:
    """Returns the number of prompts, and pairs of an index and the ids of a prompt.

    An index always belongs to the same prompt, whatever the number of prompts.
    """
    path, encoder = pathlib.Path(config.prompts), PromptEncoder(decoder.target)
    if config.prompts and (path.is_dir() or is_json(path)):
        held_out = HeldOut.of(read_records(path), config.held_out_share)
        records = lambda: (r for r in read_records(path) if not _is_held_out(r, held_out))
        count = sum(map(encoder.count, records()))
        num_held_out = sum(_is_held_out(record, held_out) for record in read_records(path))
        if num_held_out:
            print(f"{num_held_out} conversations are left out: {held_out.note}", flush=True)
        count = min(count, config.num_prompts or count)
        pairs = enumerate(ids for record in records() for ids in encoder.every(record))
    elif config.prompts:
        rows = read_rows(path)
        count = min(len(rows), config.num_prompts or len(rows))
        pairs = enumerate(map(encoder, rows))
    else:
        count, pairs = config.num_prompts, _pieces(config, decoder)
    return count, itertools.islice(pairs, count)


def _is_held_out(record: Conversation | Text, held_out: HeldOut) -> bool:
    """Whether a record is an answered conversation that training holds out."""
    is_answered = isinstance(record, Conversation) and is_document(record)
    return is_answered and held_out.part(record, "train") is None


def _pieces(config, decoder: SpeculativeDecoder) -> Iterator[tuple[int, list[int]]]:
    texts = python_source.train_pieces(
        config.seed, max_chars=_CHARS_A_TOKEN * config.max_prompt_tokens,
        tests_share=config.tests_share,
    )  # fmt: skip
    for index, text in enumerate(texts):
        draw = random.Random(f"{config.seed} {index} length")
        length = draw.randint(config.min_prompt_tokens, config.max_prompt_tokens)
        yield index, decoder.encode(text)[:length]


