"""A family that is registered from outside of the package is a family like any other."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from support.files import experiment_files, head_training
from support.gated_family import GatedConfig
from support.tiny_models import LLAMA, TINY, random_weights

from configs import evaluate_zoo
from experiments import evaluate, train_head
from spec_jax.errors import ConfigError
from spec_jax.models import transformer
from spec_jax.models.checkpoint import load_pretrained, save_pretrained
from spec_jax.models.families import Family, family_of, register

GATED = GatedConfig(**TINY, num_attention_heads=4, num_key_value_heads=2)
TOKENS = np.asarray([[3, 1, 4, 1, 5]])


@pytest.fixture
def directory(tmp_path) -> pathlib.Path:
    save_pretrained(tmp_path / "target", random_weights(GATED), GATED)
    return tmp_path / "target"


def test_it_loads_and_is_exported(directory, tmp_path):
    params, config = load_pretrained(directory)
    assert config == GATED
    jax.tree.map(np.testing.assert_array_equal, params, random_weights(GATED))
    save_pretrained(tmp_path, params, config)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (directory / name).read_bytes()
    stacked, config = load_pretrained(tmp_path, scan_layers=True)
    expected = transformer.logits(params, TOKENS, config=GATED)
    np.testing.assert_allclose(
        transformer.logits(stacked, TOKENS, config=config), expected, atol=1e-5
    )
    # Its layer is what runs.
    half = {**params["layers"]["1"], "alpha": params["layers"]["1"]["alpha"] / 2}
    changed = {**params, "layers": {**params["layers"], "1": half}}
    other = transformer.logits(changed, TOKENS, config=GATED)
    assert np.abs(expected - other).max() > 1e-3


def test_a_family_whose_layers_cannot_be_scanned_is_not_stacked(directory, monkeypatch):
    apart = lambda config: family_of(config)._replace(can_scan=False)
    monkeypatch.setattr("spec_jax.models.checkpoint.family_of", apart)
    with pytest.raises(ConfigError, match="never stacked"):
        load_pretrained(directory, scan_layers=True)


@pytest.mark.exhaustive
def test_heads_are_trained_for_it_evaluated_and_exported(tmp_path):
    """By the experiments, as for any other target."""
    experiment_files(tmp_path, GATED)
    train_head.train(head_training(tmp_path, "mtp"), tmp_path / "run")
    export = str(tmp_path / "run" / "export")
    config = evaluate_zoo.get_config()
    config.target, config.drafts = str(tmp_path / "target"), export
    config.data = str(tmp_path / "prompts.jsonl")
    config.update({"num_prompts": 3, "max_new_tokens": 8, "ks": (2,), "batches": (1,)})
    _, row = evaluate.evaluate(config, str(tmp_path / "evaluation"))["results"]
    assert row["method"] == "run" and row["tau"] >= 1 and row["identical_to_plain"]


def test_a_model_type_is_read_by_one_family():
    other = dataclasses.make_dataclass("Other", ["vocab_size"], frozen=True)
    with pytest.raises(ConfigError, match="model_type llama, .* is read by ModelConfig"):
        register(family_of(LLAMA)._replace(config=other))
    with pytest.raises(ConfigError, match="Other is the config of no registered family; known: "):
        family_of(other(31))
    with pytest.raises(ConfigError, match="GatedConfig has mtp_formats, so its recycles_normed"):
        register(family_of(GATED)._replace(recycles_normed=None))
    register(family_of(GATED))  # again, as a notebook's cell that is run twice does
    assert isinstance(family_of(GATED), Family)
