"""Agreement with transformers on torch: logits, checkpoints, greedy text, processors."""

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from needs import torch, transformers
from safetensors.numpy import load_file
from support import published_configs as sizes
from support.tiny_models import (
    FAMILIES,
    LLAMA,
    SPARSE_FAMILIES,
    STATE_FAMILIES,
    random_tensor,
    random_weights,
)

from spec_jax.models import transformer
from spec_jax.models.checkpoint import load_pretrained, save_pretrained
from spec_jax.models.families import family_of_type
from spec_jax.models.params import declared
from spec_jax.models.tensors import expert_places
from spec_jax.models.tokenizer import Tokenizer

ROPES = {
    "default": {},
    "linear": dict(factor=2.5),
    "yarn": dict(factor=4.0, original_max_position_embeddings=32),
}
ROPES["llama3"] = dict(ROPES["yarn"], factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
ROPES["yarn, all"] = ROPES["yarn"] | dict(beta_fast=16.0, beta_slow=2.0, mscale=0.7)
ROPES["yarn, all"] |= dict(mscale_all_dim=1.2, truncate=False)
whole = jax.jit(transformer.logits, static_argnames="config")


def random_config(family: str, rope: str):
    """A transformers config; every choice that is left open is drawn."""
    draw = random.Random(f"{family} {rope}")
    heads = draw.choice([2, 4, 6])
    values = dict(vocab_size=draw.choice([29, 64]), hidden_size=draw.choice([4, 8]) * heads)
    values |= dict(
        intermediate_size=draw.choice([20, 36]), num_hidden_layers=draw.choice([1, 2, 3])
    )
    dividers = [n for n in (1, 2, 3, 4, 6) if heads % n == 0]
    values |= dict(num_attention_heads=heads, num_key_value_heads=draw.choice(dividers))
    values |= dict(max_position_embeddings=128, rms_norm_eps=draw.choice([1e-5, 1e-3]))
    values |= dict(tie_word_embeddings=draw.random() < 0.5)
    kind, theta = rope.split(",")[0], draw.choice([500.0, 10000.0])
    values |= dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **ROPES[rope]))
    if family != "Qwen2" and draw.random() < 0.6 or family == "Qwen3":
        values["head_dim"] = draw.choice([4, 6, 8])
    if family != "Qwen2":
        values["attention_bias"] = draw.random() < 0.5
    if family == "Llama":
        values["mlp_bias"] = draw.random() < 0.5
    return getattr(transformers, f"{family}Config")(**values)


def kind_of(config) -> str:
    return getattr(config, "model_type", type(config).__name__)


def torch_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(np.array(tokens)).long()).logits.numpy()


def random_tokens(vocab_size):
    return np.random.RandomState(1).randint(0, vocab_size, (2, 48))


def drawn(directory, family, config):
    """A model of a transformers config as loaded from its directory, and theirs."""
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    has_centred = family.startswith(("Qwen3_5", "Qwen3Next"))
    is_centred = lambda name: has_centred and name.endswith("norm.weight")
    with torch.no_grad():
        for name, weight in model.state_dict().items():  # a router's bias is no parameter
            weight.copy_(torch.from_numpy(random_tensor(name, tuple(weight.shape), 0)))
            if is_centred(name) and "linear_attn" not in name:
                weight -= 1  # a factor near one, as in the others
    model.save_pretrained(directory)
    return *load_pretrained(directory), model


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_logits_agree_for_random_configurations(tmp_path, family, rope):
    config = random_config(family, rope)
    params, own, model = drawn(tmp_path, family, config)
    tokens = random_tokens(config.vocab_size)
    expected = torch_logits(model, tokens)
    assert np.abs(expected).max() > 0.5  # an error would show
    np.testing.assert_allclose(whole(params, tokens, config=own), expected, atol=1e-4)
    taps = (*range(own.num_hidden_layers), own.num_hidden_layers + 1)  # its last state is normed
    features = transformer.model(own, taps).forward(params, jnp.asarray(tokens)).features
    with torch.no_grad():
        states = model(torch.from_numpy(tokens).long(), output_hidden_states=True).hidden_states
    np.testing.assert_allclose(features, torch.cat(states, dim=-1).numpy(), atol=2e-4)


def test_the_original_length_at_the_top_decides(tmp_path):
    """Without a word: this file's YaRN has another inside, with which the logits differ."""
    yarn = dict(rope_type="yarn", rope_theta=500.0, **ROPES["yarn"])
    options = dict(vocab_size=29, hidden_size=16, intermediate_size=20, num_hidden_layers=2)
    options |= dict(num_attention_heads=2, max_position_embeddings=128, rope_parameters=yarn)
    drawn(tmp_path, "Llama", transformers.LlamaConfig(**options))
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"original_max_position_embeddings": 16})
    )
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    params, own = load_pretrained(tmp_path)
    tokens = random_tokens(own.vocab_size)
    expected = torch_logits(model, tokens)
    np.testing.assert_allclose(whole(params, tokens, config=own), expected, atol=1e-4)
    inner = dataclasses.replace(own.rope, original_max_position_embeddings=32)
    other = whole(params, tokens, config=dataclasses.replace(own, rope=inner))
    assert np.abs(other - expected).max() > 1e-2


def test_of_one_file_and_shards_the_same_one_is_read(tmp_path):
    shapes = dict(max_shard_bytes=3000)
    save_pretrained(tmp_path, jax.tree.map(lambda x: x + 1, random_weights(LLAMA)), LLAMA, **shapes)
    index = (tmp_path / "model.safetensors.index.json").read_bytes()
    save_pretrained(tmp_path, random_weights(LLAMA), LLAMA)
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    embed = load_pretrained(tmp_path)[0]["embed"]
    np.testing.assert_array_equal(embed, model.get_input_embeddings().weight.detach().numpy())


SIZES = dict(vocab_size=31, hidden_size=16)
MISTRAL = dict(intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, head_dim=6)
MISTRAL |= dict(num_key_value_heads=2, max_position_embeddings=256)
QWEN2 = {name: x for name, x in MISTRAL.items() if name != "head_dim"}
QWEN2 |= dict(use_sliding_window=True, sliding_window=30)
MIXED = ["sliding_attention", "full_attention"]
MAMBA2 = dict(num_hidden_layers=2, num_heads=4, head_dim=8, state_size=6, n_groups=1)
MAMBA2 |= dict(conv_kernel=3, use_conv_bias=False, use_bias=True, residual_in_fp32=False)
MAMBA2 |= dict(time_step_limit=(0.6, 0.9), tie_word_embeddings=True)
HALF = dict(rope_type="linear", factor=2.0, rope_theta=500.0, partial_rotary_factor=1.0)
BAMBA = dict(intermediate_size=24, num_hidden_layers=3, num_attention_heads=4)
BAMBA |= dict(num_key_value_heads=2, attn_layer_indices=[0, 2], mamba_n_heads=4, mamba_d_state=6)
BAMBA |= dict(mamba_n_groups=2, mamba_conv_bias=False, mamba_proj_bias=True, mlp_bias=True)
BAMBA |= dict(attention_bias=True, tie_word_embeddings=True, rope_parameters=HALF)
BAMBA |= dict(time_step_limit=[0.1, 0.7])
PART = dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5)
DELTA = dict(intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
DELTA |= dict(num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=6)
DELTA |= dict(linear_key_head_dim=5, linear_value_head_dim=7, rope_parameters=PART)
DELTA |= dict(layer_types=["linear_attention", "full_attention"])
ODD_DELTA = dict(DELTA, layer_types=["full_attention", "linear_attention"], attention_bias=True)
ODD_DELTA |= dict(linear_conv_kernel_dim=3, tie_word_embeddings=True, rms_norm_eps=1e-3)
ODD_DELTA |= dict(linear_num_key_heads=3, linear_num_value_heads=3)
NEXT = dict(DELTA, num_experts=11, num_experts_per_tok=3, moe_intermediate_size=8)
NEXT |= dict(shared_expert_intermediate_size=12, norm_topk_prob=False, linear_conv_kernel_dim=3)
NEXT |= dict(linear_num_key_heads=3, linear_num_value_heads=3, tie_word_embeddings=True)
del NEXT["intermediate_size"]
EXPERTS = dict(intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, head_dim=6)
EXPERTS |= dict(num_key_value_heads=2, num_experts=5, num_experts_per_tok=5)
EXPERTS |= dict(moe_intermediate_size=8, norm_topk_prob=False)
EXPERTS |= dict(attention_bias=True, tie_word_embeddings=True)
LATENT = dict(num_hidden_layers=2, intermediate_size=20, num_attention_heads=4, kv_lora_rank=7)
LATENT |= dict(qk_nope_head_dim=6, qk_rope_head_dim=4, num_key_value_heads=4)
LATENT |= dict(n_routed_experts=12, moe_intermediate_size=8)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=32)
YARN |= dict(mscale=0.7, mscale_all_dim=1.2)
DEEPSEEK = dict(LATENT, q_lora_rank=None, v_head_dim=11, rope_parameters=YARN, n_group=1)
DEEPSEEK |= dict(topk_group=1, norm_topk_prob=False, n_shared_experts=2, attention_bias=True)
DEEPSEEK |= dict(num_experts_per_tok=1, first_k_dense_replace=1, tie_word_embeddings=True)
GLM_LATENT = dict(LATENT, q_lora_rank=9, v_head_dim=5, n_group=4, topk_group=2)
GLM_LATENT |= dict(num_experts_per_tok=3, mlp_layer_types=["dense", "sparse"], rms_norm_eps=1e-3)
GLM = dict(intermediate_size=20, num_hidden_layers=3, num_attention_heads=4, head_dim=8)
GLM |= dict(num_key_value_heads=2, moe_intermediate_size=8, n_routed_experts=9, n_group=1)
GLM |= dict(topk_group=1, num_experts_per_tok=3, n_shared_experts=1, first_k_dense_replace=2)
GLM |= dict(routed_scaling_factor=2.5, use_qk_norm=False, norm_topk_prob=False)
GLM |= dict(tie_word_embeddings=True, rope_parameters=dict(PART, partial_rotary_factor=0.25))
# Unlike those of ``record.py``, and of more tokens than one chunk has.
OTHER_FAMILIES = {
    "no window": ("Mistral", dict(MISTRAL, sliding_window=None)),
    "a window no shorter than a text": ("Mistral", dict(MISTRAL, sliding_window=256)),
    "a window": ("Mistral", dict(MISTRAL, sliding_window=9)),
    "a window, and kinds that are not read": (
        "Mistral",
        dict(MISTRAL, sliding_window=9, layer_types=MIXED),
    ),
    "a window of more than a block": ("Mistral", dict(MISTRAL, sliding_window=66)),
    "a late window": ("Qwen2", dict(QWEN2, max_window_layers=1)),
    "mixed windows": ("Qwen3", dict(QWEN2, head_dim=6, layer_types=MIXED)),
    "mamba": ("Mamba2", MAMBA2),
    "hybrid": ("Bamba", BAMBA),
    "delta": ("Qwen3_5", ODD_DELTA),
    "delta by key head, experts": ("Qwen3Next", NEXT),
    "experts": ("Qwen3Moe", EXPERTS),
    "latents, one expert, yarn": ("DeepseekV3", DEEPSEEK),
    "latents as GLM has them": ("Glm4MoeLite", GLM_LATENT),
    "experts without groups": ("Glm4Moe", GLM),
}
CONFIGS = {"Qwen3_5": "Qwen3_5TextConfig"}  # others: name and Config


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_logits_of_other_families_agree_beyond_one_chunk(tmp_path, name):
    family, options = OTHER_FAMILIES[name]
    name = CONFIGS.get(family, f"{family}Config")
    config = getattr(transformers, name)(**SIZES, **options)
    params, own, model = drawn(tmp_path, family, config)
    tokens = np.random.RandomState(1).randint(0, own.vocab_size, (2, 150))
    expected = torch_logits(model, tokens)
    assert np.abs(expected).max() > 0.5  # an error would show
    np.testing.assert_allclose(whole(params, tokens, config=own), expected, atol=1e-4)


@pytest.mark.parametrize("shard_bytes", [5 << 30, 3000], ids=["one file", "shards"])
@pytest.mark.parametrize("config", (*FAMILIES, *STATE_FAMILIES, *SPARSE_FAMILIES), ids=kind_of)
def test_what_we_save_transformers_loads_with_the_same_logits(tmp_path, config, shard_bytes):
    params = random_weights(config)
    save_pretrained(tmp_path, params, config, max_shard_bytes=shard_bytes)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    problems = {name: found for name, found in info.items() if found}
    assert not problems
    assert model.dtype == torch.float32
    tokens = random_tokens(config.vocab_size)
    ours = whole(params, tokens, config=config)
    np.testing.assert_allclose(ours, torch_logits(model.eval(), tokens), atol=1e-4)


def test_the_language_model_of_a_directory_with_images_agrees(tmp_path):
    """As published: its tensors have another prefix, and stand beside those of the tower."""
    tower = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=16)
    text = SIZES | DELTA | dict(eos_token_id=7)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=tower)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(random_tensor(name, tuple(weight.shape), 0)))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in stored)
    assert any(name.startswith("model.language_model.") for name in stored)
    params, own = load_pretrained(tmp_path)
    tokens = random_tokens(own.vocab_size)
    expected = torch_logits(model, tokens)
    assert np.abs(expected).max() > 0.5 and own.eos_token_id == (7,)
    np.testing.assert_allclose(whole(params, tokens, config=own), expected, atol=1e-4)


PUBLISHED = {
    "27B": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", sizes.QWEN_27B),
    "35B-A3B": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", sizes.QWEN_35B_A3B),
    "Next-80B": ("Qwen3NextConfig", "Qwen3NextForCausalLM", sizes.QWEN_NEXT_80B),
    "GLM-4.5-Air": ("Glm4MoeConfig", "Glm4MoeForCausalLM", sizes.GLM_45_AIR),
    "30B-A3B": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", sizes.QWEN_30B_A3B),
    "DeepSeek-V3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", sizes.DEEPSEEK_V3),
    "GLM-4.7-Flash": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", sizes.GLM_47_FLASH),
    "Kimi-K2": ("DeepseekV3Config", "DeepseekV3ForCausalLM", sizes.KIMI_K2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_size_has_the_tensors_of_transformers(name):
    """All names and shapes, without allocating one."""
    config_class, model_class, published = PUBLISHED[name]
    with torch.device("meta"):
        values = {name: value for name, value in published.items() if name != "model_type"}
        config = getattr(transformers, config_class)(**values)
        model = getattr(transformers, model_class)(config)
    theirs = {n: tuple(w.shape) for n, w in model.state_dict().items()}
    inside = expert_places(theirs)
    for tensor, _, rows in inside.values():
        assert len(rows) * (2 if "gate_up" in tensor else 1) == theirs[tensor][1]
    theirs |= {n: (len(rows), theirs[name][2]) for n, (name, _, rows) in inside.items()}
    for tensor in {tensor for tensor, *_ in inside.values()}:
        del theirs[tensor]
    ours = {}
    for _, spec, i in declared(family_of_type(published["model_type"]).config.from_hf(published)):
        is_split = "{e}" in spec.hf_name
        shape = spec.shape[1:] if is_split else spec.shape
        for e in range(spec.shape[0] if is_split else 1):
            ours[spec.hf_name.format(i=i, e=e)] = shape[::-1] if spec.is_linear else shape
    assert ours == theirs


def test_transformers_loads_our_bfloat16_and_reads_our_stop_tokens(tmp_path):
    config = dataclasses.replace(LLAMA, eos_token_id=(2, 7), bos_token_id=1)
    save_pretrained(tmp_path, random_weights(LLAMA), config, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [2, 7]
    assert model.generation_config.bos_token_id == 1
    loaded, _ = load_pretrained(tmp_path)
    theirs = model.model.layers[1].mlp.down_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(loaded["layers"]["1"]["down"].T, theirs)


def test_transformers_reads_our_tokenizer_alike(data_dir, tmp_path):
    tokenizer = Tokenizer.from_directory(data_dir / "models" / "stories260K")
    save_pretrained(tmp_path, random_weights(LLAMA), LLAMA, tokenizer=tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = 'Once upon a time, there was a café.\n  Lily said: "Hi!"'
    ids = tokenizer.encode(text)
    assert theirs(text)["input_ids"] == ids and len(ids) > 10
    assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
