"""The two splits of a corpus: what is trained on, and what is held out to evaluate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import NamedTuple

from spec_jax.data.records import Conversation, Text
from spec_jax.errors import ConfigError

SPLITS = ("train", "held_out")
ENOUGH = 16_384  # characters of held-out text


def check_split(split: str) -> None:
    """Raises a ConfigError unless ``split`` is one of ``SPLITS``."""
    if split not in SPLITS:
        raise ConfigError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")


def unit_hash(content: bytes) -> float:
    """Returns a number in [0, 1) that depends on ``content`` alone and is evenly spread."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


def rank(record: Conversation | Text) -> float:
    """Returns a number in [0, 1) that depends on a record's text or messages alone."""
    is_text = isinstance(record, Text)
    content = record.text if is_text else json.dumps(record.messages, sort_keys=True)
    return unit_hash(content.encode("utf-8", "surrogatepass"))


class HeldOut(NamedTuple):
    """Which records are held out. ``HeldOut(share)`` holds out a share of many records.

    It depends on the contents alone: the order of the records, their files and the tokenizer do
    not matter, and equal records are always in the same split.

    Attributes:
      share: Records of a smaller ``rank`` are held out. So a larger share holds out the records
        of a smaller one and more.
      whole: The ranks of further records that are held out.
      cut: The rank of a text of which only the end is held out, and where the end begins.
      note: How the records are split, as a sentence.
    """

    share: float = 0.0
    whole: frozenset[float] = frozenset()
    cut: tuple[float, int] | None = None
    note: str = ""

    @classmethod
    def of(cls, records: Iterable[Conversation | Text], share: float) -> HeldOut:
        """Decides what is held out, also of few records or a single text.

        If the share holds out enough text, nothing else is held out. If not, records are held
        out whole up to a quarter of the text; if they are too large for that, the end of the
        longest text is, or the smallest of the conversations. Of a single conversation nothing is.

        Args:
          records: All records. Those that give no document are ignored. Of a large corpus only
            the first ones are read.
          share: The part of the records to hold out, in [0, 1). With 0 nothing is.

        Raises:
          ConfigError: The share is out of range.
        """
        if not 0.0 <= share < 1.0:
            raise ConfigError(f"held_out_share is {share!r}; expected a number in [0, 1)")
        by_share = cls(share, note=f"{share:g} of the records are held out, by their contents")
        if share == 0:
            return cls(note="nothing is held out")
        sizes = {}
        texts = {}
        total = 0
        held = 0
        for record in records:
            at = rank(record)
            if at in sizes or not is_document(record):
                continue
            if isinstance(record, Text):
                sizes[at] = len(record.text)
                texts[at] = record.source
            else:
                sizes[at] = sum(len(message["content"] or "") for message in record.messages)
            total += sizes[at]
            held += sizes[at] * (at < share)
            if min(held, total - held) >= ENOUGH:
                return by_share
        few = max(min(ENOUGH, total // 8), 1)
        if not sizes or few <= held < total:
            return by_share
        whole = []
        held = 0
        for at in sorted(sizes):
            if held < few and held + sizes[at] <= total // 4:
                whole.append(at)
                held += sizes[at]
        longest = max(sizes, key=lambda at: (sizes[at], at))
        if held < few and longest in texts:
            size = max(int(share * sizes[longest]), min(ENOUGH, sizes[longest] // 4), 1)
            note = f"the last {size} characters of {texts[longest]} are held out"
            return cls(cut=(longest, sizes[longest] - size), note=note)
        if len(sizes) == 1:
            return cls(note="of a single conversation nothing can be held out")
        if held < few:
            others = sorted((size, at) for at, size in sizes.items() if at != longest)
            large = [at for size, at in others if size >= few]
            whole = large[:1] or [at for _, at in others]
        note = f"{len(whole)} of {len(sizes)} records are held out, chosen by their contents"
        return cls(whole=frozenset(whole), note=note)

    def part(self, record: Conversation | Text, split: str) -> Conversation | Text | None:
        """Returns what a split has of a record: the record, a part of a text, or None."""
        at = rank(record)
        if self.cut is not None and at == self.cut[0]:
            begin = self.cut[1]
            begin = record.text.find("\n", begin, begin + 1000) + 1 or begin
            text = record.text[:begin] if split == "train" else record.text[begin:]
            return record._replace(text=text)
        is_held_out = at < self.share or at in self.whole
        return record if is_held_out == (split == "held_out") else None


def is_document(record: Conversation | Text) -> bool:
    """Whether a record has something to predict: a text, or an answer of the assistant."""
    if isinstance(record, Text):
        return bool(record.text)
    return any(message["role"] == "assistant" for message in record.messages[1:])
