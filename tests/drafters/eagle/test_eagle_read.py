"""Heads as other projects publish them, written here by NumPy, and every way to be wrong."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.published_heads import (
    FC_NORMS,
    HEADS,
    IDS,
    MASK,
    MODEL,
    TARGET,
    D,
    U,
    V,
    params_of,
    write_head,
)
from support.tiny_models import random_tensor, random_tokens, random_weights

from spec_jax import load_draft, load_head
from spec_jax.drafters.common.vocabulary import check_offsets
from spec_jax.drafters.eagle.formats import EAGLE_FORMATS
from spec_jax.drafters.eagle.model import forward, head_table, join_features, recycle, unembed
from spec_jax.drafters.formats import Reading
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models import transformer
from spec_jax.models.config import RopeConfig


def outputs(params, config):
    """States and logits of pairs after random features, and of a recycled step."""
    model = transformer.model(TARGET)
    both = {"head": jax.tree.map(jnp.asarray, params), "target": random_weights(TARGET)}
    embed = both["head" if config.own_embed else "target"]["embed"]
    features = jnp.asarray(random_tensor("features", (2, 5, len(config.taps) * D), 0))
    tokens = random_tokens(2, 5)
    state = join_features(both["head"], features, config)
    for _ in range(2):
        x, _ = forward(both["head"], embed, state, tokens, None, config=config)
        state = recycle(both["head"], x, config)
    return x, unembed(both, x, config, model)


@pytest.mark.parametrize("name", HEADS)
def test_a_published_head_is_the_same_head_built_directly(tmp_path, name):
    _, names, expected = HEADS[name]
    head = load_draft(write_head(tmp_path, name), MODEL)
    assert head.method == "eagle" and head.config == expected
    params = params_of(names, expected)
    assert head.params.keys() == params.keys()
    assert head.params.keys() - {"d2t"} == head_table(expected).keys()
    jax.tree.map(np.testing.assert_array_equal, head.params, params)
    read, built = outputs(head.params, head.config), outputs(params, expected)
    jax.tree.map(np.testing.assert_array_equal, read, built)


def test_both_vocabulary_tables_may_be_there_where_the_vocabularies_are_equal(tmp_path):
    tables = {"d2t": np.zeros(V, np.int64), "t2d": np.ones(V, bool)}
    name = "eagle-3 whole vocabulary"
    assert "d2t" not in load_head(write_head(tmp_path, name, tensors=tables), MODEL).params
    only = {"t2d": MASK}
    with pytest.raises(WeightsError, match="t2d disagree"):
        load_head(write_head(tmp_path, name, tensors=only), MODEL)


def test_a_reduced_vocabulary_needs_no_t2d(tmp_path):
    head = load_head(write_head(tmp_path, without=["t2d"]), MODEL)
    np.testing.assert_array_equal(head.params["d2t"] + np.arange(U), IDS)


# ------------------------------------------------------------------------------- strict


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("name", ["eagle-1", "eagle-3", "specforge fc_norm", "speculators norms"])
def test_every_missing_tensor_is_named(tmp_path, name):
    for tensor in HEADS[name][1]:
        directory = write_head(tmp_path, name, without=[tensor])
        with pytest.raises((WeightsError, ConfigError)) as error:
            load_head(directory, MODEL)
        assert f"tensor {tensor} is missing" in str(error.value)


OFFSETS = IDS - np.arange(U)
OTHER_MASK = MASK ^ np.isin(np.arange(V), [IDS[3], np.flatnonzero(~MASK)[0]])
WRONG_TENSORS = [
    ("eagle-1", {"lm_head.weight": zeros(V, D)}, r"unexpected tensors lm_head\.weight"),
    ("eagle-1", {"fc.weight": zeros(D, 3 * D)}, r"fc\.weight has shape \[16, 48\].*\[16, 32\]"),
    ("speculators", {"verifier_norm.weight": zeros(D)}, "unexpected.*verifier_norm"),
    ("eagle-3", {"lm_head.weight": zeros(V, D)}, r"\[31, 16\]; config.json .*\[20, 16\]"),
    ("eagle-3", {"norm.weight": np.full(D, np.nan, np.float32)}, "norm.weight holds NaN"),
    ("eagle-3 narrow", {"embed_tokens.weight": zeros(V, D)}, r"embed_.*\[31, 16\].*\[31, 10\]"),
    ("eagle-3", {"fc.weight": zeros(D, 2 * D)}, r"2 states of the target's width 16; taps.*are 3"),
    ("eagle-3", {"fc.weight": zeros(D, 40)}, r"40 features, 2\.50 states"),
    ("eagle-3", {"d2t": IDS}, "looks like ids of the target"),
    ("eagle-3", {"d2t": np.where(np.arange(U) == 7, OFFSETS[6] - 1, OFFSETS)}, "draft ids 6 and 7"),
    ("eagle-3", {"d2t": np.full(U, 12)}, "ids 12 to 31; expected 0 to 30"),
    ("eagle-3", {"d2t": OFFSETS.astype(np.float32)}, "dtype float32; expected integers"),
    ("eagle-3", {"d2t": OFFSETS[:-1]}, r"d2t has shape \[19\].*\[20\]"),
    ("eagle-3", {"t2d": OTHER_MASK}, "d2t and t2d disagree"),
    ("eagle-3", {"t2d": MASK[:-1]}, r"t2d has shape \[30\].*\[31\]"),
    ("eagle-3", {"t2d": OFFSETS[np.arange(V) % U]}, "not a mask; expected booleans"),
]


@pytest.mark.parametrize(("name", "tensors", "words"), WRONG_TENSORS)
def test_a_tensor_that_is_wrong_is_named(tmp_path, name, tensors, words):
    with pytest.raises(WeightsError, match=words):
        load_head(write_head(tmp_path, name, tensors=tensors), MODEL)


def test_sparse_offsets_pass_where_the_mask_confirms_them():
    ids = np.arange(0, 30, 3)  # offsets that also increase strictly, as ids do
    mask = np.isin(np.arange(V), ids).astype(np.uint8)
    np.testing.assert_array_equal(check_offsets(ids - np.arange(10), mask, V) + np.arange(10), ids)
    with pytest.raises(WeightsError, match="looks like ids"):
        check_offsets(ids - np.arange(10), None, V)


WINDOW = HEADS["speculators"][0]["transformer_layer_config"] | {"sliding_window": 8}
SUPPOSED = [  # the file, what the caller says
    ("eagle-3", {"target_hidden_size": 20}, {}, "target of width 20; this one has 16"),
    ("eagle-3", {"vocab_size": 40}, {}, "target of vocabulary 40; this one has 31"),
    ("eagle-3", {"vocab_size": None}, {}, "vocab_size is missing, so the head's target is not"),
    ("speculators", {"transformer_layer_config": [1]}, {}, "expected an object"),
    ("speculators", {"speculators_model_type": "dflash"}, {}, "'dflash' is not supported"),
    ("eagle-3", {"num_hidden_layers": 2}, {}, "2 layers; expected 1"),
    ("eagle-3", {"draft_vocab_size": 40}, {}, "draft vocabulary 40 is larger than .* 31"),
    ("eagle-3", {"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state"),
    ("eagle-3", {"eagle_config": 3}, {}, "eagle_config is 3"),
    ("eagle-3", {"fc_norm": "yes"}, {}, "fc_norm is 'yes'"),
    ("eagle-3", {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, {}, r"9\]; the target has 8"),
    ("eagle-3", {"eagle_aux_hidden_state_layer_ids": [2, -1]}, {}, "expected a list of layers"),
    ("eagle-3", {"layer_types": ["sliding_attention"]}, {}, "sliding_window is None; expected"),
    ("eagle-3", {"layer_types": ["linear_attention"]}, {}, "names linear_attention, which is not"),
    ("eagle-1", {"hidden_size": 20, "target_hidden_size": D}, {}, "width is 20; .* has 16"),
    ("eagle-3", {}, {"tap": (1,)}, "unknown head option 'tap'; options: taps, fc_bias"),
    ("eagle-3", {}, {"norm_output": 1}, "norm_output is 1; expected True or False"),
    ("eagle-3", {}, {"taps": 3}, "taps is 3; expected a tuple"),
    ("eagle-3", {}, {"taps": (0, 4, 10)}, r"taps \(0, 4, 10\) do not exist"),
]


@pytest.mark.parametrize(("name", "config", "said", "words"), SUPPOSED)
def test_a_head_of_another_kind_or_for_another_target_is_refused(
    tmp_path, name, config, said, words
):
    with pytest.raises(ConfigError, match=words):
        load_head(write_head(tmp_path, name, **config), MODEL, **said)


def test_as_many_states_are_tapped_as_a_file_names(tmp_path):
    two, named = {"fc.weight": zeros(D, 2 * D)}, {"eagle_aux_hidden_state_layer_ids": [2, 5]}
    assert load_head(write_head(tmp_path, tensors=two, **named), MODEL).config.taps == (2, 5)


# -------------------------------------------------------------------------------- notes


def notes_of(directory, **overrides):
    head = load_head(directory, MODEL, **overrides)
    return head.config, " ".join(head.notes)


NUMBERINGS = [
    ("eagle-3", None, (2, 4, 5), r"taps = \(2, 4, 5\): the usual ones"),
    ("eagle-3", [2, 4, 5], (2, 4, 5), "read as the states before those layers"),
    ("eagle-3", [3, 6, 8], (3, 6, 8), "states before those layers"),
    ("eagle-3", [1, 3, 7], (2, 4, 8), r"outputs of those layers; pass taps=\(1, 3, 7\) if"),
    ("eagle-3", [1, 4, 8], (1, 4, 8), "states before those layers"),  # layer 8 is none
    ("specforge", [3, 4, 6], (3, 4, 6), r"pass taps=\(4, 5, 7\) if"),
    ("speculators", None, (2, 4, 5), "usual"),
    ("speculators", [1, 3, 4], (1, 3, 4), r"pass taps=\(2, 4, 5\) if"),
]


@pytest.mark.parametrize("ids", [[1, 3, 7], [2, 4, 8], [0, 3, 7]])
def test_taps_that_a_file_of_ours_states_are_noted_only_where_its_ids_differ(tmp_path, ids):
    directory = write_head(
        tmp_path, "specforge", taps=[2, 4, 8], eagle_aux_hidden_state_layer_ids=ids
    )
    config, notes = notes_of(directory)
    assert config.taps == (2, 4, 8)
    assert ("in place of its eagle_aux" in notes) == (ids[0] == 0)
    assert ids[0] == 0 or not notes


@pytest.mark.parametrize(("name", "ids", "taps", "message"), NUMBERINGS)
def test_numbering_of_tapped_layers_is_resolved_and_noted(tmp_path, name, ids, taps, message):
    directory = write_head(tmp_path, name, eagle_aux_hidden_state_layer_ids=ids)
    config, notes = notes_of(directory)
    assert config.taps == taps
    assert re.search(message, notes)


def test_biases_without_a_tensor_are_off_and_noted(tmp_path):
    config, notes = notes_of(write_head(tmp_path, attention_bias=True))
    assert not config.layer.attention_bias and "there is no q_proj.bias" in notes


def test_default_taps_need_a_target_deep_enough(tmp_path):
    shallow = dataclasses.replace(MODEL, config=dataclasses.replace(TARGET, num_hidden_layers=6))
    with pytest.raises(ConfigError, match=r"6 layers is too shallow .*\(2, 3, 3\).*pass taps"):
        load_head(write_head(tmp_path), shallow)
    assert load_head(tmp_path, shallow, taps=(1, 3, 6)).config.taps == (1, 3, 6)


def test_an_explicit_argument_wins_and_is_noted(tmp_path):
    directory = write_head(tmp_path, "specforge", norm_output=True)
    config, notes = notes_of(
        directory, taps=(0, 4, 8), norm_output=False, norm_before_residual=True
    )
    assert (config.taps, config.norm_output, config.norm_before_residual) == ((0, 4, 8), 0, 1)
    for note in ("taps = (0, 4, 8): the caller", "norm_output = False: the caller"):
        assert note in notes
    assert "SpecForge before" not in notes and "outputs of those layers" not in notes


NORMS = {n: zeros(*shape) for n, (_, shape) in FC_NORMS.items()}
NOTED = [  # the file, its tensors, a flag of the head, words of a note and None where there is none
    ("specforge", dict(norm_output=True), {}, "norm_output", True, "pass norm_output=False"),
    ("specforge", dict(norm_output=False), {}, "norm_output", False, "not supported"),
    ("specforge", {}, {}, "norm_output", False, None),
    ("speculators", {}, {}, "norm_before_residual", True, None),
    ("speculators", dict(norm_before_residual=None), {}, "norm_before_residual", False, "not say"),
    ("specforge", {}, NORMS, "fc_norm", True, "there is fc_norm.0"),
]


@pytest.mark.parametrize(("name", "hf", "tensors", "flag", "value", "words"), NOTED)
def test_what_a_file_leaves_open_is_noted(tmp_path, name, hf, tensors, flag, value, words):
    config, notes = notes_of(write_head(tmp_path, name, tensors=tensors, **hf))
    assert getattr(config, flag) is value
    assert flag not in notes if words is None else words in notes


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("eagle-3", {"sliding_window": 8}),
        ("eagle-1", {"sliding_window": 8, "model_type": "qwen2", "use_sliding_window": True}),
        ("eagle-3", {"sliding_window": 8, "layer_types": ["sliding_attention"]}),
        ("speculators", {"transformer_layer_config": WINDOW}),
    ],
)
def test_a_head_has_the_window_that_its_file_states(tmp_path, name, stated):
    head = load_head(write_head(tmp_path / "theirs", name, **stated), MODEL)
    assert head.config.layer.windows == (8,)
    head.save(tmp_path / "ours", MODEL)
    assert load_head(tmp_path / "ours", MODEL).config == head.config


SEES_ALL = [
    dict(model_type="mistral"),
    dict(sliding_window=8, model_type="qwen2"),  # whose key use_sliding_window is false by default
    dict(sliding_window=8, layer_types=["full_attention"]),
]


@pytest.mark.parametrize("stated", SEES_ALL, ids=lambda x: ", ".join(x))
def test_a_layer_that_sees_all_may_state_a_window(tmp_path, stated):
    layers = [load_head(write_head(tmp_path, **x), MODEL).config.layer for x in (stated, {})]
    assert layers[0] == layers[1]


def test_the_rotary_base_is_the_heads_own(tmp_path):
    config, notes = notes_of(write_head(tmp_path))
    assert config.layer.rope == RopeConfig(rope_theta=1e4) and "rope" not in notes
    left = {key: x for key, x in HEADS["eagle-3"][0].items() if key != "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(left))
    config, notes = notes_of(tmp_path)
    assert config.layer.rope.rope_theta == 1e4 and "10000 is assumed" in notes
    parameters = {"rope_type": "default", "rope_theta": 7.0}
    config, notes = notes_of(write_head(tmp_path, rope_theta=None, rope_parameters=parameters))
    assert config.layer.rope.rope_theta == 7.0 and "rope" not in notes


def test_the_layer_of_an_eagle_head_is_llamas_whatever_its_target_is(tmp_path):
    config, notes = notes_of(write_head(tmp_path, model_type="qwen3"))
    assert config.layer.model_type == "llama" and "model_type 'qwen3'" in notes


def test_sizes_that_an_eagle_head_with_biases_leaves_out_are_llamas():
    left_out = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    for has_biases in (False, True):
        hf = {**HEADS["eagle-1"][0], "num_attention_heads": 4, "qkv_bias": has_biases}
        hf = {key: value for key, value in hf.items() if key not in left_out}
        names = set(HEADS["eagle-1 of qwen2"][1])
        layer = EAGLE_FORMATS.config_of(Reading(hf, names, TARGET)).layer
        assert [getattr(layer, name) for name in left_out] == [4, 4, 2048]
        assert layer.model_type == ("qwen2" if has_biases else "llama")


def test_a_head_that_leaves_nothing_open_has_no_notes_but_its_taps(tmp_path):
    assert len(load_head(write_head(tmp_path, "speculators"), MODEL).notes) == 1
    assert load_head(write_head(tmp_path, "eagle-1"), MODEL).notes == ()


def test_a_head_loads_in_the_targets_dtype(tmp_path):
    head = load_head(write_head(tmp_path), MODEL)
    assert head.name == str(tmp_path) and head.params["fc"].dtype == jnp.float32
    assert load_head(tmp_path, MODEL, "bfloat16").params["fc"].dtype.name == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_copy_of_the_targets_embedding_is_left_out(tmp_path, dtype):
    copy = {"embed_tokens.weight": np.asarray(MODEL.params["embed"].astype(dtype))}
    head = load_head(write_head(tmp_path, "eagle-1", tensors=copy), MODEL)
    assert "embed" not in head.params and not head.config.own_embed
    assert "copy of the target's" in " ".join(head.notes)


def test_an_embedding_that_differs_from_the_targets_is_the_heads_own(tmp_path):
    other = random_tensor("other", (V, D), 0)
    directory = write_head(tmp_path, tensors={"embed_tokens.weight": other})
    head = load_head(directory, MODEL)
    assert head.config.own_embed and "keeps its own" in " ".join(head.notes)
    np.testing.assert_array_equal(head.params["embed"], other)
    shared = load_head(directory, MODEL, own_embed=False)
    assert "embed" not in shared.params and "shares the target's" in " ".join(shared.notes)
