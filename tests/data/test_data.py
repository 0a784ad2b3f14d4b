"""The corpus, its split, its tokenizer, and texts that repeat themselves."""

import ast
import pathlib

import numpy as np
import pytest
from support.chat_templates import byte_level

from spec_jax.data import python_source, tokens
from spec_jax.errors import ConfigError
from spec_jax.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def held_out():
    return python_source.documents("held_out")


@pytest.fixture(scope="module")
def tokenizer(held_out):
    return tokens.train_tokenizer((text for _, text in held_out), 600)


def test_every_held_out_module_is_there(held_out):
    assert [name for name, _ in held_out] == [f"{m}.py" for m in python_source.HELD_OUT]
    assert all(len(text) > 500 for _, text in held_out)


def test_training_documents_hold_no_held_out_module_nor_its_tests(held_out):
    train = python_source.documents("train")
    names = [name for name, _ in train]
    assert names == sorted(names) and len(names) > 300
    for module in python_source.HELD_OUT:
        assert f"{module}.py" not in names and f"test/test_{module}.py" not in names
    assert not {text for _, text in train} & {text for _, text in held_out}
    assert len({text for _, text in train}) == len(train)


@pytest.mark.exhaustive
def test_documents_are_deterministic_and_the_test_share_is_nested():
    none, some = (dict(python_source.documents("train", tests_share=s)) for s in (0.0, 0.25))
    assert some == dict(python_source.documents("train", tests_share=0.25))
    assert set(none) <= set(some)


PATHS = [
    ("heapq.py", True),
    ("test/test_heapq.py", True),
    ("test/test_csv_dialects.py", True),
    ("test/test_queue/test_simple.py", True),
    ("asyncio/queues.py", False),
    ("idlelib/textview.py", False),
    ("test/test_cmd.py", False),
]


@pytest.mark.parametrize(("relative", "expected"), PATHS)
def test_held_out_paths(relative, expected):
    assert python_source.is_held_out(pathlib.PurePosixPath(relative)) is expected


def test_prompts_are_functions_up_to_their_docstring():
    prompts = python_source.held_out_prompts(40, seed=1)
    assert prompts == python_source.held_out_prompts(40, seed=1)
    assert prompts != python_source.held_out_prompts(40, seed=2)
    assert len({p.name for p in prompts}) == 40
    sources = {name.removesuffix(".py"): text for name, text in python_source.documents("held_out")}
    for prompt in prompts:
        module = prompt.name.split(".")[0]
        assert len(prompt.text) <= 700 and not prompt.text.endswith("\n")
        assert prompt.text + prompt.reference in sources[module]
        assert prompt.text.rstrip()[-1] in "\"'"
        assert prompt.name.split(".")[-1] in prompt.text


def test_too_many_prompts_is_an_error():
    with pytest.raises(ConfigError, match="100000 prompts"):
        python_source.held_out_prompts(100_000, seed=0)


CALLS = [
    lambda: python_source.documents("test"),
    lambda: python_source.documents("train", tests_share=1.5),
    lambda: tokens.train_tokenizer(["x"], 100),
    lambda: tokens.train_tokenizer(["x"], 2048),
]


@pytest.mark.parametrize("call", CALLS)
def test_bad_arguments_are_clear_errors(call):
    with pytest.raises(ConfigError, match="expected|fill"):
        call()


def test_tokenizer_gives_back_any_text(tokenizer, held_out):
    odd = "\tif x:\r\n    é = '漢字🙂'  # \x00 \n\n\n        y = 1234 \n"
    for text in [odd, "", *(text for _, text in held_out)]:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 600
    assert tokenizer.token_to_id(tokens.END_OF_TEXT) == 0


def test_indentation_is_one_token(tokenizer):
    assert "Ċ" + "Ġ" * 8 in tokenizer.encode("x:\n        return").tokens


def test_packing_separates_documents(tokenizer):
    found = tokens.pack(Tokenizer(tokenizer), [("a", "x = 1\n"), ("b", "y = 2\n")])
    packed, starts = found
    assert packed.dtype == np.int32
    assert list(np.flatnonzero(packed == 0)) == [0, len(packed) // 2, len(packed) - 1]
    np.testing.assert_array_equal(np.flatnonzero(packed == 0), starts)


def test_packing_uses_the_end_token_of_another_tokenizer_and_cuts_nothing():
    foreign = byte_level(special=("<s>", "</s>"))
    foreign.backend.enable_truncation(3)
    foreign = Tokenizer(foreign.backend, foreign.config)
    packed, _ = tokens.pack(foreign, [("a", "x = 1\n"), ("b", "y = 2\n")])
    end = foreign.token_id("</s>")
    assert list(np.flatnonzero(packed == end)) == [0, len(packed) // 2, len(packed) - 1]
    assert foreign.decode(packed.tolist()) == "x = 1\ny = 2\n"
    for nameless in (byte_level(special=("<s>",)), Tokenizer(byte_level(special=("<s>",)).backend)):
        with pytest.raises(ConfigError, match="separate documents.* tokenizer_config.json"):
            tokens.pack(nameless, [("a", "x")])


SEQUENCES = [
    ([], 0.0),
    ([1, 2, 3, 4], 0.0),
    ([7, 7], 0.0),
    ([7, 7, 7], 1.0),
    ([1, 2, 1, 2, 3], 0.0),
    ([1, 2, 1, 2, 1, 2, 9, 8], 6 / 8),
    ([9, 1, 2, 3] + [4, 5, 6] * 3 + [4], 10 / 14),
    (list(range(40)) * 3, 0.0),  # a longer period than counted
    (list(range(32)) * 3, 1.0),
]


@pytest.mark.parametrize(("sequence", "expected"), SEQUENCES)
def test_looping_share(sequence, expected):
    assert tokens.looping_share(sequence) == pytest.approx(expected)


def test_looping_share_agrees_with_the_definition():
    rng = np.random.default_rng(0)
    for _ in range(50):
        x = rng.integers(0, 2, 24)
        is_looping = np.zeros(24, bool)
        for n in range(1, 9):
            for i in range(24 - 3 * n + 1):
                if (x[i : i + 3 * n] == np.tile(x[i : i + n], 3)).all():
                    is_looping[i : i + 3 * n] = True
        assert tokens.looping_share(x, max_period=8) == pytest.approx(is_looping.mean())


def test_prompts_and_references_are_whole_functions(held_out):
    for prompt in python_source.held_out_prompts(20, seed=0):
        name = prompt.name.split(".")[-1]
        head = prompt.text.rindex(f"def {name}(")
        line = prompt.text.rindex("\n", 0, head) + 1 if "\n" in prompt.text[:head] else 0
        source = (prompt.text + prompt.reference)[line:]
        indent = len(source) - len(source.lstrip())
        lines = [text[indent:] for text in source.splitlines()]
        assert isinstance(
            ast.parse("\n".join(lines)).body[0], (ast.FunctionDef, ast.AsyncFunctionDef)
        )
