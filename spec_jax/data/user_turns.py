"""User turns that a model writes itself, as prompts: where they begin, and which are noise.

Source: Magpie, Xu et al. 2024, arXiv 2406.08464.
"""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from spec_jax.data.chat import ChatTemplate
from spec_jax.data.tokens import separator_id
from spec_jax.errors import ConfigError
from spec_jax.models.tokenizer import Tokenizer

_MARK = "thewordsoftheuser"  # rendered as a user's turn, to see what stands around it
_FIRST = (_MARK, "What", "How", "I", "Write", "Can")  # words that a turn may begin with
_GRAM = 4  # tokens of the runs that repetition is counted in
_DISTINCT = 0.6  # least share of these runs that are distinct
_SHOWN = 3  # samples of what is left out, by reason
REASONS = {
    "unfinished": "did not end within the limit",
    "ended": "ended before the prompt had its length",
    "short": "shorter than the limit",
    "tags": "with a tag of the chat template",
    "repetitive": "of which more than four tenths repeat themselves",
    "duplicate": "equal to an earlier one",
}


class Opening(NamedTuple):
    """What stands around a user's turn.

    Attributes:
      ids: The tokens up to where the user speaks.
      before: Their text; "" without a chat template.
      after: The text between the turn and the answer; likewise.
      stop_tokens: The ids that end a turn.
      stop: The texts that do, if no id does.
      tags: Texts that no turn should have.
      words: Prefixes, one of which begins each turn; ``("",)`` if the model writes it whole.
      starts: The ids that the model continues from, for each of them.
    """

    ids: list[int]
    before: str
    after: str
    stop_tokens: tuple[int, ...]
    stop: tuple[str, ...]
    tags: tuple[str, ...]
    words: tuple[str, ...]
    starts: tuple[list[int], ...]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, stop_tokens: Sequence[int], words: Sequence[str] = ()
    ) -> Opening:
        """Finds where the user speaks; a model without a chat template begins a text.

        Args:
          tokenizer: The model's tokenizer, with its chat template.
          stop_tokens: The ids at which the model's answers end.
          words: Of ``load_words``; unused without a chat template.

        Raises:
          ConfigError: The template fails, or does not write the user's words as they are, once;
            there is no template, and no token that begins a text; or a prefix has a tag.
        """
        tags = tuple(text for text in tokenizer.special_texts.values() if text.strip())
        if "default" not in tokenizer.chat_templates:
            ids = tokenizer.encode("") or [separator_id(tokenizer)]
            return cls(ids, "", "", tuple(stop_tokens), (), tags, ("",), (ids,))
        template = ChatTemplate.from_tokenizer(tokenizer)
        text = template.render([{"role": "user", "content": _MARK}], add_generation_prompt=True)
        before, *rest = text.split(_MARK)
        if len(rest) != 1 or not before:
            raise ConfigError(
                f"the chat template writes the words of the user {len(rest)} times, after "
                f"{before!r:.40}: expected once, after a header of their turn; give prompts, "
                "--config.prompts=FILE"
            )
        after = rest[0]

        def encode(text: str) -> list[int]:
            return tokenizer.backend.encode(text, add_special_tokens=False).ids

        tags += (*before.split()[-1:], *after.split()[:1])
        first = encode(after)[:1]
        ends = tuple(i for i in first if i in tokenizer.special_texts)
        stop = () if ends else tuple(after.split()[:1])
        ends = tuple(dict.fromkeys((*stop_tokens, *ends)))

        def common(text: str, words: Sequence[str]) -> list[int]:
            return os.path.commonprefix([encode(text + word) for word in words])

        def start(prefix: str) -> list[int]:
            whole = encode(before + prefix)
            if not prefix[-1].isspace():
                return whole
            found = common(before + prefix, _FIRST)
            texts = [tokenizer.decode(ids, has_special=True) for ids in (found, whole)]
            return found if texts[0] == texts[1] else whole

        # White space before a word may be a part of the word's token, which the model then writes;
        # and at the end of a text it may be other tokens than before a word.
        ids = common(before, ("", *_FIRST)) or encode(before)
        words = tuple(words) or ("",)
        for prefix in words:
            if any(tag in prefix for tag in (*tags, *stop)):
                raise ConfigError(f"first words {prefix!r} hold a tag of the chat template")
        starts = tuple(start(prefix) if prefix else ids for prefix in words)
        return cls(ids, before, after, ends, stop, tags, words, starts)

    def begin(self, index: int) -> tuple[str, list[int]]:
        """Returns the prefix of a turn and the ids to continue from; both depend on the index."""
        which = random.Random(index).randrange(len(self.words))
        return self.words[which], self.starts[which]

    def row(self, index: int, text: str) -> dict[str, Any]:
        """Returns a turn as a line of a file of prompts."""
        if not self.before:
            return {"index": index, "prompt": text}
        return {"index": index, "messages": [{"role": "user", "content": text}]}

    def prompt(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Returns the ids of a turn up to where its answer begins."""
        if not self.before:
            return tokenizer.encode(text)
        whole = self.before + text + self.after
        return tokenizer.backend.encode(whole, add_special_tokens=False).ids

    def fault(self, ids: Sequence[int], text: str, finish_reason: str, min_tokens: int) -> str:
        """Returns the key of ``REASONS`` for which a turn is left out; "" if it is a prompt.

        Args:
          ids: The turn's tokens, those of its prefix included, without the one that ended it.
          text: Their text, special tokens included.
          finish_reason: Of its decoding.
          min_tokens: The least number of tokens.
        """
        is_ended = finish_reason in ("stop_token", "stop_string")
        if self.before and not is_ended:
            return "unfinished"
        if not text.strip() or len(ids) < min_tokens:
            return "short"
        if is_ended and not self.before:
            return "ended"
        if any(tag in text for tag in self.tags):
            return "tags"
        grams = [tuple(ids[i : i + _GRAM]) for i in range(len(ids) - _GRAM + 1)]
        return "repetitive" if len({*grams}) < _DISTINCT * len(grams) else ""


class Chosen(NamedTuple):
    """Turns that are used as prompts.

    Attributes:
      texts: Their texts by index, in ascending order.
      left_out: How many others there are, by reason.
      samples: Some of their texts, likewise.
    """

    texts: dict[int, str]
    left_out: collections.Counter[str]
    samples: dict[str, list[str]]

    def sentences(self) -> list[str]:
        """Returns sentences on what was left out, and why, with samples."""
        total = len(self.texts) + self.left_out.total()
        lines = [f"the target wrote {total} prompts; {len(self.texts)} are used"]
        for reason, count in self.left_out.most_common():
            shown = ", ".join(f"{text!r:.80}" for text in self.samples[reason])
            shown = shown and f": {shown}"
            lines.append(f"left out {count / total:.1%}, {REASONS[reason]}{shown}")
        return lines


def choose(
    turns: Iterable[Mapping[str, Any]], opening: Opening, tokenizer: Tokenizer, min_tokens: int
) -> Chosen:
    """Chooses the turns that are prompts; of equal ones that with the lowest index.

    The result depends on the turns alone, not on their order.

    Args:
      turns: ``index``, ``prompt_ids``, ``response_ids`` and ``finish_reason`` of each.
      opening: What they were written after.
      tokenizer: The model's.
      min_tokens: The least number of tokens of a turn.

    Raises:
      ConfigError: A turn begins otherwise than the opening says.
    """
    chosen = Chosen({}, collections.Counter(), {})
    seen = set()
    for turn in sorted(turns, key=lambda turn: turn["index"]):
        ids = list(turn["response_ids"])
        if ids and ids[-1] in opening.stop_tokens:
            ids.pop()
        prefix, start = opening.begin(turn["index"])
        if turn["prompt_ids"] != start:
            raise ConfigError(
                f"turn {turn['index']} does not begin with {prefix!r}: it was written with other "
                "first words or another chat template, which this folder needs to go on"
            )
        text = tokenizer.decode(ids, has_special=True)
        if prefix:
            text = prefix + tokenizer.decode_after(start, ids, has_special=True)
            ids = [*start[len(opening.ids) :], *ids]
        for stop in opening.stop:
            text = text.partition(stop)[0]
        text = text.strip() if opening.before else text.rstrip("\ufffd")
        reason = opening.fault(ids, text, turn["finish_reason"], min_tokens)
        if not reason and text == prefix.strip():
            reason = "short"  # a request without what it is about
        key = " ".join(text.casefold().split())
        if not reason and key in seen:
            reason = "duplicate"
        if reason:
            chosen.left_out[reason] += 1
            samples = chosen.samples.setdefault(reason, [])
            if text and len(samples) < _SHOWN:
                samples.append(text)
            continue
        seen.add(key)
        chosen.texts[turn["index"]] = text
    return chosen
