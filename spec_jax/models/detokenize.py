"""Finds out how much of the end of a decoded text can still change as more tokens follow.

Streamed text may only grow at its end. The decoders of most tokenizers do this, except for bytes:
the bytes of one character may come in several tokens. A byte-level decoder shows an unfinished
character as one U+FFFD. A byte-fallback decoder decodes a run of byte tokens as a whole, and one
invalid byte turns every byte of the run into U+FFFD, complete characters included.
"""

from __future__ import annotations

import enum
import json
import re

import tokenizers

BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
# The text of each token depends only on the token and on whether it is the first.
_LOCAL = {"Replace", "Strip", "Metaspace", "WordPiece", "BPEDecoder"}
_JOINING = {"Fuse", "ByteLevel"}  # these return one text: afterwards only trimming is local


class Unsettled(enum.Enum):
    """The part of a text that is not final before the next token is known."""

    NOTHING = enum.auto()
    CHARACTER = enum.auto()  # the last character, if it is U+FFFD
    BYTE_RUN = enum.auto()  # the text of the byte tokens at the end
    ALL = enum.auto()  # the decoder is unknown and might rewrite anything


def unsettled_part(backend: tokenizers.Tokenizer) -> Unsettled:
    """Returns the part of a text that a tokenizer's decoder may still change."""
    if backend.decoder is None:
        return Unsettled.NOTHING
    try:
        steps = _steps(json.loads(backend.decoder.__getstate__()))
    except Exception:  # a decoder written in Python has no state; the library's error is bare
        return Unsettled.ALL
    found = Unsettled.NOTHING
    is_joined = False
    for step in steps:
        if is_joined and step not in ("Fuse", "Strip"):
            return Unsettled.ALL
        if step == "ByteLevel" and found is Unsettled.NOTHING:
            found = Unsettled.CHARACTER
        elif step == "ByteFallback":
            found = Unsettled.BYTE_RUN
        elif step not in _LOCAL | {"Fuse"}:
            return Unsettled.ALL
        is_joined |= step in _JOINING
    return found


def _steps(decoder: dict) -> list[str]:
    if decoder["type"] != "Sequence":
        return [decoder["type"]]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]
