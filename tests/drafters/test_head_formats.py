"""Heads of every kind in every format: read back bit for bit, and what is not written."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import block_drafts, parallel_heads
from support.any_head import any_head
from support.published_heads import IDS, LAYER, MODEL, SMALL, TAPS, D, L, U, V
from support.tiny_models import DEEPSEEK, LLAMA, QWEN2, QWEN3, QWEN3_NEXT, QWEN35, QWEN35_MOE

from spec_jax import load_draft
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.loading import LoadedHead
from spec_jax.models import tensors
from spec_jax.models.config import RopeConfig
from spec_jax.models.families import module_layer

# ------------------------------------------------------------------------------- EAGLE

EAGLE_1 = EagleConfig(1, LAYER, D, V, (L + 1,))
EAGLE_3 = EagleConfig(3, SMALL, D, V, TAPS)
BIASED = dataclasses.replace(SMALL, attention_bias=True, mlp_bias=True, eos_token_id=(2, 7))
NARROW = dict(layer=dataclasses.replace(SMALL, hidden_size=10), own_embed=True)
YARN = RopeConfig("yarn", 5e5, factor=4.0, original_max_position_embeddings=16, truncate=False)
OF_QWEN2, OF_QWEN3, SCALED = (
    dataclasses.replace(SMALL, **change)
    for change in (dict(model_type="qwen2"), dict(model_type="qwen3"), dict(rope=YARN))
)
NORMS = [
    dict(norm_before_residual=residual, norm_output=output, **joined)
    for residual, output, joined in itertools.product(
        (False, True), (False, True), ({}, {"fc_norm": True}, {"norm_before_fc": True})
    )
]
SHARED = [*NORMS, dict(layer=LAYER), NARROW, dict(layer=SCALED)]
SHARED += [dict(taps=(0, 3)), dict(taps=(2, 4, 7, L))]
FREE = [dict(layer=BIASED), dict(taps=(1, 3, 7))]  # of formats without SGLang's limits
EXPRESSIBLE = {
    "EAGLE-1": [
        {},
        dict(fc_bias=True),
        dict(own_embed=True),
        dict(layer=dataclasses.replace(LAYER, model_type="qwen2")),
        dict(layer=dataclasses.replace(LAYER, rope=YARN, attention_bias=True)),
    ],
    "EAGLE-3": [*SHARED, *FREE, dict(own_embed=True, fc_bias=True), dict(layer=OF_QWEN2)],
    "SpecForge": [*SHARED, dict(fc_bias=True), dict(taps=(3, 5))],
    "speculators": [*SHARED, *FREE, dict(own_embed=True), dict(layer=OF_QWEN3)],
}


def eagle(**change):
    return dataclasses.replace(EAGLE_3, **change)


CASES = [
    (format, dataclasses.replace(EAGLE_1 if format == "EAGLE-1" else EAGLE_3, **change), MODEL)
    for format, changes in EXPRESSIBLE.items()
    for change in changes
]
CASES += [
    ("speculators", config, parallel_heads.TARGET) for config in parallel_heads.HEADS.values()
]
CASES += [("SpecForge", parallel_heads.HEADS["one layer"], parallel_heads.TARGET)]

# --------------------------------------------------------------------------------- MTP

DENSE = dataclasses.replace(DEEPSEEK, n_routed_experts=None, intermediate_size=24, q_lora_rank=None)
FAR = RopeConfig("yarn", 5e5, factor=4.0, original_max_position_embeddings=16, mscale_all_dim=0.5)
CENTRED = dict(has_zero_centred_norms=True)
HIDDEN_FIRST = dict(order="hidden-first")
SEVERAL = dict(num_modules=2, protocol="sequential")
ALL_OTHER = dict(taps=(2,), recycles_normed=False, protocol="sequential")
OWN_ENDS = dict(has_own_embed=True, has_own_head=True)
NEXT_OTHER = dataclasses.replace(QWEN3_NEXT, norm_topk_prob=False)


def mtp(layer, **changes):
    layer = dataclasses.replace(layer, num_hidden_layers=1)
    return MtpConfig.of_target(LLAMA, layer=layer, **changes)


TARGET = block_drafts.TARGET
target_of = lambda config: MODEL if isinstance(config, EagleConfig) else TARGET
MODULES = [
    ("MiMo", mtp(QWEN2, **HIDDEN_FIRST)),
    ("MiMo", mtp(LLAMA, **HIDDEN_FIRST)),
    ("MiMo", mtp(QWEN3, **HIDDEN_FIRST, **ALL_OTHER)),
    ("MiMo", mtp(LLAMA, **HIDDEN_FIRST, **SEVERAL)),
    ("DeepSeek", mtp(LLAMA)),
    ("DeepSeek", mtp(QWEN2, **OWN_ENDS)),
    ("DeepSeek", mtp(DEEPSEEK)),
    ("DeepSeek", mtp(dataclasses.replace(DEEPSEEK, rope=FAR), **ALL_OTHER)),
    ("DeepSeek", mtp(DENSE, **OWN_ENDS, **SEVERAL)),
    ("Qwen3-Next", mtp(QWEN3_NEXT, **CENTRED)),
    ("Qwen3-Next", mtp(module_layer(QWEN35), **CENTRED)),
    ("Qwen3-Next", mtp(module_layer(QWEN35_MOE), **CENTRED)),
    ("Qwen3-Next", mtp(NEXT_OTHER, **CENTRED, **ALL_OTHER)),
]
CASES += [(format, config, TARGET) for format, config in MODULES]

# -------------------------------------------------------------------------------- blocks

BLOCKS = block_drafts.HEADS
FORMATS_OF_BLOCKS = {
    "dflash": ("z-lab", "speculators"),
    "dflash2": ("z-lab", "speculators"),
    "dspark": ("DeepSpec", "speculators"),
    "treeflash": ("TreeFlash",),
}
CASES += [(x, BLOCKS[name], TARGET) for name, known in FORMATS_OF_BLOCKS.items() for x in known]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("format", "config", "target"), CASES, ids=lambda x: str(x)[:40])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, format, config, target, dtype):
    head = any_head(config, dtype)
    head.save(tmp_path, target, format=format)
    read = load_draft(tmp_path, target, dtype)
    assert (read.format, read.method, read.config) == (format, head.method, config)
    dtypes = lambda params: jax.tree.map(lambda w: w.dtype.name, params)
    assert dtypes(read.params) == dtypes(head.params)
    jax.tree.map(np.testing.assert_array_equal, read.params, head.params)
    assert {f.name for f in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


DEFAULTS = [
    ("EAGLE-1", EAGLE_1, MODEL),
    ("SpecForge", EAGLE_3, MODEL),
    ("EAGLE-3", eagle(taps=(1, 3, 7)), MODEL),
    ("speculators", eagle(layer=OF_QWEN3), MODEL),
    *((format, config, TARGET) for format, config in MODULES[:5:2]),
    ("z-lab", BLOCKS["dflash"], TARGET),
]


@pytest.mark.parametrize(("format", "config", "target"), DEFAULTS, ids=lambda x: str(x)[:40])
def test_the_default_format_is_the_first_that_can_express_the_head(
    tmp_path, format, config, target
):
    any_head(config).save(tmp_path, target)
    assert load_draft(tmp_path, target).format == format


INVALID = [
    ("eagle", EAGLE_3, "'eagle'; known for eagle-3 .*: SpecForge, EAGLE-3, speculators"),
    ("EAGLE-3", EAGLE_1, "format is 'EAGLE-3'; known for eagle-1 with a layer of llama: EAGLE-1"),
    ("EAGLE-1", dataclasses.replace(EAGLE_1, taps=(4,)), r"taps is \(4,\); in .* as \(9,\)"),
    ("EAGLE-3", eagle(taps=(2, L + 1)), r"\(2, 9\) hold 9, the state after the"),
    ("EAGLE-3", eagle(taps=(2, L + 2)), r"taps \(2, 10\) do not exist"),
    ("EAGLE-3", eagle(layer=OF_QWEN3), "layer.model_type is 'qwen3'; .* as 'llama'"),
    ("speculators", eagle(layer=OF_QWEN2), "llama and qwen3, not 'qwen2'"),
    ("speculators", eagle(fc_bias=True), "fc_bias is True; .* as False"),
    ("SpecForge", eagle(taps=(1, 3, 7)), r"is \(1, 3, 7\); .* as \(2, 4, 8\)"),
    ("SpecForge", eagle(layer=BIASED), "biases, which SGLang leaves out"),
    ("SpecForge", eagle(layer=OF_QWEN2), "biases, which SGLang leaves out"),
    ("SpecForge", eagle(own_embed=True), "own_embed is True, which SGLang ignores"),
    ("EAGLE-3", eagle(target_vocab_size=40), "vocabulary 40; this one has 31"),
    (None, eagle(layer=OF_QWEN3, fc_bias=True), "SpecForge: .*'qwen3'.*; speculators: fc_bias"),
    ("mimo", mtp(LLAMA), "format is 'mimo'; known for .*: DeepSeek, MiMo"),
    ("MiMo", mtp(DEEPSEEK), "format is 'MiMo'; known for .* a layer of deepseek: DeepSeek"),
    ("Qwen3-Next", mtp(LLAMA), "'Qwen3-Next'; known for .* of llama: DeepSeek, MiMo"),
    (None, mtp(QWEN3_NEXT), "norms is False; in the format Qwen3-Next it would be read as True"),
    (None, mtp(LLAMA, **CENTRED), "norms is True; in the format DeepSeek it would be read as"),
    (None, mtp(QWEN3_NEXT, **SEVERAL, **CENTRED), "num_modules is 2; the format Qwen3-Next hold"),
    ("MiMo", mtp(QWEN2, has_own_head=True), "modules in the format MiMo share both"),
    ("z-lab", BLOCKS["dspark"], "'z-lab'; known for dspark .*: DeepSpec, speculators"),
    ("z-lab", dataclasses.replace(BLOCKS["dflash"], is_anchor_first=True), "first is True; in"),
    (None, BLOCKS["blocks of slots"], r"windows are \(3, 2\); a file states one size"),
]


@pytest.mark.parametrize(("format", "config", "words"), INVALID, ids=[row[-1] for row in INVALID])
def test_what_a_format_cannot_express_is_refused(tmp_path, format, config, words):
    with pytest.raises(ConfigError, match=words):
        any_head(config).save(tmp_path, target_of(config), format=format)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------- what is in the files


def write(directory, config, format=None, params=None, **options):
    """Writes a head of this config, or of these weights; returns its config.json."""
    head = any_head(config) if params is None else LoadedHead("head", config, params)
    head.save(directory, target_of(config), format=format, **options)
    return json.loads((directory / "config.json").read_text())


def stored(directory):
    return load_file(directory / "model.safetensors")


def test_how_caches_are_read_is_left_out(tmp_path):
    """It is the caller's choice, and no format states it."""
    small, llama = (dataclasses.replace(layer, attention="xla") for layer in (SMALL, LLAMA))
    for config in (eagle(layer=small), mtp(llama)):
        write(tmp_path, config)
        assert load_draft(tmp_path, target_of(config)).config.layer.attention == "auto"


def test_weights_are_stored_in_the_dtype_asked_for(tmp_path):
    for dtype in ("bfloat16", "float16"):
        hf = write(tmp_path, EAGLE_3, "EAGLE-3", dtype=dtype)
        kinds = {n: x.dtype.name for n, x in stored(tmp_path).items()}
        assert (kinds.pop("d2t"), kinds.pop("t2d")) == ("int64", "bool")
        assert set(kinds.values()) == {dtype} and hf["dtype"] == hf["torch_dtype"] == dtype
    offsets = stored(tmp_path)["d2t"]
    np.testing.assert_array_equal(offsets, any_head(EAGLE_3).params["d2t"])
    is_kept = np.isin(np.arange(V), offsets + np.arange(U))
    np.testing.assert_array_equal(stored(tmp_path)["t2d"], is_kept)


def test_no_format_leaves_a_flag_to_be_guessed(tmp_path):
    flags = {"norm_before_residual", "norm_before_fc", "fc_norm"}
    size = {"vocab_size": V, "tie_word_embeddings": False, "num_hidden_layers": 1, "head_dim": 6}
    both = {"rope_type": "default", "rope_theta": 1e4}
    rope = {"rope_theta": 1e4, "rope_scaling": None, "rope_parameters": both}
    for format in ("EAGLE-3", "SpecForge", "speculators"):
        hf = write(tmp_path, EAGLE_3, format)
        assert all(hf[name] is False for name in flags)
        assert hf["draft_vocab_size"] == U
        layer = hf["transformer_layer_config"] if format == "speculators" else hf
        assert {n: layer[n] for n in (*size, *rope)} == size | rope
        # To SpecForge of old, false meant that what is scored is not normalised.
        assert ("norm_output" in hf) == (format != "SpecForge")
        assert write(tmp_path, eagle(norm_output=True), format)["norm_output"] is True


def test_copies_of_the_targets_ends_are_written_where_loaders_take_them_from_the_file(tmp_path):
    dspark = BLOCKS["dspark"]
    heads = [*zip(EXPRESSIBLE, (EAGLE_1, EAGLE_3, EAGLE_3, EAGLE_3)), ("z-lab", BLOCKS["dflash"])]
    found = []
    for format, config in (*heads, ("DeepSpec", dspark), ("speculators", dspark)):
        write(tmp_path, config, format)
        found += [(format, config)] if "embed_tokens.weight" in stored(tmp_path) else []
    assert found == [("speculators", EAGLE_3), ("DeepSpec", dspark)]


def test_speculators_config_names_the_verifier_and_the_drafts(tmp_path):
    stated = write(tmp_path, EAGLE_3, "speculators", num_speculative_tokens=5)["speculators_config"]
    verifier = {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    assert stated["verifier"] == verifier and stated["algorithm"] == "eagle3"
    assert stated["proposal_methods"][0]["speculative_tokens"] == 5
    with pytest.raises(ConfigError, match="num_speculative_tokens is 0; expected 1 or more"):
        write(tmp_path, EAGLE_3, "speculators", num_speculative_tokens=0)
    with pytest.raises(ConfigError, match="name is None; expected its name or path"):
        nameless = dataclasses.replace(MODEL, name=None)
        any_head(EAGLE_3).save(tmp_path, nameless, format="speculators")


@pytest.mark.parametrize(
    ("format", "order"), [("MiMo", "embedding-first"), ("DeepSeek", "hidden-first")]
)
def test_an_explicit_format_changes_the_order_and_the_halves_of_fc_with_it(tmp_path, format, order):
    config = mtp(QWEN2, order=order)
    params = any_head(config).params
    hf = write(tmp_path, config, format)
    read = load_draft(tmp_path, TARGET)
    other = ({"embedding-first", "hidden-first"} - {order}).pop()
    assert read.config == dataclasses.replace(config, order=other)
    fc = params["0"]["fc"]
    swapped = jnp.concatenate([fc[LLAMA.hidden_size :], fc[: LLAMA.hidden_size]])
    np.testing.assert_array_equal(read.params["0"]["fc"], swapped)
    assert hf["model_type"] == ("mimo" if format == "MiMo" else "qwen2")


def test_config_and_tensors_are_those_that_servers_look_for(tmp_path):
    hf = write(tmp_path, mtp(QWEN2, **HIDDEN_FIRST))
    assert (hf["model_type"], hf["architectures"]) == ("mimo", ["MiMoForCausalLM"])
    assert (hf["num_hidden_layers"], hf["num_nextn_predict_layers"]) == (2, 1)
    assert "model.mtp_layers.0.input_proj.weight" in stored(tmp_path)
    hf = write(tmp_path, mtp(dataclasses.replace(DEEPSEEK, rope=FAR)))
    assert hf["model_type"] == "deepseek_v3" and hf["topk_method"] == "noaux_tc"
    assert hf["rope_scaling"]["type"] == "yarn" and hf["rope_theta"] == 5e5
    assert "model.layers.2.mlp.experts.5.up_proj.weight" in stored(tmp_path)
    hf = write(tmp_path, mtp(QWEN3_NEXT, **CENTRED))
    assert hf["model_type"] == "qwen3_next" and hf["partial_rotary_factor"] == 0.5
    assert "mtp.fc.weight" in stored(tmp_path)


def test_weights_that_are_not_the_configs_are_refused(tmp_path):
    params = any_head(EAGLE_3).params
    for wrong, message in (
        ({n: w for n, w in params.items() if n != "norm"}, "^norm is missing; .*16"),
        (params | {"q": params["q"][:3]}, r"^q has shape \[3, 12\]; its config asks .*\[32, 12\]"),
        (params | {"d2t": params["d2t"][:-1]}, r"^d2t has shape \[19\]"),
        (params | {"d2t": jnp.asarray(IDS[::-1])}, "d2t is not a table of offsets"),
        (params | {"d2t": jnp.full((U,), V)}, "ids 31 to 50; expected 0 to 30"),
    ):
        with pytest.raises(WeightsError, match=message):
            write(tmp_path, EAGLE_3, "EAGLE-3", wrong)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_files_that_were_there(tmp_path, monkeypatch):
    write(tmp_path, EAGLE_3, "EAGLE-3")
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}

    def fail(arrays, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(tensors, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path, eagle(fc_norm=True), "EAGLE-3")
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


INVALID_KEYS = [
    (EAGLE_3, {"taps": 3}, "taps is 3 in config.json; expected a list"),
    (EAGLE_3, {"taps": [2, "4"]}, "expected integers of 0 or more"),
    (EAGLE_3, {"own_embed": "yes"}, "own_embed is 'yes'; expected true or false"),
    (mtp(LLAMA), {"mtp_config": 3}, "mtp_config is 3; expected an object"),
    (mtp(LLAMA), {"mtp_config": {"taps": 3}}, "taps are 3; expected a tuple"),
    (mtp(LLAMA), {"mtp_config": {"protocol": "none"}}, "protocol is 'none'; expected one of"),
]


@pytest.mark.parametrize(("config", "keys", "message"), INVALID_KEYS, ids=lambda x: str(x)[:20])
def test_our_own_keys_are_checked_when_they_are_read(tmp_path, config, keys, message):
    hf = write(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(hf | keys))
    with pytest.raises(ConfigError, match=message):
        load_draft(tmp_path, target_of(config))
