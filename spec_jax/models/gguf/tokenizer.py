"""The tokenizer that the fields of a GGUF file stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from spec_jax.config.checks import check
from spec_jax.errors import WeightsError
from spec_jax.models.checks import is_integer, require, shown
from spec_jax.models.gguf.header import Header

# How published tokenizers split a text before merging, in the notation of their tokenizer.json.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {  # by tokenizer.ggml.pre
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(_WORDS.format(digits="{1,3}")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(_WORDS.format(digits="")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
_ALIASES = {"gpt2": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}
_SPECIAL = (2, 3)  # tokenizer.ggml.token_type: unknown, control
_USER_DEFINED, _UNUSED = 4, 5
_MAX_PIECE = 256  # characters of a token of SentencePiece, where each split of it may be a merge
_MAX_PIECES = 1 << 21  # of all
_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def read_tokenizer(header: Header) -> tuple[Tokenizer, dict[str, Any]]:
    """Returns the tokenizer of a file and the object of its tokenizer_config.json.

    Args:
      header: of the file.

    Raises:
      ConfigError: it is of a kind that is not read.
      WeightsError: its fields contradict each other.
    """
    said = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in header.fields.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = said.get("model")
    makers = {"gpt2": _byte_level, "llama": _sentence_piece}
    is_known = isinstance(kind, str) and kind in makers
    supported = ", ".join(makers)
    require(is_known, f"tokenizer.ggml.model is {shown(kind)}; supported: {supported}")
    tokens = _texts(header, said, "tokens")
    types = said.get("token_type", np.ones(len(tokens), int))
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise WeightsError(f"{header.path}: token_type is not of {len(tokens)} tokens")
    count = int(np.max(np.flatnonzero(types != _UNUSED), initial=-1)) + 1  # the rest is padding
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens[:count])]
    types = types[:count]
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and count > embedding.shape[0]:
        raise WeightsError(
            f"{header.path} has {count} tokens and an embedding of {embedding.shape[0]}"
        )
    if len(set(tokens)) != count:
        raise WeightsError(f"{header.path}: two tokens have the same text")
    backend = makers[kind](header, said, tokens, types)
    added = [
        AddedToken(tokens[i], special=types[i] in _SPECIAL, normalized=False)
        for i in np.flatnonzero(np.isin(types, (*_SPECIAL, _USER_DEFINED)))
    ]
    backend.add_tokens(added)
    ids = {ours: said.get(f"{name}_token_id") for name, ours in _NAMES.items()}
    for name, index in ids.items():
        if index is not None and not is_integer(index, 0, len(tokens) - 1):
            raise WeightsError(f"{header.path}: {name}_token_id is {shown(index)}, which is no id")
    named = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    _add_ends(backend, said, ids, named)
    templates = {
        key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": value
        for key, value in header.fields.items()
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
    }
    for name, template in templates.items():
        if not isinstance(template, str):
            raise WeightsError(
                f"{header.path}: chat template {shown(name)} is {shown(template)}; expected a text"
            )
    return backend, named | ({"chat_template": templates} if templates else {})


def _texts(header: Header, said: Mapping[str, Any], name: str) -> list[str]:
    """A list of texts that must be there."""
    texts = said.get(name)
    if not isinstance(texts, list) or not texts:
        raise WeightsError(f"{header.path}: tokenizer.ggml.{name} is missing, or no list of texts")
    return texts


def _pre(said: Mapping[str, Any]) -> Any:
    """How a text is split before merging, under one of its names."""
    pre = said.get("pre")
    return _ALIASES.get(pre, pre) if isinstance(pre, str) else pre


def _byte_level(
    header: Header, said: Mapping[str, Any], tokens: Sequence[str], _types: np.ndarray
) -> Tokenizer:
    """Byte-level BPE, as in GPT-2, Llama 3 and Qwen."""
    pre = _pre(said)
    is_known = isinstance(pre, str) and pre in _BYTE_LEVEL
    why = f"so how it splits a text is not known; supported: {', '.join(_BYTE_LEVEL)}"
    require(is_known, f"tokenizer.ggml.pre is {shown(pre)}, {why}")
    merges = []
    for merge in _texts(header, said, "merges"):
        space = merge.find(" ", 1)
        if space < 0:
            raise WeightsError(f"{header.path}: the merge {shown(merge)} has no two parts")
        merges.append((merge[:space], merge[space + 1 :]))
    backend = _bpe(header, tokens, merges, ignore_merges=pre == "llama-bpe")
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_BYTE_LEVEL[pre])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(
    header: Header, said: Mapping[str, Any], tokens: Sequence[str], types: np.ndarray
) -> Tokenizer:
    """SentencePiece's BPE with bytes for what no token has, as in Llama 2 and Mistral."""
    scores = said.get("scores")
    is_fit = isinstance(scores, np.ndarray) and scores.dtype.kind == "f"
    if not is_fit or len(scores) < len(tokens):
        raise WeightsError(f"{header.path}: scores are no numbers of {len(tokens)} tokens")
    sizes = list(map(len, tokens))
    if max(sizes) > _MAX_PIECE or sum(sizes) > _MAX_PIECES:
        raise WeightsError(
            f"{header.path}: the longest token has {max(sizes)} characters, all {sum(sizes)}; "
            f"expected at most {_MAX_PIECE} and {_MAX_PIECES}"
        )
    ids = {token: i for i, token in enumerate(tokens)}
    # Pieces merge in the order of their scores; equal ones in the order of their parts.
    order = np.argsort(-scores[: len(tokens)], kind="stable")
    merges = []
    for token in (tokens[i] for i in order if types[i] not in _SPECIAL):
        parts = ((token[:k], token[k:]) for k in range(1, len(token)))
        known = [(a, b) for a, b in parts if a in ids and b in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    unknown = said.get("unknown_token_id", 0)
    backend = _bpe(
        header,
        tokens,
        merges,
        unk_token=tokens[unknown] if is_integer(unknown, 0, len(tokens) - 1) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    has_prefix = _flag(said, "add_space_prefix", True)
    before = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return backend


def _bpe(
    header: Header, tokens: Sequence[str], merges: Sequence[Sequence[str]], **options: Any
) -> Tokenizer:
    try:
        vocab = {token: i for i, token in enumerate(tokens)}
        return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises no other
        raise WeightsError(f"{header.path}: its merges are no BPE: {error}") from error


def _flag(said: Mapping[str, Any], name: str, default: bool) -> bool:
    """A field that is true or false."""
    value = said.get(name, default)
    check(isinstance(value, bool), f"tokenizer.ggml.{name}", value, "true or false")
    return value


def _add_ends(
    backend: Tokenizer,
    said: Mapping[str, Any],
    ids: Mapping[str, int | None],
    named: Mapping[str, str],
) -> None:
    """Has the tokenizer add the tokens that begin and end a text, where the file says so."""
    has_begin = said["model"] == "llama" or _pre(said) == "llama-bpe"
    defaults = {"bos": has_begin, "eos": False}
    ends = {}
    for name, default in defaults.items():
        if _flag(said, f"add_{name}_token", default):
            is_there = ids[name] is not None
            require(is_there, f"texts have a token {name}, and {name}_token_id is missing")
            ends[name] = named[f"{name}_token"]
    if ends:
        begin = [ends["bos"]] if "bos" in ends else []
        end = [ends["eos"]] if "eos" in ends else []
        backend.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            special_tokens=[(text, ids[name]) for name, text in ends.items()],
        )
