"""Heads written in the formats of other projects: read back bit for bit, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.any_head import any_head
from support.published_heads import IDS, LAYER, MODEL, SMALL, TAPS, TARGET, D, U, V

import spec_jax
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.loading import LoadedHead, random_head
from spec_jax.models import tensors

L = TARGET.num_hidden_layers
EAGLE_1 = EagleConfig(1, LAYER, D, V, (L + 1,))
EAGLE_3 = EagleConfig(3, SMALL, D, V, TAPS)
FORMATS = {"EAGLE-1": EAGLE_1, "EAGLE-3": EAGLE_3, "SpecForge": EAGLE_3, "speculators": EAGLE_3}


def make(format, **change):
    return dataclasses.replace(FORMATS[format], **change)


def params_of(config):
    return any_head(config).params


def write(directory, config, format, params=None, **options):
    params = params_of(config) if params is None else params
    LoadedHead("head", config, params).save(directory, MODEL, format=format, **options)
    return json.loads((directory / "config.json").read_text())


def test_how_caches_are_read_is_left_out(tmp_path):
    """It is the caller's choice, and no format states it."""
    config = EagleConfig.of_target(dataclasses.replace(TARGET, attention="xla"), 3)
    assert config.layer.attention == "xla"
    random_head(config, jax.random.key(0)).save(tmp_path, MODEL)
    assert spec_jax.load_draft(tmp_path, MODEL).config.layer.attention == "auto"
    modules = MtpConfig.of_target(dataclasses.replace(TARGET, attention="xla"))
    random_head(modules, jax.random.key(0)).save(tmp_path / "mtp", MODEL)


def test_weights_are_stored_in_the_dtype_asked_for(tmp_path):
    for dtype in ("bfloat16", "float16"):
        hf = write(tmp_path, EAGLE_3, "EAGLE-3", dtype=dtype)
        stored = load_file(tmp_path / "model.safetensors")
        kinds = {n: x.dtype.name for n, x in stored.items()}
        assert (kinds.pop("d2t"), kinds.pop("t2d")) == ("int64", "bool")
        assert set(kinds.values()) == {dtype} and hf["dtype"] == hf["torch_dtype"] == dtype
    ids = stored["d2t"] + np.arange(U)
    np.testing.assert_array_equal(stored["d2t"], params_of(EAGLE_3)["d2t"])
    np.testing.assert_array_equal(stored["t2d"], np.isin(np.arange(V), ids))


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
    for format in FORMATS:
        write(tmp_path, make(format), format)
        has_embed = "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
        assert has_embed == (format == "speculators")


def test_speculators_config_names_the_verifier_and_the_drafts(tmp_path):
    hf = write(tmp_path, EAGLE_3, "speculators", num_speculative_tokens=5)
    stated = hf["speculators_config"]
    verifier = {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    assert stated["verifier"] == verifier and stated["algorithm"] == "eagle3"
    assert stated["proposal_methods"][0]["speculative_tokens"] == 5
    with pytest.raises(ConfigError, match="num_speculative_tokens is 0; expected 1 or more"):
        write(tmp_path, EAGLE_3, "speculators", num_speculative_tokens=0)
    with pytest.raises(ConfigError, match="name is None; expected its name or path"):
        target = dataclasses.replace(MODEL, name=None)
        LoadedHead("head", EAGLE_3, params_of(EAGLE_3)).save(tmp_path, target, format="speculators")


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
    ("taps", [2, "4"], "expected integers of 0 or more"),
    ("own_embed", "yes", "own_embed is 'yes'; expected true or false"),
]


@pytest.mark.parametrize(("key", "value", "message"), INVALID_KEYS)
def test_our_own_keys_are_checked_when_they_are_read(tmp_path, key, value, message):
    hf = write(tmp_path, EAGLE_3, "EAGLE-3")
    (tmp_path / "config.json").write_text(json.dumps(hf | {key: value}))
    with pytest.raises(ConfigError, match=message):
        spec_jax.load_head(tmp_path, MODEL)
