"""The corpus, its split, its tokenizer, and texts that repeat themselves."""

import ast
import pathlib
import textwrap

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
    ("asyncio/queues.py", False),
    ("test/test_cmd.py", False),
]


@pytest.mark.parametrize(("relative", "expected"), PATHS)
def test_held_out_paths(relative, expected):
    assert python_source.is_held_out(pathlib.PurePosixPath(relative)) is expected


def test_prompts_are_functions_up_to_their_docstring_and_references_the_rest():
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
        head = prompt.text.rindex(f"def {prompt.name.split('.')[-1]}(")
        function = prompt.text[prompt.text.rfind("\n", 0, head) + 1 :] + prompt.reference
        (node,) = ast.parse(textwrap.dedent(function)).body
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


CALLS = [
    lambda: python_source.held_out_prompts(100_000, seed=0),
    lambda: python_source.documents("test"),
    lambda: python_source.documents("train", tests_share=1.5),
    lambda: tokens.train_tokenizer(["x"], 100),
    lambda: tokens.train_tokenizer(["x"], 2048),
]


@pytest.mark.parametrize("call", CALLS)
def test_bad_arguments_are_clear_errors(call):
    with pytest.raises(ConfigError, match="expected|fill|100000 prompts"):
        call()


def test_tokenizer_gives_back_any_text(tokenizer, held_out):
    odd = "\tif x:\r\n    é = '漢字🙂'  # \x00 \n\n\n        y = 1234 \n"
    for text in [odd, "", *(text for _, text in held_out)]:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 600
    assert tokenizer.token_to_id(tokens.END_OF_TEXT) == 0


def test_indentation_is_one_token(tokenizer):
    assert "Ċ" + "Ġ" * 8 in tokenizer.encode("x:\n        return").tokens


def test_packing_separates_documents_by_a_tokenizers_own_end_and_cuts_nothing(tokenizer):
    foreign = byte_level(special=("<s>", "</s>"))
    foreign.backend.enable_truncation(3)
    foreign = Tokenizer(foreign.backend, foreign.config)
    texts = ["x = 1\n", "y = 2\n"]
    for one, end in ((Tokenizer(tokenizer), 0), (foreign, foreign.token_id("</s>"))):
        packed, starts = tokens.pack(one, [("a", texts[0]), ("b", texts[1])])
        assert packed.dtype == np.int32 and packed[0] == end
        documents = [packed[a:b].tolist() for a, b in zip(starts, starts[1:])]
        assert documents == [[*one.encode(text), end] for text in texts]
        assert starts[0] == 1 and starts[-1] == len(packed)
    for nameless in (byte_level(special=("<s>",)), Tokenizer(byte_level(special=("<s>",)).backend)):
        with pytest.raises(ConfigError, match="separate documents.* tokenizer_config.json"):
            tokens.pack(nameless, [("a", "x")])


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
    of_period = lambda n: tokens.looping_share([*range(n)] * 3)
    assert (tokens.looping_share([]), of_period(32), of_period(40)) == (0, 1, 0)  # 32 are counted
