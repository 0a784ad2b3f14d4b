"""The registry of kinds: what a directory holds, and what is refused."""

import dataclasses

import numpy as np
import pytest
from support.block_drafts import TARGET
from support.published_heads import CONFIG, EAGLE_3, HEADS, SPECULATORS, tensors_of, write
from support.tiny_models import MAMBA2

from spec_jax import SpeculativeDecoder
from spec_jax.config import SpeculativeConfig
from spec_jax.drafters import registry
from spec_jax.errors import ConfigError
from spec_jax.loading import load_draft, load_model

DFLASH_LAYER = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.q_norm.weight",
    "mlp.gate_proj.weight",
)


def zeros(*names):
    return {name: np.zeros((2, 2), np.float32) for name in names}


def dflash(num_layers):
    layers = [f"layers.{i}.{name}" for i in range(num_layers) for name in DFLASH_LAYER]
    return zeros("fc.weight", "hidden_norm.weight", "norm.weight", *layers)


EAGLE_3_TENSORS = tensors_of(HEADS["eagle-3"][1])
OF_SPECULATORS = dict(
    SPECULATORS, speculators_model_type="dflash", architectures=["DFlashSpeculator"]
)
JOINED = zeros("fc.weight", *(f"layers.0.{name}" for name in DFLASH_LAYER))
OTHERS = {
    "DFlash of one layer, as its tensors say": (CONFIG, dflash(1)),
    "DFlash of speculators": (OF_SPECULATORS, JOINED),
    "P-EAGLE, says config.json alone": (
        {**EAGLE_3, "parallel_drafting": True, "ptd_token_id": 0},
        EAGLE_3_TENSORS,
    ),
    "several layers": (EAGLE_3, EAGLE_3_TENSORS | zeros("layers.1.mlp.up_proj.weight")),
}


def test_a_head_with_a_masked_state_is_told_apart_from_an_eagle_head(tmp_path):
    """Whatever config.json says, and whatever its first layer is called."""
    for i, hf in enumerate((EAGLE_3, {**EAGLE_3, "parallel_drafting": True, "pard_token": 0})):
        (tmp_path / str(i)).mkdir()
        directory = write(tmp_path / str(i), hf, EAGLE_3_TENSORS | zeros("mask_hidden"))
        assert registry.detect(directory).name == "peagle"


@pytest.mark.parametrize("name", OTHERS)
def test_fc_weight_alone_makes_no_eagle_head(tmp_path, name):
    config, tensors = OTHERS[name]
    directory = write(tmp_path, config, tensors)
    message = "holds no known kind of draft: .*known kinds: standalone, eagle, peagle, mtp"
    with pytest.raises(ConfigError, match=message) as error:
        load_draft(directory, TARGET)
    assert str(config.get("architectures", CONFIG["model_type"])) in str(error.value)
    assert "fc.weight" in str(error.value)


HF_CONFIGS = [
    ({"num_hidden_layers": 2}, {"model.embed_tokens.weight"}, "standalone"),
    (MAMBA2.to_hf(), {"backbone.embeddings.weight"}, "standalone"),
    ({"num_hidden_layers": 2}, {"model.embed_tokens.weight", "mtp.fc.weight"}, "standalone"),
    ({"num_hidden_layers": 2}, {"mtp.fc.weight"}, "mtp"),
    ({"num_hidden_layers": 2}, {"model.mtp_layers.0.input_proj.weight"}, "mtp"),
    ({"num_hidden_layers": 2}, {"model.layers.2.eh_proj.weight"}, "mtp"),
    ({"num_hidden_layers": 2}, {"model.layers.1.mlp.up_proj.weight"}, None),
    ({}, {"model.layers.2.eh_proj.weight"}, None),
    ({"mask_token_id": 0}, {"fc.weight", "midlayer.mlp.up_proj.weight"}, None),
]


@pytest.mark.parametrize(("hf", "names", "kind"), HF_CONFIGS)
def test_config_and_tensors_decide_together(tmp_path, hf, names, kind):
    directory = write(tmp_path, hf, zeros(*names))
    if kind is None:
        with pytest.raises(ConfigError, match="no known kind of draft"):
            registry.detect(directory)
    else:
        assert registry.detect(directory).name == kind


def test_a_kind_that_takes_what_another_has_is_refused():
    eagle = registry.find("eagle")
    other = dataclasses.replace(eagle.head, config_class=dict)
    with pytest.raises(ConfigError, match="'mine' has the config class of 'eagle', EagleConfig"):
        registry.register(dataclasses.replace(eagle, name="mine"))
    with pytest.raises(ConfigError, match="'mine' has objectives of 'eagle': eagle1, eagle3"):
        registry.register(dataclasses.replace(eagle, name="mine", head=other))
    assert registry.register(eagle) is registry.find("eagle")


def test_a_model_drafts_under_the_name_of_its_kind():
    standalone = registry.find("standalone")
    registry.register(dataclasses.replace(standalone, name="mine", format=registry.DraftFormat()))
    try:
        target = load_model("zoo/draft")
        draft = load_draft("zoo/draft", target, method="mine")
        decoder = SpeculativeDecoder(target, draft, SpeculativeConfig("mine"))
        assert decoder.config.speculative_method == "mine"
        with pytest.raises(ConfigError, match="is a model; taps is for heads"):
            load_draft("zoo/draft", target, taps=(1,))
    finally:
        registry.unregister("mine")
