"""Tokenizers of each kind of decoder for the tests, without a file."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from spec_jax.models.tokenizer import Tokenizer

WORDS = ("▁", "▁the", "a", "b", "né", "數", "�")
SPECIAL = ("<s>", "</s>")


def byte_fallback() -> Tokenizer:
    """As SentencePiece's: few words, every other character by the bytes of its UTF-8."""
    texts = ["<unk>", *SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *WORDS]
    options = dict(merges=[], byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={text: i for i, text in enumerate(texts)}, **options)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", *SPECIAL])
    return Tokenizer(backend)


def bytes_alone() -> Tokenizer:
    """Byte-level, an id a byte; then two special tokens."""
    alphabet = {c: b for b, c in _byte_letters().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend)


def letters(count: int) -> Tokenizer:
    """A letter an id."""
    vocab = {chr(ord("A") + i): i for i in range(count)}
    return Tokenizer(tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[])))


def _byte_letters() -> dict[int, str]:
    """GPT-2's letters: printable Latin-1 as itself, other bytes from U+0100 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(0x100 + i) for i, b in enumerate(moved)}


def with_decoder(decoder) -> Tokenizer:
    """The byte-fallback vocabulary under another decoder."""
    tokenizer = byte_fallback()
    tokenizer.backend.decoder = decoder
    return tokenizer
