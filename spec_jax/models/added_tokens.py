"""Added tokens that files beside tokenizer.json state.

They are known as transformers 5 knows them, but those that special_tokens_map.json lists as
``additional_special_tokens`` are special here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers

from spec_jax.models.checks import is_integer, require, shown, stated_object

DECODER = "added_tokens_decoder"
_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def add_stated_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], ids: Mapping[str, Any]
) -> None:
    """Adds the tokens that a tokenizer lacks, and the flags of those that it has.

    A special token that is stated by name alone is added if the vocabulary has it: its id is then
    known. Where one token has two ids, that of tokenizer.json stands.

    Args:
      backend: of tokenizer.json.
      config: the object of tokenizer_config.json, which may state tokens by their ids and special
        tokens by their names.
      ids: the object of added_tokens.json, which is read if the config states no ids.

    Raises:
      ValueError: a token is malformed, or would get another id than is stated.
    """
    named = [_token(config[name], special=True) for name in _NAMES if config.get(name)]
    groups = [config[name] for name in _LISTS if isinstance(config.get(name), (Mapping, list))]
    lists = [group.values() if isinstance(group, Mapping) else group for group in groups]
    listed = [_token(x, special=True) for group in lists for x in group if x]
    specials = {token.content for token in (*named, *listed)}
    present = backend.get_added_tokens_decoder()
    if DECODER in config:
        tokens = stated_object(config, DECODER)
        stated = {_index(key): _token(token) for key, token in tokens.items()}
    else:
        flagged = {_index(x): _token(text, special=text in specials) for text, x in ids.items()}
        stated = {index: token for index, token in flagged.items() if index not in present}
    for token in stated.values():
        token.special |= token.content in {x.content for x in named}
    vocab = backend.get_vocab(with_added_tokens=True)
    same = set(map(repr, present.values()))
    changed = [token for _, token in sorted(stated.items()) if repr(token) not in same]
    known = {token.content for token in (*present.values(), *stated.values())}
    changed += [x for x in (*named, *listed) if x.content in vocab and x.content not in known]
    backend.add_tokens(changed)
    for index, token in stated.items():
        given = backend.token_to_id(token.content)
        if token.content not in vocab and given != index:
            raise ValueError(
                f"it states the token {shown(token.content)} with the id {index}, which is not in "
                f"tokenizer.json and would get the id {given}; expected the next id after those of "
                "tokenizer.json, or a tokenizer.json that has the token"
            )


def _index(stated: Any) -> int:
    is_text = isinstance(stated, str) and stated.isdecimal()
    is_id = is_text or is_integer(stated, 0)
    require(is_id, f"an added token has the id {shown(stated)}; expected one of 0 or more")
    return int(stated)


def _token(stated: Any, **flags: bool) -> tokenizers.AddedToken:
    """Returns a token that is stated as a text, or as an object with its content and flags."""
    fields = stated if isinstance(stated, Mapping) else {"content": stated}
    values = {name: fields[name] for name in _FIELDS if name in fields} | flags
    try:
        return tokenizers.AddedToken(**values)
    except TypeError as error:
        raise ValueError(f"an added token is {shown(stated)}: {error}") from error
