"""The text that the training experiments read: packed, split, and accounted for."""

from __future__ import annotations

import collections
import itertools
import os
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from configs import train_head_default
from experiments.run import cli, inputs
from spec_jax import processes
from spec_jax.data import packed, python_source, questions
from spec_jax.data.batches import Corpus
from spec_jax.data.conversations import Encoder, check_variables, read_documents
from spec_jax.data.records import Text, read_records, read_rows
from spec_jax.data.splits import SPLITS, HeldOut, unit_hash
from spec_jax.errors import ConfigError
from spec_jax.evaluation.prompts import check_effect, cut, fit, room_for_prompt
from spec_jax.loading import LoadedModel
from spec_jax.models import files
from spec_jax.models.tokenizer import Tokenizer

STDLIB = "stdlib"
_WHOLE = ("length", "stop_token", "stop_string")  # how a sound response ends
_REASONS = {  # of what is left out, by the names in a corpus' counts
    "no_answer": "conversations without an answer",
    "empty": "empty texts",
    "refused": "conversations that the chat template refuses",
    "messages_after_the_last_answer": "messages after the last answer",
    "faults": "responses that ended with a fault",
    "duplicates": "files that occur twice",
    "not_code": "files that are no code",
    "tests": "test files beyond data.tests_share",
    "too_long": "documents longer than data.max_length",
}


def validate(config: ConfigDict) -> None:
    """Raises ConfigError if a value of ``config.data`` is out of range."""
    data = config.data
    is_given = all(_paths(data)) or (data.text == "" and data.get("responses"))
    has_limit = data.max_length == 0 or data.max_length >= 2
    sources = "'stdlib', or files and folders separated by commas, none of them empty"
    cli.require_each(
        config,
        (is_given, "data.text", sources),
        (0 <= data.tests_share <= 1, "data.tests_share", "a number in [0, 1]"),
        (0 < data.held_out_share < 1, "data.held_out_share", "a number above 0 and below 1"),
        (has_limit, "data.max_length", "0 (no limit), or 2 or more"),
    )


def sources(config: ConfigDict) -> str:
    """Returns ``data.text``, or what is read in its place where it is not given.

    The library's source is the zoo's training text. Responses of another target are read alone.

    Args:
      config: See ``configs/train_head_default.py``.
    """
    if config.data.text is not None:
        return config.data.text
    is_zoo = config.target == train_head_default.get_config().target
    return STDLIB if is_zoo or not config.data.responses else ""


def texts_of(data: ConfigDict) -> Iterator[str]:
    """Yields the texts of ``data.text`` that are trained on, for training a tokenizer."""
    if data.text == STDLIB:
        for _, text in python_source.documents("train", tests_share=data.tests_share):
            yield text
        return
    held_out = HeldOut.of(_records(data), data.held_out_share)
    for record in _records(data):
        part = held_out.part(record, "train")
        if isinstance(part, Text):
            yield part.text
        elif part is not None:
            yield "\n".join(message["content"] or "" for message in part.messages)


def load(
    data: ConfigDict, tokenizer: Tokenizer, folder: pathlib.Path, prompts: str = "", enough: int = 0
) -> tuple[Corpus, Corpus]:
    """Returns the text to train on and the held-out text.

    Args:
      data: ``text`` names the sources: "stdlib", or files and folders separated by commas; "" means
        ``responses`` alone. See ``configs/train_head_default.py`` for the other keys.
      tokenizer: The tokenizer, with its chat template.
      folder: The folder for packed documents. Those that it has are packed again if a file, the
        tokenizer, its chat template or a key of ``data`` has changed.
      prompts: The file of prompts that a draft will be measured on; "" if there is none.
      enough: Tokens of responses to hold out, see ``split_responses``.

    Raises:
      ConfigError: A file that cannot be read, another vocabulary, a split without text, or
        variables of the chat template without effect on texts and prompts.
    """
    variables = cli.json_object(data, "chat_template_kwargs")
    tokenizer = tokenizer.with_chat_template_kwargs(variables)
    check_variables(tokenizer)
    asked = questions.read(prompts, []) if variables and prompts else []
    if not data.text:
        check_effect(variables, asked)
        responses = load_responses(pathlib.Path(data.responses), tokenizer)
        return split_responses(responses, data.held_out_share, enough)
    if data.text == STDLIB:
        check_effect(variables, asked)
        return tuple(_of_library(split, data, tokenizer) for split in SPLITS)
    contents = [*map(inputs.of_path, _paths(data))] if processes.is_writer() else None
    about = {
        "paths": _paths(data),
        "contents": processes.from_writer(contents),
        "held_out_share": data.held_out_share,
        "max_length": data.max_length,
    }

    def load_packed():
        return [packed.load_packed(folder, split, tokenizer, about) for split in SPLITS]

    try:
        found = load_packed()
    except ConfigError:
        found = []
    if not processes.from_writer(bool(found)):
        files.write_once(lambda: _pack(data, tokenizer, folder, about))
        found = load_packed()
    if not any(corpus.counts.get("conversations") for corpus in found):
        check_effect(variables, asked)
    return tuple(x._replace(name=f"{data.text} ({split})") for split, x in zip(SPLITS, found))


def _of_library(split: str, data: ConfigDict, tokenizer: Tokenizer) -> Corpus:
    counts = collections.Counter()
    options = {"tests_share": data.tests_share} if split == "train" else {}
    found = python_source.documents(split, counts=counts, **options)
    name = "the library's source" if split == "train" else "its held-out modules"
    return Corpus.of_documents(name, tokenizer, found, counts)


def _paths(data: ConfigDict) -> list[str]:
    return [path.strip() for path in data.text.split(",")]


def _records(data: ConfigDict) -> Iterator:
    return (record for path in _paths(data) for record in read_records(path))


def _pack(data: ConfigDict, tokenizer: Tokenizer, folder: pathlib.Path, about: dict) -> None:
    """Packs both splits. Of several processes the first one does, and all read its files."""
    held_out = HeldOut.of(_records(data), data.held_out_share)
    encoder = Encoder(tokenizer)
    for split in SPLITS:
        counts = collections.Counter()
        notes = [held_out.note] if split == "held_out" else []
        documents = read_documents(
            about["paths"],
            encoder,
            split=split,
            held_out=held_out,
            counts=counts,
            max_length=data.max_length or None,
            notes=notes,
        )
        print(f"packing {data.text} for {split}", flush=True)
        options = {"counts": counts, "notes": notes, "about": about}
        packed.write_packed(folder, split, documents, tokenizer, **options)


def load_responses(path: pathlib.Path, tokenizer: Tokenizer) -> Corpus:
    """Packs the rows of ``experiments.regenerate``; only the response tokens are trained on.

    Rows that ended with a fault are skipped and counted. A row is a document, see ``Encoder``.

    Args:
      path: The JSONL file.
      tokenizer: The target's tokenizer.

    Raises:
      ConfigError: The file cannot be read, or a row has no ``prompt_ids`` and ``response_ids``.
    """
    encoder = Encoder(tokenizer)
    documents = []
    counts = collections.Counter()
    if not path.is_file():
        raise ConfigError(f"the responses {path} cannot be read: there is no such file")
    for row, source in read_rows(path):
        try:
            if row.get("finish_reason", "length") not in _WHOLE:
                counts["faults"] += 1
                continue
            prompt = row["prompt_ids"]
            response = row["response_ids"]
            is_response = [False] * len(prompt) + [True] * len(response)
            documents.append(encoder.document([*prompt, *response], is_response, source))
        except (AttributeError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"{source} is not a response ({error!r}); expected what experiments.regenerate "
                "writes"
            ) from error
        counts["documents"] += 1
    if not documents:
        raise ConfigError(f"{path} holds no response; run experiments.regenerate")
    ids, masks, _ = zip(*documents)
    starts = np.cumsum([0, *map(len, ids)])
    return Corpus(str(path), np.concatenate(ids), np.concatenate(masks), starts, counts=counts)


def split_responses(corpus: Corpus, share: float, enough: int) -> tuple[Corpus, Corpus]:
    """Splits responses by their prompts, so that all responses to one are on the same side.

    Args:
      corpus: Of ``load_responses``.
      share: The part of the prompts that is held out.
      enough: Tokens to hold out if the share holds fewer, at most an eighth of all.

    Returns:
      The responses to train on, and those held out.
    """
    sizes = np.diff(corpus.starts)
    parts = np.split(corpus.tokens, corpus.starts[1:-1])
    masks = np.split(corpus.mask, corpus.starts[1:-1])
    ranks = np.asarray([unit_hash(ids[~mask].tobytes()) for ids, mask in zip(parts, masks)])
    order = np.argsort(ranks)
    enough = min(enough, len(corpus.tokens) // 8)
    least = ranks[order][np.searchsorted(np.cumsum(sizes[order]), enough)]
    is_held_out = (ranks < share) | (ranks <= least)

    def part(name: str, chosen: np.ndarray, counts: dict[str, int], *notes: str) -> Corpus:
        rows = np.repeat(chosen, sizes)
        starts = np.concatenate([[0], np.cumsum(sizes[chosen])])
        counts = {**counts, "documents": int(chosen.sum())}
        name = f"{corpus.name} ({name})"
        return Corpus(name, corpus.tokens[rows], corpus.mask[rows], starts, counts, notes)

    note = f"{is_held_out.sum()} of {len(sizes)} responses are held out, by their prompts"
    return (part("train", ~is_held_out, {**corpus.counts}), part("held_out", is_held_out, {}, note))


def with_prompts(corpus: Corpus) -> Corpus:
    """Returns responses with their prompts marked, too.

    What begins or ends all prompts alike, such as the tags of a chat template, is not marked.

    Args:
      corpus: Of ``load_responses``.
    """
    mask = corpus.mask.copy()
    ends = [
        (begin, begin + int(np.argmax(mask[begin:end])))
        for begin, end in itertools.pairwise(corpus.starts)
        if mask[begin:end].any()
    ]
    prompts = [corpus.tokens[begin:end].tolist() for begin, end in ends]
    before = len(os.path.commonprefix(prompts))
    after = len(os.path.commonprefix([ids[::-1] for ids in prompts]))
    for begin, end in ends:
        mask[begin + before : max(begin + before, end - after)] = True
    return corpus._replace(mask=mask)


def check_held_out(corpus: Corpus, length: int, data: ConfigDict, name: str = "length") -> None:
    """Checks that a held-out text has a window.

    Args:
      corpus: The held-out text.
      length: The tokens of a window.
      data: The config's ``data``.
      name: The key that the window's length comes from.

    Raises:
      ConfigError: The text is shorter.
    """
    if corpus.num_windows(length) == 0:
        share = f"raise data.held_out_share, now {data.held_out_share}, "
        raise ConfigError(
            f"{corpus.name} has {len(corpus.tokens)} tokens; expected at least {length}, a window: "
            f"give more text, {share if data.text != STDLIB else ''}or lower {name}"
        )


def held_out_prompts(
    corpus: Corpus, n: int, length: int, begin_id: int | None = None
) -> list[list[int]]:
    """Takes prompts from a held-out text, at even distances.

    A prompt of a conversation ends where an answer of the assistant begins, a prompt of a text
    anywhere; both begin with their document or ``length`` tokens before. Every prompt is another
    place.

    Args:
      corpus: A text whose documents are known.
      n: The number of prompts; fewer if the text has fewer places.
      length: The maximum tokens of a prompt.
      begin_id: The id of BOS, which a prompt keeps that is cut; None if there is none.

    Returns:
      The ids of each prompt.
    """
    starts = np.asarray([0, len(corpus.tokens)]) if corpus.starts is None else corpus.starts
    places = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist()):
        mask = np.ones(end - begin, bool)
        if corpus.mask is not None:
            mask = np.asarray(corpus.mask[begin:end])
        if mask[1:].all():
            ends = (
                range(begin + length, end, length)
                if end - begin > length
                else [begin + (end - begin + 1) // 2]
            )
        else:
            ends = (begin + 1 + np.flatnonzero(mask[1:] & ~mask[:-1])).tolist()
        places += [(begin, at) for at in ends]
    n = min(n, len(places))
    chosen = [places[i * len(places) // n] for i in range(n)]
    return [cut(corpus.tokens[begin:end].tolist(), length, begin_id) for begin, end in chosen]


def prompts(
    corpus: Corpus,
    data: ConfigDict,
    target: LoadedModel,
    *,
    path: str = "",
    num_prompts: int,
    prompt_tokens: int,
    max_new_tokens: int,
) -> list[list[int]]:
    """Returns the prompts that a draft is measured on while it is trained.

    Args:
      corpus: The held-out text.
      data: The config's ``data``.
      target: The model that the draft is for.
      path: A file of prompts. "" means prompts of the held-out text, see ``held_out_prompts``, or
        functions of the library's held-out modules.
      num_prompts: Their number; fewer if the held-out text has fewer places.
      prompt_tokens: The maximum tokens of a prompt of the held-out text.
      max_new_tokens: The tokens that will follow a prompt.

    Raises:
      ConfigError: A file that cannot be read, or no room for a prompt.
    """
    if path or data.text == STDLIB:
        loaded = questions.load(path, num_prompts)
        for note in loaded.notes:
            print(note, flush=True)
        variables = cli.json_object(data, "chat_template_kwargs")
        target = target.with_chat_template_kwargs(variables)
        return fit(loaded.chosen, target, max_new_tokens, None)[0]
    room = room_for_prompt(target, max_new_tokens, prompt_tokens)
    return held_out_prompts(corpus, num_prompts, room, target.config.bos_token_id)


def fingerprint(texts: Sequence[Corpus]) -> dict[str, Any]:
    """Returns checksums of training texts; a resumed run must have the same.

    Raises:
      ConfigError: Another process has other texts.
    """
    found = []
    for text in texts:
        parts = (text.tokens, text.mask, text.starts)
        sums = [0 if x is None else zlib.crc32(np.ascontiguousarray(x)) for x in parts]
        found.append([text.name, len(text.tokens), *sums])
    processes.check_same({name: rest for name, *rest in found})
    return {"data": found}


def usage(corpus: Corpus, length: int) -> dict[str, Any]:
    """Returns what of a text is used in windows, and what is left out and why, for a report.

    Args:
      corpus: The text.
      length: The tokens of a window.
    """
    count = corpus.num_windows(length)
    counts = corpus.counts
    used = count * length
    mask = np.ones(used, bool) if corpus.mask is None else corpus.mask[:used]
    left_out = {name: counts[name] for name in _REASONS if counts.get(name)}
    too_long = counts.get("too_long_tokens", 0)
    return {
        "name": corpus.name,
        "documents": counts.get("documents"),
        "tokens_read": len(corpus.tokens) + too_long,
        "tokens_used": used,
        "tokens_predicted": int(np.sum(mask)),
        "tokens_left_out": {
            "short tail": len(corpus.tokens) - used,
            **({"too long": too_long} if too_long else {}),
        },
        "windows": count,
        "window_tokens": length,
        "left_out": left_out,
        "notes": list(corpus.notes),
    }


def usage_lines(found: dict[str, Any]) -> list[str]:
    """Returns sentences on the usage of a text, for the log."""
    known = [] if found["documents"] is None else [f"documents {found['documents']:,}"]
    known += [
        f"tokens read {found['tokens_read']:,}",
        f"used {found['tokens_used']:,} in {found['windows']:,} windows of "
        f"{found['window_tokens']} ({found['tokens_predicted']:,} to predict)",
        f"left over at the end {found['tokens_left_out']['short tail']:,}",
    ]
    lines = [f"{found['name']}: {', '.join(known)}"]
    reasons = [f"{_REASONS[name]} {count:,}" for name, count in found["left_out"].items()]
    if "too long" in found["tokens_left_out"]:
        reasons.append(f"their tokens {found['tokens_left_out']['too long']:,}")
    return lines + [f"left out: {', '.join(reasons)}" for _ in reasons[:1]] + found["notes"]
