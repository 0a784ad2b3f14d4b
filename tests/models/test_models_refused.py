"""What is refused of models: configs by family, then calls, each by the words that matter."""

import json
from dataclasses import replace

import pytest
from support.tiny_models import (
    BAMBA,
    DEEPSEEK,
    DEEPSEEK_TARGET,
    GLM4_MOE,
    LLAMA,
    MAMBA2,
    MISTRAL,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_NEXT_TARGET,
    QWEN35,
    QWEN35_MOE,
)

from spec_jax import decoding
from spec_jax.decoding import System
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.drafters.standalone.model import standalone
from spec_jax.errors import ConfigError
from spec_jax.loading import load_draft, load_model
from spec_jax.models import transformer
from spec_jax.models.config import RopeConfig
from spec_jax.rules import GREEDY

FP8 = {"quant_method": "fp8"}
LATE = dict(use_sliding_window=True, max_window_layers=1, sliding_window=8)
SHORT = dict(use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"])
CONFIGS = {
    LLAMA: [
        (dict(model_type="rwkv"), "rwkv"),
        (dict(hidden_act="gelu"), "gelu"),
        (dict(num_key_value_heads=3), "num_key_value_heads 3"),
        (dict(head_dim=5), "head_dim 5"),
        (dict(head_dim=None, num_attention_heads=3, num_key_value_heads=3), "hidden_size 16"),
        (LATE, "layers of model_type 'llama' with a sliding window are not supported"),
        (LATE | dict(model_type="qwen2", sliding_window=None), "sliding_window is None; expected"),
        (LATE | dict(model_type="qwen2", max_window_layers="1"), "max_window_layers is '1'"),
        (dict(model_type="qwen2", layer_types=["sliding_attention"] * 2), "sliding_window is not"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "'llama' with a sliding"),
        (dict(layer_types=["linear_attention"] * 2, sliding_window=1 << 20), "linear_attention"),
        (dict(model_type="mistral", sliding_window=0), "sliding_window is 0; expected a positive"),
        (dict(model_type="qwen3", **SHORT), "names 1 layers; expected num_hidden_layers, .* 2"),
        (dict(model_type="qwen3", **SHORT | dict(layer_types=[])), "layer_types names 0 layers"),
        (dict(model_type="qwen3", **SHORT | dict(sliding_window=1 << 20)), "names 1 layers"),
        (dict(layer_types=["full_attention"] * 3), "layer_types names 3 layers"),
        (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)), "dynamic"),
        (dict(rope_parameters=dict(rope_type="longrope", long_factor=[1])), "long_factor"),
        (dict(rope_parameters=dict(rope_type="linear")), "needs a factor"),
        (dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5)), "partial_rotary"),
        (dict(rope_parameters=dict(rope_type=None, rope_theta=1e4)), "rope_type None .* default,"),
        (dict(quantization_config=FP8), "fp8.*without weight_block_size.*remove quantization_c"),
        (dict(quantization_config={"quant_method": "gptq", "bits": 4}), "gptq"),
        (dict(quantization_config={"load_in_4bit": True}), "a method that it does not name"),
        (dict(compression_config={"format": "pack-quantized"}), "pack-quantized.*remove compress"),
    ],
    DEEPSEEK_TARGET: [
        (dict(intermediate_size=None), "intermediate_size is None; expected a positive integer"),
        (dict(scoring_func="softmax"), "scoring_func 'softmax' is not supported"),
        (dict(topk_method="greedy"), "topk_method 'greedy' is not supported"),
        (dict(moe_layer_freq=2), "moe_layer_freq 2 is not supported"),
        (dict(mlp_layer_types=["sparse", "dense"]), "expected dense layers, then sparse ones"),
        (dict(num_hidden_layers=9, mlp_layer_types=["dense"]), r"types is \['dense'\]; expected"),
        (dict(n_group=4), "n_routed_experts 6 cannot be split into n_group 4"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported; expected 1"),
        (dict(model_type="deepseek_v32", index_topk=2048), "'deepseek_v32' is not supported"),
    ],
    GLM4_MOE: [
        (dict(n_shared_experts=0), "n_shared_experts is 0; expected a positive integer"),
        (dict(topk_group=1, num_experts_per_tok=3), "num_experts_per_tok is 3; the 1 groups kept"),
        (dict(scoring_func="softmax"), "'softmax' is not supported; expected 'sigmoid'"),
        (dict(num_key_value_heads=3), "4 is not a multiple of num_key_value_heads 3"),
        (dict(head_dim=None, hidden_size=18), "18 is not a multiple of num_attention_heads 4"),
    ],
    QWEN35: [
        (dict(linear_num_value_heads=3), "linear_num_value_heads 3 is not .*_key_heads 2"),
        (dict(layer_types=["linear_attention"]), "layer_types is .*for each of 2 layers"),
        (dict(layer_types=["sliding_attention"] * 2), "expected linear_attention or full_attent"),
        (dict(attn_output_gate=False), "attn_output_gate False is not supported; expected True"),
        (dict(output_gate_type="sigmoid"), "output_gate_type 'sigmoid' is not supported"),
        (dict(layer_types=None, full_attention_interval=3), "full_attention_interval is 3 without"),
    ],
    QWEN35_MOE: [
        (dict(num_experts=1), "num_experts_per_tok is 2 of 1 experts"),
        (dict(num_experts=None), "num_experts is missing"),
    ],
    QWEN3_NEXT_TARGET: [
        (dict(linear_key_head_dim=None), "linear_key_head_dim is None; expected a positive"),
        (dict(decoder_sparse_step=2), "decoder_sparse_step 2 is not supported"),
        (dict(num_experts_per_tok=9), "num_experts_per_tok is 9 of 4 experts"),
    ],
    QWEN3_MOE: [
        (dict(decoder_sparse_step=2), "decoder_sparse_step 2 is not supported; expected 1"),
        (dict(mlp_only_layers=[0]), r"mlp_only_layers \[0\] is not supported"),
        (dict(num_experts=None), "num_experts is missing"),
    ],
    MAMBA2: [
        (dict(head_dim=7), "num_heads 4 of head_dim 7 make 28; expand 2 of hidden_size 16"),
        (dict(n_groups=3), "4 heads do not divide into 3 groups"),
        (dict(time_step_limit=(0.5, 0.1)), "two numbers, ascending from 0"),
        (dict(time_step_limit=0.5), "time_step_limit is 0.5; expected two numbers"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    ],
    BAMBA: [
        (dict(attn_layer_indices=(1, 3)), r"attn_layer_indices is \[1, 3\]; expected some"),
        (dict(attn_layer_indices=()), "expected some of the layers 0 to 2, and not all"),
        (dict(mamba_d_head=5), "mamba_n_heads 4 of 5 make 20; mamba_expand 2"),
        (dict(num_attention_heads=3), "num_attention_heads 3 must divide hidden_size 16"),
        (dict(rope_parameters={"partial_rotary_factor": 0.3}), "1 of 4 dimensions; expected an ev"),
    ],
}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.to_hf()["model_type"])
def test_a_config_that_is_not_read_is_refused_by_name(tmp_path, config):
    for changes, words in CONFIGS[config]:
        (tmp_path / "config.json").write_text(json.dumps(config.to_hf() | changes))
        with pytest.raises(ConfigError, match=words):
            load_model(tmp_path)


MIXED = ("full_attention", "sliding_attention")
STUCK = transformer.model(MAMBA2)._replace(can_rewind=False)
CALLS = [
    (lambda: load_model("zoo/target", attention="flash"), "auto, xla"),
    (lambda: draft("zoo/draft"), "attention 'flash' is not .*; known: auto"),
    (lambda: draft("zoo/eagle3"), "attention 'flash' is not .*; known: auto"),
    (lambda: transformer.model(LLAMA, (0, -1, 3, 4)), r"taps \[-1, 4\].*0 to 3"),
    (lambda: RopeConfig("yarn", factor=2.0), "original_max_position"),
    (lambda: EagleConfig.of_target(MAMBA2), "has none to copy"),
    (lambda: standalone(STUCK), "cannot rewind"),
    (lambda: decoding.propose(*[None] * 3, System(STUCK, NO_DRAFT, GREEDY, 2)), "and K is 2"),
    (lambda: replace(QWEN3_MOE, sliding_window=9), "'qwen3_moe' with a sliding window are not"),
    (lambda: replace(MISTRAL, layer_types=MIXED).to_hf(), "in which all layers have it"),
    (lambda: replace(MISTRAL, attention_bias=True).to_hf(), "none has biases"),
    (lambda: replace(DEEPSEEK, q_lora_rank=-1), "q_lora_rank is -1"),
    (lambda: replace(DEEPSEEK, qk_rope_head_dim=3), "qk_rope_head_dim 3 is odd"),
    (lambda: replace(DEEPSEEK, topk_group=5), "of which topk_group 5 are kept"),
    (lambda: replace(DEEPSEEK, num_experts_per_tok=5), "is 5; the 2 groups kept have 4"),
    (lambda: replace(QWEN3_NEXT, partial_rotary_factor=0.4), "turns 3 of 8 dimensions"),
    (lambda: replace(QWEN3_NEXT, partial_rotary_factor=1.5), "turns 12 of 8 dimensions"),
]


def draft(name):
    return load_draft(name, load_model("zoo/target"), attention="flash")


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[row[-1] for row in CALLS])
def test_a_call_that_cannot_be_is_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
