"""Published layouts of block drafters are read as what they mean, and written as they are read."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.block_drafts import HEADS, TARGET, head_of, tensors_of
from support.tiny_models import LLAMA

from spec_jax import load_draft
from spec_jax.drafters.block.config import DFlashConfig, DSparkConfig, TreeFlashConfig, default_taps
from spec_jax.drafters.block.formats import BLOCK_FORMATS
from spec_jax.drafters.formats import Reading
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.inspection import inspect

SIZES = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6)
LAYER = dict(model_type="qwen3", vocab_size=31, hidden_size=16, intermediate_size=24, **SIZES)
LAYER |= dict(rope_theta=500.0, max_position_embeddings=64, rms_norm_eps=1e-5)
SLIDES = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
MARKOV = dict(markov_rank=3, markov_head_type="vanilla", enable_confidence_head=True)
MARKOV |= dict(confidence_head_with_markov=True)
Z_LAB = dict(LAYER, architectures=["DFlashDraftModel"], block_size=6, num_target_layers=2)
Z_LAB["dflash_config"] = dict(mask_token_id=30, target_layer_ids=[0, 1])
DEEPSPEC = dict(LAYER, architectures=["Qwen3DSparkModel"], block_size=4, mask_token_id=29)
DEEPSPEC |= dict(target_layer_ids=[-1, 1], num_target_layers=2, **MARKOV)
SWA = dict(Z_LAB["dflash_config"], use_swa=True)
TREE = dict(Z_LAB, architectures=["TreeFlashDraftModel"])
TREE["treeflash_config"] = dict(ar_approximation="swiglu", candidate_tokens=64)
SPECULATORS = dict(speculators_model_type="dspark", block_size=4, mask_token_id=29, **MARKOV)
SPECULATORS |= dict(aux_hidden_state_layer_ids=[1, 2], draft_vocab_size=31, sample_from_anchor=True)
SPECULATORS |= dict(sliding_window_non_causal=False, transformer_layer_config=LAYER | SLIDES)

# What a published directory says, and what it means: taps, K, windows, causality by layer.
CASES = {
    "z-lab": (Z_LAB, DFlashConfig, (1, 2), 5, (None, None), (False, False)),
    "z-lab, windows": (Z_LAB | SLIDES, DFlashConfig, (1, 2), 5, (8, None), (True, False)),
    "z-lab, windows that look ahead": (
        Z_LAB | SLIDES | dict(is_causal=False), DFlashConfig, (1, 2), 5, (8, None), (False, False),
    ),
    "z-lab, the block in its config": (
        {k: v for k, v in Z_LAB.items() if k != "block_size"}
        | dict(dflash_config=Z_LAB["dflash_config"] | dict(block_size=6, causal=True)),
        DFlashConfig, (1, 2), 5, (None, None), (True, True),
    ),
    "z-lab, causality in its config, by layer": (
        Z_LAB | SLIDES
        | dict(dflash_config=Z_LAB["dflash_config"] | dict(is_causal=[False, True], causal=True)),
        DFlashConfig, (1, 2), 5, (8, None), (False, True),
    ),
    "z-lab, windows of all layers": (
        Z_LAB | dict(dflash_config=SWA | dict(swa_window_size=4)),
        DFlashConfig, (1, 2), 5, (4, 4), (False, False),
    ),
    "z-lab, windows of all layers, listed as full by transformers": (
        Z_LAB | dict(dflash_config=SWA, layer_types=["full_attention"] * 2, sliding_window=7),
        DFlashConfig, (1, 2), 5, (7, 7), (False, False),
    ),
    "z-lab, windows of the layers that are listed": (
        Z_LAB | SLIDES | dict(dflash_config=SWA | dict(swa_window_size=4)),
        DFlashConfig, (1, 2), 5, (4, None), (True, False),
    ),
    "DeepSpec": (DEEPSPEC, DSparkConfig, (0, 2), 4, (None, None), (False, False)),
    "DeepSpec, older": (DEEPSPEC, DSparkConfig, (0, 2), 4, (None, None), (False, False)),
    "DeepSpec without its heads": (
        DEEPSPEC | dict(markov_rank=0, enable_confidence_head=False),
        DFlashConfig, (0, 2), 4, (None, None), (False, False),
    ),
    "TreeFlash": (TREE, TreeFlashConfig, (1, 2), 5, (None, None), (False, False)),
    "speculators": (SPECULATORS, DSparkConfig, (1, 2), 4, (8, None), (True, False)),
    "speculators, windows that look ahead": (
        SPECULATORS | dict(sliding_window_non_causal=True),
        DSparkConfig, (1, 2), 4, (8, None), (False, False),
    ),
}  # fmt: skip


def config_of(case):
    """The config that a case means."""
    hf, cls, taps, max_draft, windows, is_causal = CASES[case]
    config = cls.of_target(LLAMA, **{"markov_rank": 3} if cls is DSparkConfig else {})
    sizes = {n: LAYER[n] for n in (*SIZES, "intermediate_size", "rms_norm_eps")}
    rope = dataclasses.replace(config.layer.rope, rope_theta=500.0)
    layer = dataclasses.replace(config.layer, rope=rope, max_position_embeddings=64, **sizes)
    size = hf.get("block_size", 6)
    changes = {"windows": windows, "is_causal": is_causal, "is_anchor_first": size == max_draft}
    mask = 30 if hf.get("mask_token_id") is None else hf["mask_token_id"]
    return dataclasses.replace(
        config, layer=layer, taps=taps, block_size=size, mask_token_id=mask, **changes
    )


def published(folder, case, copies=True, changes=()):
    """A directory as a project publishes it; DeepSpec's with copies of the target's ends."""
    hf, config = {**CASES[case][0], **dict(changes)}, config_of(case)
    tensors = tensors_of(config)
    if case == "TreeFlash":
        is_step = lambda name: name.startswith("ar_approximation")
        tensors = {n if is_step(n) else f"model.{n}": x for n, x in tensors.items()}
    if case == "DeepSpec, older":
        is_step = lambda name: name.startswith(("markov_head.", "confidence_head."))
        tensors = {f"logit_head.{n}" if is_step(n) else n: x for n, x in tensors.items()}
    if case.startswith("DeepSpec") and copies:
        tensors["embed_tokens.weight"] = np.asarray(TARGET.params["embed"])
        tensors["lm_head.weight"] = np.asarray(TARGET.params["head"]).T
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(
        {n: np.ascontiguousarray(x) for n, x in tensors.items()}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_published_head_is_read_as_it_is_meant(tmp_path, case):
    head = load_draft(published(tmp_path, case), TARGET)
    config = config_of(case)
    assert head.config == config and head.method == config.name
    assert head.config.max_draft == CASES[case][3] and head.notes
    assert ("use_swa puts a window on all layers" in " ".join(head.notes)) == ("of all" in case)
    jax.tree.map(np.testing.assert_array_equal, head.params, head_of(config).params)
    found = inspect(tmp_path)
    assert found.kind == config.name
    assert found.facts["tokens of a block"] == config.block_size


INSIDE = Z_LAB["dflash_config"]
REFUSED = [  # the file, what the caller says
    (dict(hidden_size=32), {}, "head is for a target of width 32; this one has"),
    (dict(vocab_size=None), {}, "vocab_size is missing, so .*; expected the vocabulary .* one, 31"),
    (dict(model_type="gemma4_text"), {}, "'gemma4_text'; expected 'qwen3'"),
    (dict(input_embedding_scale=2.0), {}, "input_embedding_scale 2.0 is not supported"),
    (dict(add_swa_attention_sink_bias=True), {}, "add_swa_attention_sink_bias True is not"),
    (dict(projector_type="domino"), {}, "projector_type 'domino' is not supported"),
    (dict(treeflash_config=dict(ar_approximation="gru")), {}, "'gru' is not .*; known: swiglu"),
    (dict(layer_types=["full_attention", "chunked_attention"]), {}, "for each of 2 layers"),
    (dict(dflash_config=INSIDE | dict(is_causal=[True])), {}, r"is_causal is \[True\]"),
    (dict(block_size=None), {}, "block_size is null|block_size is None"),
    (dict(dflash_config=INSIDE | dict(target_layer_ids=[0, 2])), {}, r"taps \(1, 3\) do not exist"),
    ({}, dict(is_causal=True), "is_causal is True; expected a tuple of True or False, by layer"),
    ({}, dict(is_causal=("yes", "no")), r"is_causal is \('yes', 'no'\); expected True or False"),
    ({}, dict(windows=(4, 0)), r"windows are \(4, 0\); expected positive integers, or None"),
    ({}, dict(taps=(1, "2")), r"taps are \(1, '2'\); expected integers of 0 or more"),
    ({}, dict(is_anchor_first="no"), "is_anchor_first is 'no'; expected True or False"),
    ({}, dict(block_size="8"), "block_size is '8'; expected an integer of 2 or more"),
    ({}, dict(rank=3), "unknown head option 'rank'; options: block_size, mask"),
]


@pytest.mark.parametrize(("changes", "said", "words"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_what_is_not_supported_is_refused_by_name(tmp_path, changes, said, words):
    with pytest.raises(ConfigError, match=words):
        load_draft(published(tmp_path, "z-lab", changes=changes.items()), TARGET, **said)


RANKS = [  # of tensors of rank 3; 6 is the head_dim too
    ("DeepSpec", 6, WeightsError, r"asks for \[31, 6\] \(markov_rank is 6\)"),
    ("DeepSpec", 0, ConfigError, r"markov_rank is 0, but there are tensors markov_head\.\*"),
    ("DeepSpec", None, ConfigError, "markov_rank is missing, but there are tensors markov_head"),
    ("DeepSpec without its heads", 3, ConfigError, "markov_rank is 3, but there is no tensor mark"),
]


@pytest.mark.parametrize(("case", "rank", "error", "words"), RANKS)
def test_a_rank_that_is_not_the_tensors_is_refused_by_its_name(tmp_path, case, rank, error, words):
    with pytest.raises(error, match=words):
        load_draft(published(tmp_path, case, changes={"markov_rank": rank}.items()), TARGET)


def test_lists_of_a_caller_are_tuples(tmp_path):
    head = load_draft(published(tmp_path, "z-lab"), TARGET, taps=[3, 0], windows=[None, 3])
    assert (head.config.taps, head.config.windows) == ((3, 0), (None, 3))


def test_taps_that_a_file_leaves_out_are_those_of_its_project():
    assert default_taps(36, 5) == (2, 10, 18, 26, 34)
    assert default_taps(11, 3) == (2, 5, 9)  # layer 4.5 is layer 4
    deep, names = dataclasses.replace(LLAMA, num_hidden_layers=36), {"fc.weight"}
    names |= {"hidden_norm.weight", "markov_head.markov_w1.weight"}
    hf = {n: value for n, value in SPECULATORS.items() if n != "aux_hidden_state_layer_ids"}
    reading = Reading(hf, names, deep)
    assert BLOCK_FORMATS.config_of(reading).taps == (2, 18, 33)
    assert any("names no layers of the target" in note for note in reading.notes)
    with pytest.raises(ConfigError, match=r"taps \(2, 1, -1\) do not exist"):
        BLOCK_FORMATS.config_of(Reading(hf, names, LLAMA))


def test_codebooks_may_be_those_of_modules_and_usual_sizes_are_assumed(tmp_path):
    """As z-lab stores them; what a file leaves out is noted."""
    config = dataclasses.replace(HEADS["dflash2"], conv_kernel_size=2)
    head = head_of(config)
    head.save(tmp_path, TARGET, format="z-lab")
    stored = load_file(tmp_path / "model.safetensors")
    moved = {f"{n}.weight" if n.endswith("codebook") else n: x for n, x in stored.items()}
    save_file(moved, tmp_path / "model.safetensors")
    hf = json.loads((tmp_path / "config.json").read_text())
    del hf["dflash_config"]["conv_kernel_size"]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    again = load_draft(tmp_path, TARGET)
    assert again.config == config and inspect(tmp_path).kind == "dflash2"
    assert "conv_kernel_size = 2: the usual one is assumed" in " ".join(again.notes)
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)


@pytest.mark.parametrize("tensor", ["prefix_gru.weight_hh_l0", "embed_tokens.weight"])
def test_tensors_of_other_drafters_are_refused_by_name(tmp_path, tensor):
    published(tmp_path, "z-lab")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {tensor: np.ones((31, 16), np.float32)}, tmp_path / "model.safetensors")
    message = {"p": "are those of Domino, which is not", "e": "embed_tokens.weight differs from"}
    with pytest.raises((ConfigError, WeightsError), match=message[tensor[0]]):
        load_draft(tmp_path, TARGET)
