"""GGUF files that ``gguf`` writes: weights, configs, tokenizers, and files that lie."""

import dataclasses
import json
import re
import struct
import sys
import tracemalloc
import unicodedata

import gguf
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gguf_files import tensors_of, tokenizer_fields, write
from support.tiny_models import LLAMA, QWEN2, QWEN3, QWEN3_MOE, random_weights

from experiments.run import inputs
from spec_jax import load_model, zoo
from spec_jax.errors import ConfigError, SpecJaxError, WeightsError
from spec_jax.inspection import inspect
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.models.config import RopeConfig
from spec_jax.models.gguf import Header, header, open_tensors, read_header, read_tokenizer
from spec_jax.models.rope import rope_frequencies
from spec_jax.planning.presets import find_config

WIDE = dict(hidden_size=64, intermediate_size=96)
MODELS = {
    "llama": dataclasses.replace(LLAMA, **WIDE, head_dim=8),
    "qwen2": dataclasses.replace(QWEN2, **WIDE, head_dim=32),
    "qwen3": dataclasses.replace(QWEN3, **WIDE, head_dim=128, rope=RopeConfig()),
    "qwen3_moe": dataclasses.replace(QWEN3_MOE, **WIDE, head_dim=16, moe_intermediate_size=768),
}
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0")


def plain_after(array, kind):
    """A tensor as it comes back from being quantised."""
    kind = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if array.ndim < 2 or array.shape[-1] % block:
        return array
    return gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "Q8_0") for name in MODELS), *(("llama", k) for k in KINDS)]
)
def test_a_file_is_the_model_that_it_was_made_from(tmp_path, name, kind):
    config = MODELS[name]
    params = random_weights(config)
    write(tmp_path / "tiny.gguf", config, params, kind)
    loaded = load_model(tmp_path)  # a folder with one file
    assert loaded.config == dataclasses.replace(config, rms_norm_eps=loaded.config.rms_norm_eps)
    assert loaded.config.rms_norm_eps == config.rms_norm_eps  # as a short decimal again
    assert loaded.source == "Tiny, mit"
    expected = tensors_of(config, params)
    stored = tensors_of(config, loaded.params)
    assert stored.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(stored[key], plain_after(array, kind), key)
    save_pretrained(tmp_path / "saved", loaded.params, loaded.config)
    again = load_model(tmp_path / "saved")
    assert again.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    found = inspect(tmp_path / "tiny.gguf")
    assert (found.kind, found.refused, found.notes) == ("model", None, ())
    assert kind in found.dtypes and found.facts["source"] == "Tiny, mit"


def _readable():
    """The types that ``gguf`` makes plain, with blocks of more than one value."""
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        if block > 1:
            yield kind.name


@pytest.mark.parametrize("name", sorted(_readable()))
def test_a_part_of_a_quantised_tensor_is_that_part_of_its_values(tmp_path, name):
    """Random blocks of every type, those of K-types too, in a model."""
    config = dataclasses.replace(MODELS["llama"], hidden_size=256, head_dim=64)
    draw = np.random.RandomState(0)
    values = []

    def random_blocks(array, kind):
        if kind.name != name:
            values.append(array)
            return array
        block, size = gguf.GGML_QUANT_SIZES[kind]
        stored = np.zeros((*array.shape[:-1], array.shape[-1] // block * size), np.uint8)
        is_bad = np.ones(len(stored), bool)
        while is_bad.any():  # random scales may be infinite
            stored[is_bad] = draw.randint(0, 256, stored[is_bad].shape)
            with np.errstate(all="ignore"):
                plain = gguf.quants.dequantize(stored, kind)
            is_bad = ~np.isfinite(plain).all(axis=-1)
        values.append(plain)
        return stored

    write(tmp_path / "tiny.gguf", config, random_weights(config), name, quantise=random_blocks)
    loaded = load_model(tmp_path)
    assert name in inspect(tmp_path).dtypes
    for array, (key, ours) in zip(values, tensors_of(config, loaded.params).items(), strict=True):
        np.testing.assert_array_equal(ours, array, key)
    tensor = open_tensors(tmp_path / "tiny.gguf")["model.layers.1.self_attn.q_proj.weight"]
    part = (range(70, 131), range(5, 200))
    np.testing.assert_array_equal(tensor.read(part), tensor.read_whole()[70:131, 5:200])


SCALED = {
    "untyped": dict(rope_type="linear", factor=2.0),
    "llama3": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512),
    "linear": dict(rope_type="linear", factor=2.0),
}


@pytest.mark.parametrize("kind", SCALED)
def test_rotary_scaling_is_that_of_the_model(tmp_path, kind):
    rope = RopeConfig(rope_theta=500000.0, **SCALED[kind])
    config = dataclasses.replace(MODELS["llama"], rope=rope, head_dim=32)
    fields = {}
    extra = {}
    if kind == "llama3":
        plain, _ = rope_frequencies(RopeConfig(rope_theta=500000.0), 32)
        extra["rope_freqs.weight"] = np.asarray(plain / rope_frequencies(rope, 32)[0])
    else:
        fields["llama.rope.scaling.type"] = None if kind == "untyped" else ("string", kind)
        fields["llama.rope.scaling.factor"] = ("float32", rope.factor)
    if kind == "yarn":
        fields["llama.rope.scaling.original_context_length"] = ("uint32", 512)
    write(tmp_path / "tiny.gguf", config, random_weights(config), "F32", fields, extra)
    assert load_model(tmp_path).config == config
    if kind == "llama3":
        right = extra["rope_freqs.weight"]
        for wrong in (1.1 * right, np.inf * right, 0 * right, right[:5]):
            extra["rope_freqs.weight"] = wrong
            write(tmp_path / "tiny.gguf", config, random_weights(config), "F32", fields, extra)
            with pytest.raises(ConfigError, match="is not that of Llama 3's rotary scaling"):
                load_model(tmp_path)


REFUSED = {
    "llama.attention.sliding_window": (
        ("uint32", 64),
        "is 64, which is not read; .*gguf-set-metadata FILE llama.context_length 64",
    ),
    "llama.logit_scale": (("float32", 0.5), "logit_scale is 0.5, which is not read"),
    "llama.expert_count": (("uint32", 8), "expert_count is 8, which is not read"),
    "llama.rope.dimension_count": (("uint32", 4), "is 4; expected that of a whole head, 8"),
    "llama.rope.scaling.type": (("string", "longrope"), "rope_type 'longrope' is not supported"),
    "llama.block_count": (("uint32", 9999), "num_hidden_layers is 9999, but the weights hold"),
    "llama.attention.head_count": (("string", "4"), "heads is '4'; expected a positive"),
    "llama.embedding_length": (("uint32", 32), "has shape .*; config.json asks for"),
    "llama.attention.layer_norm_rms_epsilon": (None, "layer_norm_rms_epsilon is missing"),
    "llama.feed_forward_length": (("array", [96] * 5000), "is a list of 5000 values"),
    "split.count": (("uint16", 3), "one of several files; merge them"),
    "general.alignment": (("uint32", 3), "alignment is 3; expected a power of two"),
    "tokenizer.ggml.model": (("string", "t5"), "model is 't5'; supported: gpt2, llama"),
    "tokenizer.ggml.pre": (("string", "tekken"), "pre is 'tekken', so how it splits"),
    "tokenizer.ggml.pre ": (None, "pre is None, so how it splits"),
    "tokenizer.ggml.token_type": (("array", [1, 1]), "token_type is not of 3 tokens"),
    "tokenizer.ggml.eos_token_id": (("uint32", 7), "eos_token_id"),
    "tokenizer.ggml.eot_token_id": (("array", [1]), "eot_token_id is .*; expected an id"),
    "tokenizer.ggml.add_bos_token": (("bool", True), "bos_token_id is missing"),
    "tokenizer.ggml.merges": (("array", ["ab"]), "merge 'ab' has no two parts"),
    "tokenizer.chat_template": (("uint32", 4), "chat template 'default' is 4; expected a text"),
    "tokenizer.ggml.tokens": (("array", ["a", "b", "ab", "c"]), "4 tokens and an embedding of 3"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_a_file_says_and_is_not_read_is_refused_by_name(tmp_path, key):
    entry, message = REFUSED[key]
    config = dataclasses.replace(MODELS["llama"], vocab_size=3)
    fields = tokenizer_fields(["a", "b", "ab"])
    if key == "tokenizer.ggml.tokens":
        fields["tokenizer.ggml.token_type"] = None
    file = tmp_path / "tiny.gguf"
    write(file, config, random_weights(config), "F32", fields | {key.strip(): entry})
    with pytest.raises((ConfigError, WeightsError), match=message) as caught:
        load_model(file)
    assert "tiny.gguf" in str(caught.value)


TEXTS = (
    "def add(a, b):\n    return a+b  # 2024, 12.5%\n\n\n",
    "It's we'll THEY'RE 'tis\t\ttabs   and  spaces ",
    "Grüße, naïve café; Ελληνικά, русский",
    "東京 2024年 日本語のテキスト 한국어",
    "🎉👩‍💻 ok\u00a0?! ...\r\n\r\n  x",
    "1234567 89 ٣٤٥ Ⅻ ½",
    "",
)


def split(text: str, pre: str) -> list[str]:
    """The words of a text, by hand: the published patterns, alternative by alternative."""
    is_gpt2 = pre in ("gpt-2", "smollm")
    letter, number = (lambda c, kind=kind: unicodedata.category(c)[0] == kind for kind in "LN")

    def other(c):
        return not (letter(c) or number(c) or c.isspace())

    def run(i, is_in, most=10**9):
        end = i
        while end < len(text) and end - i < most and is_in(text[end]):
            end += 1
        return end

    def next_end(i):
        found = re.compile("'s|'t|'re|'ve|'m|'ll|'d", 0 if is_gpt2 else re.I).match(text, i)
        if found:
            return found.end()
        begin = i + (text[i] == " ")
        if not is_gpt2 and not (text[i] in "\r\n" or letter(text[i]) or number(text[i])):
            begin = i + 1
        for start in (begin, i):
            if (end := run(start, letter)) > start:
                return end
        start = i + (text[i] == " ") if is_gpt2 else i
        if (end := run(start, number, {"llama-bpe": 3, "qwen2": 1}.get(pre, 10**9))) > start:
            return end
        start = i + (text[i] == " ")
        if (end := run(start, other)) > start:
            return end if is_gpt2 else run(end, lambda c: c in "\r\n")
        end = run(i, str.isspace)
        newlines = [j + 1 for j in range(i, end) if text[j] in "\r\n"]
        if newlines and not is_gpt2:
            return newlines[-1]
        return end - 1 if end < len(text) and end - 1 > i else end

    words = []
    i = 0
    while i < len(text):
        end = next_end(i)
        words.append(text[i:end])
        i = end
    return words


def merged(word: list[str], rank) -> list[str]:
    """The tokens of a word: the pair of the lowest rank is merged first, leftmost of equals."""
    while pairs := [(rank(a, b), i) for i, (a, b) in enumerate(zip(word, word[1:]))]:
        best, i = min(pairs)
        if best == float("inf"):
            break
        word = [*word[:i], word[i] + word[i + 1], *word[i + 2 :]]
    return word


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(others)}


def bpe(text: str, pre: str, vocab, merges, specials) -> list[int]:
    """Ids by a byte-level BPE in plain Python."""
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    letters = byte_letters()
    pattern = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
    ids = []
    for piece in re.split(f"({pattern})", text):
        if piece in specials:
            ids.append(vocab[piece])
            continue
        piece = unicodedata.normalize("NFC", piece) if pre == "qwen2" else piece
        is_digit = lambda c: unicodedata.category(c)[0] == "N"
        parts = [piece]
        if pre == "smollm":  # digits one by one, those of other scripts too
            spread = "".join(f"\0{c}\0" if is_digit(c) else c for c in piece)
            parts = spread.split("\0")
        for word in (word for part in parts for word in split(part, pre)):
            text = "".join(letters[b] for b in word.encode())
            is_whole = pre == "llama-bpe" and text in vocab
            tokens = (
                [text] if is_whole else merged(list(text), lambda *p: ranks.get(p, float("inf")))
            )
            ids += [vocab[token] for token in tokens]
    return ids


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_ids_of_texts_are_those_of_a_bpe_in_plain_python(pre):
    stored = json.loads((zoo.path("zoo/target") / "tokenizer.json").read_text("utf-8"))["model"]
    merges = [" ".join(m) if isinstance(m, list) else m for m in stored["merges"]]
    size = len(stored["vocab"])
    vocab = stored["vocab"] | {"<|im_end|>": size, "<tool>": size + 1}
    tokens = sorted(vocab, key=vocab.get)
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * size + [3, 4]),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.eos_token_id": size,
        "tokenizer.chat_template": "{{ messages }}",
    }
    backend, config = read_tokenizer(Header("x.gguf", fields, {}))
    assert config["eos_token"] == "<|im_end|>" and config["chat_template"]["default"]
    for text in (*TEXTS, "a<|im_end|> b<tool>2024<|im_end|>"):
        expected = bpe(text, pre, vocab, merges, {"<|im_end|>", "<tool>"})
        assert backend.encode(text).ids == expected, (text, backend.encode(text).tokens)
        plain = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert backend.decode(backend.encode(text).ids, skip_special_tokens=False) == plain


def test_pieces_of_sentence_piece_merge_by_their_scores():
    """Texts of a vocabulary with bytes, against merging the best-scored pair by hand."""
    words = ["▁", "a", "b", "c", "é", "ab", "bc", "▁a", "abc", "▁ab", "ca"]
    scores = [-9.0, -9, -9, -9, -9, -2, -1, -3, -4, -5, -6]
    specials = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    tokens = [*specials, *bytes_, *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    by_piece = dict(zip(words, scores))
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + scores),
        "tokenizer.ggml.token_type": np.array([2, 3, 3, *[6] * 256, *[1] * len(words)]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    backend, config = read_tokenizer(Header("x.gguf", fields, {}))
    assert config == {"bos_token": "<s>", "unk_token": "<unk>"}
    assert backend.encode("a<unk>b</s>").ids == [1, vocab["▁a"], 0, vocab["▁"], vocab["b"], 2]
    assert backend.decode([1, 0, vocab["▁a"], 2]) == "a"
    for text in ("abc cab", "aabcbc ab", "é x 東", "bca  abc"):
        pieces = list(("▁" + text).replace(" ", "▁"))
        known = merged(pieces, lambda a, b: -by_piece.get(a + b, -float("inf")))
        expected = [1]
        for piece in known:
            expected += [vocab[piece]] if piece in vocab else [3 + b for b in piece.encode()]
        assert backend.encode(text).ids == expected, (text, backend.encode(text).tokens)
        assert backend.decode(expected) == text


def test_tokens_that_are_not_used_are_padding():
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "", "[PAD1]", "b", "[PAD2]", "[PAD2]"],
        "tokenizer.ggml.token_type": np.array([1, 1, 5, 1, 5, 5]),
        "tokenizer.ggml.merges": ["a b"],
    }
    with pytest.raises(WeightsError, match="no BPE"):  # of which "ab" is no token
        read_tokenizer(Header("x.gguf", fields, {}))
    fields["tokenizer.ggml.tokens"][1] = "ab"
    backend, _ = read_tokenizer(Header("x.gguf", fields, {}))
    assert backend.get_vocab_size() == 4 and backend.encode("abb").ids == [1, 3]


LONG = {"a token": ["a" * 300], "all tokens": [f"{i:06d}" + "a" * 200 for i in range(11_000)]}


@pytest.mark.parametrize("name", LONG)
def test_pieces_whose_splits_are_too_many_are_refused(name):
    tokens = LONG[name]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(len(tokens)),
        "tokenizer.ggml.bos_token_id": 0,
    }
    with pytest.raises(WeightsError, match="the longest token has"):
        read_tokenizer(Header("x.gguf", fields, {}))
    fields["tokenizer.ggml.scores"] = np.zeros(len(tokens), bool)
    with pytest.raises(WeightsError, match="scores are no numbers"):
        read_tokenizer(Header("x.gguf", fields, {}))


def number(value, dtype="<Q"):
    return struct.pack(dtype, value)


def text(value):
    return number(len(value)) + value


def of_counts(tensors, fields, *parts):
    """A file that says that it holds so many tensors and fields."""
    return b"".join([b"GGUF", number(3, "<I"), number(tensors), number(fields), *parts])


def tensor(name, *numbers):
    """A tensor's entry: dimensions, type and offset."""
    return text(name) + struct.pack(f"<I{'Q' * (len(numbers) - 3)}IQ", *numbers)


BIG, KEY = 2**60, text(b"k")
HOSTILE = {
    "empty": b"",
    "other": b"GGML" + bytes(64),
    "version": b"GGUF" + number(1, "<I") + bytes(16),
    "highest byte first": b"GGUF" + number(3, ">I") + bytes(16),
    "many tensors": of_counts(BIG, 0),
    "many fields": of_counts(0, BIG),
    "long key": of_counts(0, 1, number(BIG)),
    "cut off": of_counts(0, 1, text(b"key")[:-1]),
    "no text": of_counts(0, 1, text(b"\xff\xfe"), number(4, "<I"), bytes(4)),
    "twice": of_counts(0, 2, 2 * (KEY + number(4, "<I") + bytes(4))),
    "type": of_counts(0, 1, KEY, number(77, "<I"), bytes(64)),
    "texts": of_counts(0, 1, KEY, struct.pack("<IIQ", 9, 8, BIG)),
    "numbers": of_counts(0, 1, KEY, struct.pack("<IIQ", 9, 0, BIG)),
    "lists of lists": of_counts(0, 1, KEY, number(9, "<I"), 1000 * struct.pack("<IQ", 9, 1)),
    "dimensions": of_counts(1, 0, text(b"t"), number(2**31, "<I"), bytes(64)),
    "no rows": of_counts(1, 0, text(b"t"), number(1, "<I"), bytes(64)),
    "beyond the end": of_counts(1, 0, tensor(b"t", 1, 64, 0, BIG)),
    "huge": of_counts(1, 0, tensor(b"t", 2, BIG, BIG, 0, 0)),
    "type of a tensor": of_counts(1, 0, tensor(b"t", 1, 1, 4, 0)),
    "half a block": of_counts(1, 0, tensor(b"t", 1, 33, 8, 0)),
    "over another": of_counts(2, 0, *(tensor(x, 1, 8, 0, 0) for x in (b"t", b"u")), bytes(256)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_lies_is_refused_before_it_costs_anything(tmp_path, name):
    file = tmp_path / "bad.gguf"
    file.write_bytes(HOSTILE[name])
    with open(file, "ab") as end:
        end.truncate(
            file.stat().st_size + (1 << 30) * (name in ("texts", "numbers", "many fields"))
        )
    tracemalloc.start()
    with pytest.raises(WeightsError, match=r"bad\.gguf cannot be read as GGUF: "):
        load_model(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


def test_a_list_of_as_many_texts_as_are_allowed_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(header, "MAX_TEXTS", 10)
    file = tmp_path / "bad.gguf"
    lists = b"".join(text(k) + struct.pack("<IIQ", 9, 8, 6) + 6 * text(b"") for k in (b"a", b"b"))
    file.write_bytes(of_counts(0, 2, lists))
    with pytest.raises(WeightsError, match="6 texts in lists; expected at most 4"):
        load_model(file)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = dataclasses.replace(MODELS["llama"], vocab_size=3, num_hidden_layers=1)
    write(file, config, random_weights(config), "Q8_0", tokenizer_fields(["a", "b", "ab"]))
    return file.read_bytes()


@given(begin=st.integers(0, 2500), new=st.binary(min_size=1, max_size=8))
def test_a_damaged_file_is_a_model_or_an_error_of_ours(whole, tmp_path_factory, begin, new):
    file = tmp_path_factory.mktemp("damaged") / "tiny.gguf"
    file.write_bytes(whole[:begin] + new + whole[begin + len(new) :])
    try:
        load_model(file)
    except SpecJaxError:
        pass


def test_other_architectures_are_told(tmp_path, whole):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(whole.replace(text(b"llama"), text(b"gemma"), 1))
    with pytest.raises(ConfigError, match="is 'gemma'; supported: llama, qwen2, qwen3, qwen3moe"):
        load_model(file)
    assert "is 'gemma'; supported" in inspect(file).refused


def test_a_run_knows_a_file_by_its_contents_and_a_plan_by_its_header(tmp_path, whole):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(whole)
    known = inputs.of_path(str(file))
    assert known == inputs.of_path(str(tmp_path)) is not None
    file.write_bytes(whole[:-1] + b"?")
    assert inputs.of_path(str(file)) != known
    for name in (file, tmp_path):
        assert find_config(str(name)).num_hidden_layers == 1


def test_a_file_needs_the_package_and_a_folder_one_file(tmp_path, whole, monkeypatch):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(whole)
    with pytest.raises(WeightsError, match="several GGUF files; name one of them: a.gguf, b.gguf"):
        load_model(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(WeightsError, match=r"pip install 'spec_jax\[gguf\]'"):
        load_model(tmp_path / "a.gguf")


def test_a_tensor_that_ends_early_is_refused(tmp_path, whole):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(whole)
    tensors = open_tensors(file)
    file.write_bytes(whole[:-2000])
    with pytest.raises(WeightsError, match="ends within a tensor"):
        for tensor in tensors.values():
            tensor.read_whole()
    with pytest.raises(WeightsError, match="the file ends within tensor"):
        read_header(file)
