"""Sizes of published models, as their config.json state them."""

# ``text_config`` of Qwen/Qwen3.6-27B and Qwen/Qwen3.8-27B, which differ in nothing but
# ``transformers_version``.
QWEN_27B = dict(
    model_type="qwen3_5_text",
    vocab_size=248320,
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=64,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16,
    full_attention_interval=4,
    attention_bias=False,
    attn_output_gate=True,
    output_gate_type="swish",
    max_position_embeddings=262144,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    eos_token_id=248044,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=10_000_000,
        partial_rotary_factor=0.25,
        mrope_section=[11, 11, 10],
        mrope_interleaved=True,
    ),
)
