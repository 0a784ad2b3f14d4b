"""Added tokens that only files beside tokenizer.json state are those of transformers."""

import json

import pytest
from needs import transformers
from support.chat_templates import byte_level, metaspace

from spec_jax.models.tokenizer import Tokenizer

TEXT = "What <tool>is <tool><|end|> two </s> and<|pad|> two?"
NEW = {"<tool>": {"special": False, "normalized": True}, "<|end|>": {"special": True}}
FILES = {  # by the first free id
    "ids in tokenizer_config.json": lambda first: {
        "tokenizer_config": {
            "added_tokens_decoder": {
                str(first + i): {"content": text, **flags}
                for i, (text, flags) in enumerate(NEW.items())
            },
            "eos_token": "<tool>",
        }
    },
    "added_tokens.json": lambda first: {
        "added_tokens": {"<|end|>": first + 1, "<tool>": first, "</s>": 1},
        "special_tokens_map": {"eos_token": {"content": "<|end|>"}, "bos_token": "<s>"},
    },
    "added_tokens.json alone": lambda first: {"added_tokens": {"<|end|>": first}},
    "flags that differ": lambda first: {
        "tokenizer_config": {
            "added_tokens_decoder": {"1": {"content": "</s>", "lstrip": True, "special": True}}
        }
    },
    "a name": lambda first: {"tokenizer_config": {"eos_token": "What", "bos_token": "<s>"}},
}


@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize("name", FILES)
def test_ids_and_texts_agree(tmp_path, name, make):
    tokenizer = make()
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    files = {"tokenizer_config": {}} | FILES[name](tokenizer.vocab_size)
    files["tokenizer_config"] = kind | files["tokenizer_config"]
    for file, content in files.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(content))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    ids = theirs.encode(TEXT)
    assert ours.encode(TEXT) == ids
    known, expected = (x.get_added_tokens_decoder() for x in (ours.backend, tokenizer.backend))
    assert repr(known) == repr(theirs.added_tokens_decoder) != repr(expected)
    assert ours.decode(ids) == theirs.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
