"""Text to ids and back."""

import json

import numpy as np
import pytest
from support.tiny_tokenizers import byte_fallback, bytes_alone
from tokenizers import processors

from spec_jax.errors import WeightsError
from spec_jax.models.tokenizer import Tokenizer

START = "<s>"
TEXT = "def f(x):\n    return 'größe', x  # 數\n"


def byte_level(add_start=False):
    """A byte-level tokenizer, which may put its first special token before a text."""
    backend = bytes_alone().backend
    if add_start:
        special = [(START, backend.token_to_id(START))]
        backend.post_processor = processors.TemplateProcessing(
            f"{START} $A", special_tokens=special
        )
    return backend


def test_any_text_comes_back_from_its_ids():
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode(TEXT)
    assert len(ids) == len(TEXT.encode()) and max(ids) < tokenizer.vocab_size == 258
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(np.asarray(ids, np.int32)) == TEXT
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_special_tokens_are_added_as_the_tokenizer_says_and_left_out_of_text():
    tokenizer = Tokenizer(byte_level(add_start=True))
    assert tokenizer.encode("f")[0] == tokenizer.token_id(START) == 256
    assert tokenizer.decode([*tokenizer.encode("f"), tokenizer.token_id("</s>")]) == "f"
    assert tokenizer.token_id("<none>") is None


def test_what_is_saved_loads_as_the_same_tokenizer(tmp_path):
    tokenizer = Tokenizer(byte_level(add_start=True), {"model_max_length": 64})
    tokenizer.save(tmp_path / "new" / "folder")
    loaded = Tokenizer.from_directory(tmp_path / "new" / "folder")
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.has_same_vocab(tokenizer)
    assert loaded.config["model_max_length"] == 64
    (tmp_path / "new" / "folder" / "tokenizer_config.json").unlink()
    assert Tokenizer.from_directory(tmp_path / "new" / "folder").config == {}


def test_a_text_is_encoded_whole_whatever_its_file_says_of_batches(tmp_path):
    """As transformers encodes it: files hold the truncation and padding of their training."""
    expected = Tokenizer(byte_level()).encode(TEXT)
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=99, pad_id=257, pad_token="</s>")
    backend.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (Tokenizer.from_directory(tmp_path), Tokenizer(backend)):
        assert tokenizer.encode(TEXT) == expected and tokenizer.decode(expected) == TEXT
    assert len(backend.encode(TEXT).ids) == 99  # the caller's own object is left alone


def test_another_vocabulary_is_told_apart():
    tokenizer = Tokenizer(byte_level())
    assert not tokenizer.has_same_vocab(byte_fallback())
    assert tokenizer.has_same_vocab(Tokenizer(byte_level(add_start=True)))


def stated(tmp_path, **files):
    """The tokenizer of a directory whose other files state tokens that tokenizer.json lacks."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.from_directory(tmp_path)


NEW = {"content": "<tool>", "special": False, "normalized": False}


END = {"content": "<|end|>", "special": True}
IDS = {"<|end|>": 259, "<tool>": 258, "</s>": 257}
BESIDE = [
    dict(tokenizer_config={"added_tokens_decoder": {"258": NEW, "259": END}}),
    dict(added_tokens=IDS, special_tokens_map={"eos_token": END}),
]


@pytest.mark.parametrize("files", BESIDE, ids=["tokenizer_config", "added_tokens"])
def test_added_tokens_that_other_files_state_are_known(tmp_path, files):
    tokenizer = stated(tmp_path, **files)
    assert tokenizer.encode("a<tool>b<|end|>")[1::2] == [258, 259] and tokenizer.num_ids == 260
    assert tokenizer.decode([97, 258, 98, 259]) == "a<tool>b"  # one of them is special
    tokenizer.save(tmp_path / "again")
    assert Tokenizer.from_directory(tmp_path / "again").has_same_vocab(tokenizer)


def test_a_special_token_that_the_vocabulary_has_is_known_by_its_name_alone(tmp_path):
    tokenizer = stated(tmp_path, tokenizer_config=dict(eos_token="a", pad_token="<none>"))
    assert tokenizer.decode(tokenizer.encode("cab")) == "cb" and tokenizer.num_ids == 258


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (dict(tokenizer_config=dict(added_tokens_decoder={"300": NEW})), "id 300, .* the id 258"),
        (dict(tokenizer_config=dict(added_tokens_decoder=[NEW])), "expected an object"),
        (dict(tokenizer_config=dict(added_tokens_decoder={"x": NEW})), "has the id 'x'"),
        (dict(tokenizer_config=dict(added_tokens_decoder={"258": {}})), "the token ''"),
        (dict(tokenizer_config=dict(eos_token=[3])), r"/tokenizer_config.*added token is \[3\]"),
        (dict(added_tokens={"<a>": None}), "added_tokens.json.*has the id None"),
        (dict(special_tokens_map=[]), "special_tokens_map.json.*expected an object"),
    ],
)
def test_added_tokens_that_cannot_be_added_are_named(tmp_path, files, words):
    with pytest.raises(WeightsError, match=words):
        stated(tmp_path, **files)


def test_an_absent_or_damaged_file_is_named(tmp_path):
    with pytest.raises(WeightsError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    Tokenizer(byte_level()).save(tmp_path)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        content = (tmp_path / name).read_text()
        (tmp_path / name).write_text(content[: len(content) // 2])
        with pytest.raises(WeightsError, match=name):
            Tokenizer.from_directory(tmp_path)
        (tmp_path / name).write_text(content)
    assert json.loads(content)["model"]["type"] == "BPE"
    assert Tokenizer.from_directory(tmp_path).vocab_size == 258
