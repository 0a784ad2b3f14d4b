"""Tiny models of each family for the tests, their weights drawn by NumPy."""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.decoding import System
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig, RopeConfig
from spec_jax.models.families.bamba import BambaConfig
from spec_jax.models.families.deepseek import DeepseekConfig
from spec_jax.models.families.glm4_moe import Glm4MoeConfig
from spec_jax.models.families.mamba2 import Mamba2Config
from spec_jax.models.families.qwen3_5 import Qwen35Config
from spec_jax.models.families.qwen3_moe import Qwen3MoeConfig
from spec_jax.models.families.qwen3_next import Qwen3NextConfig
from spec_jax.models.loaded import LoadedModel
from spec_jax.models.params import assemble
from spec_jax.rules import MATCH

TINY = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
LLAMA = ModelConfig(**TINY, num_attention_heads=4, num_key_value_heads=2)
QWEN2 = ModelConfig(
    **TINY,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=6,
    model_type="qwen2",
    tie_word_embeddings=True,
)
QWEN3 = ModelConfig(
    **TINY,
    num_attention_heads=2,
    head_dim=4,
    model_type="qwen3",
    rope=RopeConfig("yarn", factor=4.0, original_max_position_embeddings=8),
)
_DEEPSEEK = dict(vocab_size=31, hidden_size=16, num_attention_heads=2, q_lora_rank=8)
_DEEPSEEK |= dict(kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5)
_DEEPSEEK |= dict(n_routed_experts=6, moe_intermediate_size=6, num_experts_per_tok=2)
_DEEPSEEK |= dict(n_shared_experts=1, n_group=3, topk_group=2)
DEEPSEEK = DeepseekConfig(**_DEEPSEEK)
DEEPSEEK_TARGET = dataclasses.replace(
    DEEPSEEK,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    intermediate_size=24,
    moe_intermediate_size=8,
)
_QWEN3_NEXT = dict(vocab_size=31, hidden_size=16, num_attention_heads=4, num_key_value_heads=2)
_QWEN3_NEXT |= dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6)
_QWEN3_NEXT |= dict(shared_expert_intermediate_size=10, partial_rotary_factor=0.5)
QWEN3_NEXT = Qwen3NextConfig(**_QWEN3_NEXT)
_MAMBA2 = dict(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8)
_MAMBA2 |= dict(state_size=6, n_groups=2, conv_kernel=4)
MAMBA2 = Mamba2Config(**_MAMBA2)
BAMBA = BambaConfig(
    **{**TINY, "num_hidden_layers": 3},
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_layer_indices=(1,),
    mamba_n_heads=4,
    mamba_d_state=6,
    mamba_d_conv=3,
    max_position_embeddings=2048,
)
_DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6)
_DELTA |= dict(linear_value_head_dim=8, layer_types=("linear_attention", "full_attention"))
QWEN35 = Qwen35Config(
    **TINY,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    partial_rotary_factor=0.5,
    **_DELTA,
)
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=4)
QWEN35_MOE = dataclasses.replace(
    QWEN35, intermediate_size=None, shared_expert_intermediate_size=12, **EXPERTS
)
QWEN3_MOE = Qwen3MoeConfig(
    **TINY, num_attention_heads=4, num_key_value_heads=2, head_dim=6, norm_topk_prob=True, **EXPERTS
)
QWEN3_NEXT_TARGET = dataclasses.replace(
    QWEN3_NEXT, num_hidden_layers=2, moe_intermediate_size=8, **_DELTA
)

GLM4_MOE = Glm4MoeConfig(
    **TINY,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    n_routed_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=4,
    n_shared_experts=2,
    n_group=3,
    topk_group=2,
    routed_scaling_factor=1.5,
    use_qk_norm=True,
    attention_bias=True,
)
SPARSE_FAMILIES = (QWEN35_MOE, QWEN3_MOE, QWEN3_NEXT_TARGET, DEEPSEEK_TARGET, GLM4_MOE)
# With sliding windows in all layers, from the second on, and in every other one.
_WINDOW = dict(sliding_window=9, max_pass=12)
MISTRAL = dataclasses.replace(LLAMA, **_WINDOW)
LATE_WINDOW = dataclasses.replace(
    QWEN2, layer_types=("full_attention", "sliding_attention"), **_WINDOW
)
MIXED_WINDOWS = dataclasses.replace(
    QWEN3, num_hidden_layers=4, layer_types=("sliding_attention", "full_attention") * 2, **_WINDOW
)
WINDOWED = {"mistral": MISTRAL, "qwen2": LATE_WINDOW, "qwen3": MIXED_WINDOWS}
FAMILIES = (LLAMA, QWEN2, QWEN3)
STATE_FAMILIES = (MAMBA2, BAMBA, QWEN35)


def random_tensor(name: str, shape, seed: int) -> np.ndarray:
    """Values by the tensor's external name, from a stream that NumPy has frozen.

    Large enough for logits that a wrong mask or position would move.
    """
    draw = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32).standard_normal(shape)
    return (1 + 0.1 * draw if "norm" in name else 0.2 * draw).astype(np.float32)


@functools.cache
def random_weights(config: ModelConfig, seed: int = 0, dtype: str = "float32"):
    """Every weight of the model, ``random_tensor`` of its name in a checkpoint."""

    def leaf(spec, layer, e=None):
        if "{e}" in spec.hf_name and e is None:
            one = spec._replace(shape=spec.shape[1:])
            return jnp.stack([leaf(one, layer, e) for e in range(spec.shape[0])])
        shape = spec.shape[::-1] if spec.is_linear else spec.shape
        array = random_tensor(spec.hf_name.format(i=layer, e=e), shape, seed)
        return jnp.asarray(array.T if spec.is_linear else array, dtype)

    return assemble(config, leaf)


def loaded(config: ModelConfig, name: str = "tiny", seed: int = 0, **options) -> LoadedModel:
    """A model of ``random_weights``; ``options`` are further fields."""
    weights = random_weights(config, seed)
    return LoadedModel(name, transformer.model(config), weights, config=config, **options)


def near(model: LoadedModel, noise: float = 0.1) -> LoadedModel:
    """A draft that is right now and then: the model, with noise on its weights."""
    moved = lambda w: w + noise * jnp.asarray(random_tensor(str(w.shape), w.shape, 1))
    return dataclasses.replace(model, name="draft", params=jax.tree.map(moved, model.params))


def random_tokens(*shape, seed: int = 0):
    return jnp.asarray(np.random.RandomState(seed).randint(0, 31, shape), jnp.int32)


def plain(config: ModelConfig, params):
    """Plain decoding of the target in ``params``, greedy or sampled, and its own parameters.

    One program for all drafters and rules that are held against it.
    """
    system = System(transformer.model(config), NO_DRAFT, MATCH, 0)
    return system, {"target": params["target"], "draft": None}


def large_weights(name: str, config, seed: int) -> LoadedModel:
    """A model whose predictions depend on the whole context, not on the last token alone."""
    params = transformer.init_params(config, jax.random.key(seed))
    params = jax.tree.map(lambda w: 12 * w if w.ndim == 2 else w, params)
    return LoadedModel(name, transformer.model(config), params, config=config)
