"""Heads written in the formats of other projects: read back bit for bit, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.published_heads import IDS, LAYER, MASK, SMALL, TAPS, TARGET, D, U, V
from support.tiny_models import random_tensor, random_weights

import spec_jax
from spec_jax.drafters.eagle.checkpoint import read_head, write_head
from spec_jax.drafters.eagle.model import EagleConfig, head_table
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.loading import LoadedHead, LoadedModel, random_head
from spec_jax.models import tensors, transformer
from spec_jax.models.config import RopeConfig

L = TARGET.num_hidden_layers
EMBED = random_weights(TARGET)["embed"]
EAGLE_1 = EagleConfig(1, LAYER, D, V, (L + 1,))
EAGLE_3 = EagleConfig(3, SMALL, D, V, TAPS)
FORMATS = {"EAGLE-1": EAGLE_1, "EAGLE-3": EAGLE_3, "SpecForge": EAGLE_3, "speculators": EAGLE_3}
WHOLE = dict(layer=LAYER)
BIASED = dataclasses.replace(SMALL, attention_bias=True, mlp_bias=True, eos_token_id=(2, 7))
NARROW = dict(layer=dataclasses.replace(SMALL, hidden_size=10), own_embed=True)
YARN = RopeConfig("yarn", 5e5, factor=4.0, original_max_position_embeddings=16, truncate=False)
QWEN2, QWEN3, SCALED = (
    dataclasses.replace(SMALL, **change)
    for change in (dict(model_type="qwen2"), dict(model_type="qwen3"), dict(rope=YARN))
)
NORMS = [
    dict(norm_before_residual=residual, norm_output=output, **joined)
    for residual, output, joined in itertools.product(
        (False, True), (False, True), ({}, {"fc_norm": True}, {"norm_before_fc": True})
    )
]
SHARED = [*NORMS, WHOLE, NARROW, dict(layer=SCALED), dict(taps=(0, 3)), dict(taps=(2, 4, 7, L))]
FREE = [dict(layer=BIASED), dict(taps=(1, 3, 7))]  # of formats without SGLang's limits
EAGLE_1_LAYERS = [
    dict(layer=dataclasses.replace(LAYER, model_type="qwen2")),
    dict(layer=dataclasses.replace(LAYER, rope=YARN, attention_bias=True)),
]
EXPRESSIBLE = {
    "EAGLE-1": [{}, dict(fc_bias=True), dict(own_embed=True), *EAGLE_1_LAYERS],
    "EAGLE-3": [*SHARED, *FREE, dict(own_embed=True, fc_bias=True), dict(layer=QWEN2)],
    "SpecForge": [*SHARED, dict(fc_bias=True), dict(taps=(3, 5))],
    "speculators": [*SHARED, *FREE, dict(own_embed=True), dict(layer=QWEN3)],
}
CASES = [(format, change) for format, changes in EXPRESSIBLE.items() for change in changes]


def make(format, **change):
    return dataclasses.replace(FORMATS[format], **change)


def params_of(config, dtype=jnp.float32):
    table = head_table(config)
    params = {n: jnp.asarray(random_tensor(n, spec.shape, 0), dtype) for n, spec in table.items()}
    if config.layer.vocab_size < V:
        params["d2t"] = jnp.asarray(IDS - np.arange(U), jnp.int32)
    return params


def write(directory, config, format, params=None, **options):
    if format == "speculators":
        options = {"verifier": "some/target", "target_embed": EMBED, **options}
    params = params_of(config) if params is None else params
    write_head(directory, config, params, format=format, target_config=TARGET, **options)
    return json.loads((directory / "config.json").read_text())


def assert_same(read, config, params):
    assert read.config == config
    assert {n: w.dtype for n, w in read.params.items()} == {n: w.dtype for n, w in params.items()}
    jax.tree.map(np.testing.assert_array_equal, read.params, params)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("format", "change"), CASES, ids=str)
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, format, change, dtype):
    config = make(format, **change)
    params = params_of(config, dtype)
    write(tmp_path, config, format, params)
    assert {f.name for f in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    for embed in (None, EMBED):  # whether the reader can compare or not
        read = read_head(tmp_path, TARGET, dtype, target_embed=embed)
        assert read.format == format
        assert_same(read, config, params)


def test_how_caches_are_read_is_left_out(tmp_path):
    """It is the caller's choice, and no format states it."""
    config = EagleConfig.of_target(dataclasses.replace(TARGET, attention="xla"), 3)
    assert config.layer.attention == "xla"
    target = LoadedModel("tiny", transformer.model(TARGET), random_weights(TARGET), config=TARGET)
    random_head(config, jax.random.key(0)).save(tmp_path, target)
    assert spec_jax.load_draft(tmp_path, target).config.layer.attention == "auto"
    modules = MtpConfig.of_target(dataclasses.replace(TARGET, attention="xla"))
    random_head(modules, jax.random.key(0)).save(tmp_path / "mtp", target)


def test_weights_are_stored_in_the_dtype_asked_for(tmp_path):
    for dtype in ("bfloat16", "float16"):
        hf = write(tmp_path, EAGLE_3, "EAGLE-3", dtype=dtype)
        stored = load_file(tmp_path / "model.safetensors")
        kinds = {n: x.dtype.name for n, x in stored.items()}
        assert (kinds.pop("d2t"), kinds.pop("t2d")) == ("int64", "bool")
        assert set(kinds.values()) == {dtype} and hf["dtype"] == hf["torch_dtype"] == dtype
    np.testing.assert_array_equal(stored["d2t"] + np.arange(U), IDS)
    np.testing.assert_array_equal(stored["t2d"], MASK)


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
        assert write(tmp_path, make(format, norm_output=True), format)["norm_output"] is True


def test_an_embedding_is_written_where_loaders_take_it_from_the_file(tmp_path):
    def has_embed(format, **options):
        write(tmp_path, make(format), format, **options)
        return "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")

    for format in ("EAGLE-1", "EAGLE-3"):
        assert not has_embed(format) and has_embed(format, target_embed=EMBED)
        assert not read_head(tmp_path, TARGET, target_embed=EMBED).config.own_embed
    assert not has_embed("SpecForge", target_embed=EMBED)
    assert has_embed("speculators")
    with pytest.raises(ConfigError, match="target_embed is None; speculators"):
        has_embed("speculators", target_embed=None)
    with pytest.raises(WeightsError, match=r"target_embed has shape \[31, 8\].*\[31, 16\]"):
        has_embed("EAGLE-1", target_embed=EMBED[:, :8])


def test_speculators_config_names_the_verifier_and_the_drafts(tmp_path):
    hf = write(tmp_path, EAGLE_3, "speculators", num_speculative_tokens=5)
    stated = hf["speculators_config"]
    verifier = {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    assert stated["verifier"] == verifier and stated["algorithm"] == "eagle3"
    assert stated["proposal_methods"][0]["speculative_tokens"] == 5
    for options, message in (
        (dict(verifier=None), "verifier is None; expected the target's name"),
        (dict(num_speculative_tokens=0), "num_speculative_tokens is 0; expected 1 or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            write(tmp_path, EAGLE_3, "speculators", **options)


INVALID_FORMATS = [
    ("eagle", EAGLE_3, "format is 'eagle'; known: EAGLE-1, SpecForge, EAGLE-3, speculators"),
    ("EAGLE-3", EAGLE_1, "EAGLE-3 is for heads of version 3; this one is of 1"),
    ("EAGLE-1", EAGLE_3, "EAGLE-1 is for heads of version 1; this one is of 3"),
    ("EAGLE-1", make("EAGLE-1", taps=(4,)), r"taps is \(4,\); in the format .* as \(9,\)"),
    ("EAGLE-3", make("EAGLE-3", taps=(2, L + 1)), r"\(2, 9\) hold 9, the state after the"),
    ("EAGLE-3", make("EAGLE-3", taps=(2, L + 2)), r"taps \(2, 10\) do not exist"),
    ("EAGLE-3", make("EAGLE-3", layer=QWEN3), "layer.model_type is 'qwen3'; .* as 'llama'"),
    ("speculators", make("EAGLE-3", layer=QWEN2), "llama and qwen3, not 'qwen2'"),
    ("speculators", make("EAGLE-3", fc_bias=True), "fc_bias is True; .* as False"),
    ("SpecForge", make("EAGLE-3", taps=(1, 3, 7)), r"is \(1, 3, 7\); .* as \(2, 4, 8\)"),
    ("SpecForge", make("EAGLE-3", layer=BIASED), "biases, which SGLang leaves out"),
    ("SpecForge", make("EAGLE-3", layer=QWEN2), "biases, which SGLang leaves out"),
    ("SpecForge", make("EAGLE-3", own_embed=True), "own_embed is True, which SGLang ignores"),
    ("EAGLE-3", make("EAGLE-3", target_vocab_size=40), "vocabulary 40; this one has 31"),
]


@pytest.mark.parametrize(("format", "config", "message"), INVALID_FORMATS)
def test_what_a_format_cannot_express_is_refused(tmp_path, format, config, message):
    with pytest.raises(ConfigError, match=message):
        write(tmp_path, config, format)
    assert not list(tmp_path.iterdir())


def test_the_default_format_is_the_first_that_can_express_the_head(tmp_path):
    target = LoadedModel("tiny", transformer.model(TARGET), random_weights(TARGET), config=TARGET)

    def save(config):
        LoadedHead("head", config, params_of(config)).save(tmp_path, target)
        return spec_jax.load_head(tmp_path, target).format

    assert save(EAGLE_1) == "EAGLE-1" and save(EAGLE_3) == "SpecForge"
    assert save(make("EAGLE-3", taps=(1, 3, 7))) == "EAGLE-3"
    assert save(make("EAGLE-3", layer=QWEN3)) == "speculators"
    message = "no format can express this config: SpecForge: .*'qwen3'.*; speculators: fc_bias is"
    with pytest.raises(ConfigError, match=message):
        save(make("EAGLE-3", layer=QWEN3, fc_bias=True))


def test_weights_that_are_not_the_configs_are_refused(tmp_path):
    params = params_of(EAGLE_3)
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
        write(tmp_path, make("EAGLE-3", fc_norm=True), "EAGLE-3")
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


INVALID_KEYS = [
    ("taps", 3, "taps is 3 in config.json; expected a list"),
    ("taps", [2, "4"], "do not exist"),
    ("own_embed", "yes", "own_embed is 'yes'; expected true or false"),
]


@pytest.mark.parametrize(("key", "value", "message"), INVALID_KEYS)
def test_our_own_keys_are_checked_when_they_are_read(tmp_path, key, value, message):
    hf = write(tmp_path, EAGLE_3, "EAGLE-3")
    (tmp_path / "config.json").write_text(json.dumps(hf | {key: value}))
    with pytest.raises(ConfigError, match=message):
        read_head(tmp_path, TARGET)
