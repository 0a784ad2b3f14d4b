"""What experiments refuse before anything is made: the experiment, its values, and the words."""

import importlib

import pytest
from support.files import head_training, held_out, pieces_of, write_lines
from support.pairs import tiny_pair

from experiments import benchmark, decode, plan, regenerate, train_head
from spec_jax.errors import SpecJaxError

MODULES = dict(decode="decode_default", regenerate="regenerate_zoo")
RUNS = dict(decode=decode.decode, plan=plan.run, regenerate=regenerate.regenerate)
RUNS |= dict(train_head=train_head.train, benchmark=benchmark.run)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target and a draft, and texts and responses of which some are of no use."""
    folder = tiny_pair(tmp_path_factory.mktemp("refused"))
    pieces = pieces_of(held_out(3), 2000)
    write_lines(folder / "texts.jsonl", ({"text": piece} for piece in pieces))
    write_lines(folder / "prompts.jsonl", ({"prompt": piece[:20]} for piece in pieces))
    write_lines(folder / "empty.jsonl", [{"text": ""}])
    write_lines(folder / "other.jsonl", [{"prompt_ids": [1], "response_ids": [300] * 40}])
    return folder


def config_of(experiment, folder):
    """The experiment's config, of the tiny models where it decodes or trains."""
    if experiment == "train_head":
        return head_training(folder, "eagle3")
    name = MODULES.get(experiment, experiment)
    config = importlib.import_module(f"configs.{name}").get_config()
    if experiment == "plan":
        config.is_compiled = False
    elif experiment != "benchmark":
        config.update(target=str(folder / "target"), num_prompts=2, max_new_tokens=8)
    if experiment == "decode":
        config.update(drafts=f"ngram,{folder / 'draft'}")
    elif experiment == "regenerate":
        config.update(draft=str(folder / "draft"), min_prompt_tokens=2, max_prompt_tokens=12)
    return config


WORDS = {"prompt_source": "self", "turns.first_words": "inglish"}
TREES = {"tree": "3,2", "draft": ""}
PREFILL = {"program": "prefill", "is_compiled": True, "slots": "256"}
REFUSED = [
    ("decode", {"ks": (0,)}, r"ks is \(0,\); expected integers of 1 or more"),
    ("decode", {"ks": ("",)}, r"--config.ks= has no value; .* or --config.ks=\(\)"),
    ("decode", {"temperatures": ()}, "expected one or more"),
    ("decode", {"temperatures": ("hot",)}, "numbers of 0 or more"),
    ("decode", {"drafts": ""}, "drafts is ''; expected names"),
    ("decode", {"drafts": "no/such"}, "nothing drafts for .*no/such is left out: no/such is nei"),
    ("decode", {"drafts": "zoo/draft"}, "nothing to compare .*the vocabularies differ"),
    ("decode", {"best_k": "ngram"}, "best_k has 'ngram'; expected NAME=K"),
    ("decode", {"order": "random"}, "spread or group"),
    ("decode", {"rules": ("greedy",)}, "rules is .*; expected one or more of residual, block"),
    ("decode", {"baseline": "best"}, "expected same or fastest"),
    ("decode", {"max_new_tokens": 1}, "2 or more"),
    ("decode", {"max_prompt_tokens": 0}, "max_prompt_tokens is 0; expected 1 or more, or none"),
    ("decode", {"max_new_tokens": 128}, "leaves no room for a prompt: .*target holds 128 tokens"),
    ("decode", {"dtype": "float32,int8"}, "expected one of float32, bfloat16"),
    ("decode", {"target": ""}, "--config.target=PATH"),
    ("decode", {"target": "no/such"}, "neither a directory nor a zoo name"),
    ("decode", {"data": "no/such.jsonl"}, "cannot be read"),
    ("decode", {"drafter": "spec_jax.drafters.model_free:NO_DRAFT"}, "'plain', .*drafter._replace"),
    ("decode", {"rule": "spec_jax.rules:MATCH"}, "the name 'match', which a rule of the package"),
    ("plan", {"topology": "v9:2x2"}, "known chips: v4, v5e"),
    ("plan", {"mesh": "data:2,tensor:2"}, "has 4 devices; v5e:2x4 has 8"),
    ("plan", {"batch": "8,x"}, "batch is '8,x'; expected positive integers"),
    ("plan", {"acceptance": "1.5"}, "acceptance is '1.5'; expected rates"),
    ("plan", {"acceptance": "none/report.json:2"}, "there is no file none/report.json"),
    ("plan", {"acceptance": __file__}, "has no row with accepted drafts"),
    ("plan", {"target": "llama-9"}, "model is 'llama-9'; expected one of llama-3.1-8b"),
    ("plan", {"draft": "eagle4"}, "none of eagle1, eagle3, peagle, mtp, dflash"),
    ("plan", {"program": "fill"}, "program is 'fill'; expected decode, prefill or train"),
    ("plan", {"program": "prefill"}, "is_compiled is False; expected True for prefill"),
    ("plan", PREFILL, "prefill_chunk is '512'; expected at most the 256 slots"),
    ("plan", {"prompt_tokens": 9, "program": "train"}, "prompt_tokens is 9; expected 0 but to dec"),
    ("plan", {"is_fully_sharded": True}, "is_fully_sharded is True; expected False to decode"),
    ("plan", TREES, "tree is '3,2'; expected none without a draft"),
    ("plan", TREES | {"draft": "ngram"}, "'ngram' drafts chains"),
    ("regenerate", {"batch": 0}, "batch is 0; expected 1 or more"),
    ("regenerate", {"min_prompt_tokens": 13}, "at most max_prompt_tokens 12"),
    ("regenerate", {"tests_share": 2.0}, r"a number in \[0, 1\]"),
    ("regenerate", {"max_new_tokens": 120}, "a prompt of 12 tokens and 120 new ones are 132"),
    ("regenerate", {"rule": "typical-acceptance"}, "target's distribution; use a lossless one"),
    ("regenerate", {"rule": "match", "draft": ""}, "none without a draft"),
    ("regenerate", {"prompts": "no/such.jsonl"}, "there is no file no/such.jsonl"),
    ("regenerate", WORDS, "first words 'inglish' cannot be read"),
    ("regenerate", WORDS | {"turns.first_words": __file__}, "no chat template, so it writes no tu"),
    ("train_head", {"steps": 0}, "steps is 0"),
    ("train_head", {"objective": "eagle2"}, "'eagle2'; expected one of eagle1, eagle3, peagle"),
    ("train_head", {"loss.num_steps": 17}, "loss.num_steps is 17; expected 1 to 16"),
    ("train_head", {"length": 2}, "length is 2; expected at least 3"),
    ("train_head", {"objective": "mtp", "head.draft_vocab_size": 9}, "of eagle3 and peagle, not"),
    ("train_head", {"loss.noise": 0.5}, "loss.noise is 0.5; it is an option of eagle1, not of eag"),
    ("train_head", {"head.draft_vocab_size": 301}, "draft vocabulary 301 is larger"),
    ("train_head", {"data.responses": "nowhere.jsonl"}, "nowhere.jsonl cannot be read"),
    ("train_head", {"data.responses": "FOLDER/other.jsonl"}, "id 300; the target has ids 0 to 299"),
    ("train_head", {"data.has_prompt_loss": True}, "False, unless there are data.responses"),
    ("train_head", {"data.text": ""}, "data.text is ''; expected 'stdlib', or files and folders"),
    ("train_head", {"data.text": "a.jsonl,"}, "is 'a.jsonl,'; expected 'stdlib', or files"),
    ("train_head", {"head.num_modules": 2}, "is 2; it is an option of mtp, not of eagle3"),
    ("train_head", {"data.text": "FOLDER/empty.jsonl"}, "gave no document for train"),
    ("train_head", {"mesh": "data:4"}, "batch is 2, which the mesh axis data:4 does not divide"),
    ("train_head", {"is_fully_sharded": True}, "is_fully_sharded is True, but there is no mesh"),
    ("train_head", {"export_from": "first"}, "export_from is 'first'; expected best or last"),
    ("train_head", {"export_dtype": "int4"}, "export_dtype is 'int4'; expected one of float32"),
    ("train_head", {"export_format": "EAGLE-1"}, "'EAGLE-1'; expected one of SpecForge"),
    ("benchmark", {"peers.num_prompts": 0}, "peers.num_prompts is 0"),
    ("benchmark", {"peers.data": "no.jsonl"}, "data is 'no.jsonl', which cannot be read"),
    ("benchmark", {"llama110m.slots": 16}, "need"),
    ("benchmark", {"peers.dtypes": "float16"}, "peers.dtypes .* among float32, bfloat16"),
]


@pytest.mark.parametrize("experiment, changes, words", REFUSED)
def test_what_cannot_be_is_refused(folder, tmp_path, experiment, changes, words):
    config = config_of(experiment, folder)
    text = lambda x: x.replace("FOLDER", str(folder)) if isinstance(x, str) else x
    config.update_from_flattened_dict({key: text(value) for key, value in changes.items()})
    with pytest.raises(SpecJaxError, match=words):
        RUNS[experiment](config, tmp_path / "run")
    assert experiment in ("train_head", "benchmark") or not list(tmp_path.rglob("*.*"))
