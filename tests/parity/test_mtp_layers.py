"""MTP modules against the same composed of transformers' layers on torch."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_models import LLAMA, random_tensor, random_weights

from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context
from spec_jax.drafters.mtp.model import MtpConfig, mtp, mtp_table
from spec_jax.models import transformer
from spec_jax.models.families import family_of, module_layer
from spec_jax.models.families.deepseek import DeepseekConfig
from spec_jax.models.families.glm4_moe import Glm4MoeConfig
from spec_jax.models.families.qwen3_5 import Qwen35Config
from spec_jax.models.families.qwen3_next import Qwen3NextConfig
from spec_jax.sampling import make_sampler

torch = pytest.importorskip("torch", reason="parity needs torch (extra 'parity')")
transformers = pytest.importorskip(
    "transformers", reason="parity needs transformers (extra 'parity')"
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3  # noqa: E402
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe  # noqa: E402
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next  # noqa: E402

V, D, K = 31, 16, 3
TARGET = dataclasses.replace(LLAMA, max_position_embeddings=256)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16)
YARN |= dict(mscale=0.7, mscale_all_dim=1.2)
SIZE = dict(vocab_size=V, hidden_size=D, intermediate_size=20, num_hidden_layers=1)
SIZE |= dict(num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=6, qk_nope_head_dim=4)
SIZE |= dict(qk_rope_head_dim=4, v_head_dim=5, max_position_embeddings=256, rms_norm_eps=1e-5)
SIZE |= dict(rope_parameters=dict(rope_type="default", rope_theta=100.0))
SPARSE = dict(n_routed_experts=8, moe_intermediate_size=6, num_experts_per_tok=3)
SPARSE |= dict(n_shared_experts=2, n_group=4, topk_group=2, norm_topk_prob=True)
SPARSE |= dict(routed_scaling_factor=2.5)
QWEN = dict(model_type="qwen3_next", vocab_size=V, hidden_size=D, num_hidden_layers=1)
QWEN |= dict(head_dim=8, num_attention_heads=4, num_key_value_heads=2)
QWEN |= dict(max_position_embeddings=256, rms_norm_eps=1e-5, num_experts=6, num_experts_per_tok=2)
QWEN |= dict(moe_intermediate_size=6, shared_expert_intermediate_size=10)
QWEN |= dict(rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5))
QWEN35 = {name: x for name, x in QWEN.items() if "expert" not in name}
QWEN35 |= dict(model_type="qwen3_5_text", intermediate_size=20, linear_num_key_heads=1)
QWEN35 |= dict(linear_num_value_heads=1, linear_key_head_dim=2, linear_value_head_dim=2)
GLM = {name: x for name, x in QWEN.items() if name != "num_experts"}
GLM |= dict(model_type="glm4_moe", intermediate_size=20, use_qk_norm=True, attention_bias=True)
GLM |= dict(SPARSE, first_k_dense_replace=0)
MODULES = {
    "dense": dict(q_lora_rank=8),
    "dense, plain queries, yarn": dict(q_lora_rank=None, rope_parameters=YARN),
    "dense, biases, halves": dict(q_lora_rank=8, attention_bias=True, rope_interleave=False),
    "experts": dict(q_lora_rank=8, **SPARSE),
    "experts, yarn": dict(q_lora_rank=8, **SPARSE, rope_parameters=YARN),
    "experts, not normalised": dict(q_lora_rank=8, **{**SPARSE, "norm_topk_prob": False}),
    "qwen3-next": QWEN,
    "qwen3-next, biases, not normalised": {**QWEN, "attention_bias": True, "norm_topk_prob": False},
    "qwen3.5": QWEN35,
    "glm-4.5": GLM,
}


def fused(tensors):
    """Experts as their modules hold them: stacked, gate above up."""
    own = {k: v for k, v in tensors.items() if ".experts." not in k}
    count = len([k for k in tensors if k.startswith("mlp.experts.") and "down" in k])
    part = lambda e, name: tensors[f"mlp.experts.{e}.{name}_proj.weight"]
    pairs = [torch.cat([part(e, "gate"), part(e, "up")]) for e in range(count)]
    own["mlp.experts.gate_up_proj"] = torch.stack(pairs)
    own["mlp.experts.down_proj"] = torch.stack([part(e, "down") for e in range(count)])
    return own


KINDS = {  # the module of their layers, and how these are called
    "deepseek_v3": (deepseek_v3, "DeepseekV3"),
    "glm4_moe": (glm4_moe, "Glm4Moe"),
    "qwen3_next": (qwen3_next, "Qwen3Next"),
    "qwen3_5_text": (qwen3_5, "Qwen3_5"),
}


class TorchModule:
    """A module over whole sequences: their layer, rotary embedding and norms."""

    def __init__(self, values, tensors):
        self.tensors = {k: torch.from_numpy(v) for k, v in tensors.items()}
        is_sparse = "model.layers.0.mlp.gate.weight" in tensors
        options = {name: value for name, value in values.items() if name != "model_type"}
        kind = values.get("model_type", "deepseek_v3")
        room, name = KINDS[kind]
        text = "Text" if room is qwen3_5 else ""
        if kind == "deepseek_v3":
            options |= dict(first_k_dense_replace=0 if is_sparse else 1)
        elif kind != "glm4_moe":
            options |= dict(layer_types=["full_attention"])
        options |= dict(attn_implementation="eager")
        config = getattr(transformers, f"{name}{text}Config")(**options)
        layer = getattr(room, f"{name}DecoderLayer")
        rotary = getattr(room, f"{name}{text}RotaryEmbedding")
        make_norm = getattr(room, f"{name}RMSNorm")
        self.layer, self.rotary = layer(config, 0).eval(), rotary(config)
        own = {
            k.removeprefix("model.layers.0."): v
            for k, v in self.tensors.items()
            if any(part in k for part in ("self_attn", "mlp", "layernorm"))
        }
        self.layer.load_state_dict(fused(own) if is_sparse else own)
        self.norms = {}
        for name in ("enorm", "hnorm", "shared_head.norm"):
            self.norms[name] = make_norm(D, eps=1e-5)
            self.norms[name].weight.data = self.tensors[f"model.layers.0.{name}.weight"]

    def rows(self, states, embeds):
        both = torch.cat([self.norms["enorm"](embeds), self.norms["hnorm"](states)], dim=-1)
        x = (both @ self.tensors["model.layers.0.eh_proj.weight"].T)[None]
        T = x.shape[1]
        position = torch.arange(T)[None]
        mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
        options = dict(position_ids=position, position_embeddings=self.rotary(x, position))
        return self.layer(x, attention_mask=mask, **options)[0]


def tensors_of(config):
    """Random tensors of one module by their external names."""
    tensors = {}
    for spec in mtp_table(config).values():
        shape = spec.shape[1:] if "{e}" in spec.hf_name else spec.shape
        shape = shape[::-1] if spec.is_linear else shape
        experts = range(spec.shape[0]) if "{e}" in spec.hf_name else [0]
        for name in {spec.hf_name.format(i=0, e=e) for e in experts}:
            tensors[name] = random_tensor(name, shape, 0)
            if "norm" in name and config.has_zero_centred_norms:
                tensors[name] -= 1
    return tensors


def params_of(config, tensors):
    def leaf(spec):
        turn = lambda x: x.T if spec.is_linear else x
        if "{e}" not in spec.hf_name:
            return jnp.asarray(turn(tensors[spec.hf_name.format(i=0)]))
        return jnp.stack(
            [turn(tensors[spec.hf_name.format(i=0, e=e)]) for e in range(spec.shape[0])]
        )

    return {name: leaf(spec) for name, spec in mtp_table(config).items()}


@pytest.mark.parametrize("name", MODULES)
def test_recycled_steps_are_those_of_transformers_layers(name):
    values, is_qwen = MODULES[name], "qwen" in name
    values = values if "model_type" in values else {**SIZE, **values}
    kinds = {"qwen3_next": Qwen3NextConfig, "qwen3_5_text": Qwen35Config}
    kinds |= {"glm4_moe": Glm4MoeConfig}
    layer = module_layer(kinds.get(values.get("model_type"), DeepseekConfig).from_hf(values))
    stated = {"recycles_normed": family_of(layer).recycles_normed}
    config = MtpConfig.of_target(TARGET, layer=layer, has_zero_centred_norms=is_qwen, **stated)
    tensors = tensors_of(config)
    target = transformer.model(TARGET, config.taps)
    params = {"head": {"0": params_of(config, tensors)}, "target": random_weights(TARGET)}
    tokens = np.random.RandomState(1).randint(0, V, (2, 21))
    fed, pending = jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, -1])
    features = target.forward(params["target"], fed).features
    lengths = jnp.full((2,), 20)
    drafter = mtp(config, target)
    state = drafter.init(params, 2, 32)
    state = drafter.prefill(params, state, fed, lengths, pending, features)
    sampler = make_sampler(SamplerConfig(), 2, V)
    options = dict(is_coupled=False, has_probs=False, has_logits=True)
    context = Context(jnp.asarray(tokens), lengths, sampler, sampler.seed, **options)
    proposal, _ = drafter.propose(params, state, context, K)

    module = TorchModule(values, tensors)
    embed = torch.from_numpy(np.array(params["target"]["embed"]))
    head = torch.from_numpy(np.array(params["target"]["head"]))
    for row in range(2):
        states, ids = torch.from_numpy(np.array(features[row])), tokens[row, 1:].tolist()
        for step in range(K):
            with torch.no_grad():
                x = module.norms["shared_head.norm"](module.rows(states, embed[ids])[-1:])
                logits = (x @ head)[0].numpy()
            np.testing.assert_allclose(proposal.logits[row, step], logits, rtol=0, atol=1e-5)
            assert int(proposal.tokens[row, step]) == logits.argmax()
            states, ids = torch.cat([states, x]), [*ids, int(logits.argmax())]
