"""Packed corpora: whole or absent, written as they come, opened as arrays on disk."""

import json
import os
import weakref

import numpy as np
import pytest
from support.chat_templates import CHATML, byte_level

from spec_jax.data.conversations import Document
from spec_jax.data.packed import load_packed, write_packed
from spec_jax.errors import ConfigError

TOKENIZER = byte_level(CHATML)
FILES = ["train.json", "train.mask.npy", "train.tokens.npy"]


def document(*ids, source="s:1"):
    ids = np.asarray(ids, np.int32)
    return Document(ids, ids % 2 == 0, source)


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_documents_come_back_with_their_bounds(tmp_path):
    rng = np.random.default_rng(0)
    documents = [document(*rng.integers(0, 300, n)) for n in (3, 1, 700, 12)]
    folder = tmp_path / "new" / "folder"
    options = dict(counts={"cut": 2}, notes=["cut"], about={"paths": ["a"]})
    packed = write_packed(folder, "train", documents, TOKENIZER, **options)
    assert names(folder) == FILES
    assert packed.starts.tolist() == [0, 3, 4, 704, 716]
    for name, dtype in (("tokens", np.int32), ("mask", np.bool_)):  # plain files that NumPy maps
        array = np.load(folder / f"train.{name}.npy", mmap_mode="r")
        assert isinstance(array, np.memmap) and array.dtype == dtype
    for i, (ids, mask, _) in enumerate(documents):
        stretch = slice(*packed.starts[i : i + 2])
        np.testing.assert_array_equal(packed.tokens[stretch], ids)
        np.testing.assert_array_equal(packed.mask[stretch], mask)
    assert packed.counts == {"cut": 2, "documents": 4} and packed.notes == ("cut",)
    assert load_packed(folder, "train", about={"paths": ["a"]}).tokens.shape == (716,)
    with pytest.raises(ConfigError, match=r"of other paths; expected \['b'\]; .*pack the corpus"):
        load_packed(folder, "train", about={"paths": ["b"]})


def test_no_document_is_kept_once_it_is_written(tmp_path):
    alive = weakref.WeakValueDictionary()

    class Ids(np.ndarray):
        """An array that can be watched."""

    def documents():
        for i in range(300):
            ids = np.full(1000, i, np.int32).view(Ids)
            alive[i] = ids
            assert len(alive) <= 2
            yield Document(ids, np.ones(1000, bool), "s")

    packed = write_packed(tmp_path, "train", documents(), TOKENIZER)
    assert packed.tokens.shape == (300_000,) and packed.tokens[-1] == 299


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path):
    write_packed(tmp_path, "train", [document(1, 2)], TOKENIZER)

    def broken():
        yield document(3)
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write_packed(tmp_path, "train", broken(), TOKENIZER)
    assert names(tmp_path) == FILES
    assert load_packed(tmp_path, "train").tokens.tolist() == [1, 2]
    write_packed(tmp_path, "train", [document(4)], TOKENIZER)
    assert load_packed(tmp_path, "train").tokens.tolist() == [4]


def test_a_stop_between_the_files_leaves_no_corpus_of_two_halves(tmp_path, monkeypatch):
    write_packed(tmp_path, "train", [document(1, 2)], TOKENIZER)
    replaced, replace = [], os.replace

    def stopping(source, target):
        if replaced:
            raise KeyboardInterrupt
        replaced.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        write_packed(tmp_path, "train", [document(4, 5)], TOKENIZER)
    with pytest.raises(ConfigError, match="pack the corpus again"):
        load_packed(tmp_path, "train")


DOCUMENTS = [
    ([], "no document for train; expected"),
    ([document(1), document(999, source="b:7")], "b:7: ids from 999 to 999; expected"),
    ([document(1, -1)], "ids from -1 to 1"),
    ([document()], "at least one id"),
    ([Document(np.arange(3), np.ones(2, bool), "x")], "x: 3 ids with a mask of 2"),
]


@pytest.mark.parametrize(("documents", "message"), DOCUMENTS)
def test_documents_that_cannot_be_packed_are_errors(tmp_path, documents, message):
    with pytest.raises(ConfigError, match=message):
        write_packed(tmp_path, "train", documents, TOKENIZER)
    assert names(tmp_path) == []


def test_an_incomplete_or_foreign_corpus_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a packed corpus.*pack the corpus again"):
        load_packed(tmp_path, "train")
    write_packed(tmp_path, "train", [document(1, 2, 3)], TOKENIZER)
    assert load_packed(tmp_path, "train", byte_level(CHATML)).tokens.shape == (3,)
    for other in (byte_level(CHATML, special=("<s>", "</s>", "<|im_start|>")), byte_level()):
        with pytest.raises(ConfigError, match="another vocabulary or chat.*target's tokenizer"):
            load_packed(tmp_path, "train", other)
    info, mask = tmp_path / "train.json", tmp_path / "train.mask.npy"
    text = info.read_text()
    for change, num_marks, message in [
        ({}, 2, r"tells of 3 tokens.*bool\[2\]"),
        ({}, None, "not a packed corpus"),
        ({"version": 9}, 3, "version 9"),
        ({"starts": None}, 3, "not a packed corpus"),
        (None, 3, "not a packed corpus"),
    ]:
        info.write_text("[]" if change is None else json.dumps(json.loads(text) | change))
        mask.unlink(missing_ok=True)
        if num_marks is not None:
            np.save(mask, np.ones(num_marks, bool))
        with pytest.raises(ConfigError, match=message):
            load_packed(tmp_path, "train")
