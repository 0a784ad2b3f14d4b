"""Records what transformers on torch computes, for machines that have neither.

    pip install -e '.[parity]' && python tests/parity/record.py [directory of the stories260K model]

Writes tests/recorded/reference.json: for tiny models of each family their config.json, tensor
shapes, tokens and logits (the weights follow from the tensors' names, see
``tiny_models.random_tensor``); logits through each sampling processor; and, with the
directory given, a greedy text of a real model (otherwise the recorded one is kept).
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
from support.tiny_models import random_tensor  # noqa: E402

transformers.utils.logging.disable_progress_bar()
FILE = TESTS / "recorded" / "reference.json"
SIZE = dict(vocab_size=13, hidden_size=16, intermediate_size=10, num_attention_heads=4)
SIZE |= dict(max_position_embeddings=64)
LLAMA3 = dict(rope_type="llama3", rope_theta=100.0, factor=8.0, low_freq_factor=1.0)
LLAMA3 |= dict(high_freq_factor=4.0, original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=3.0)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16)
BIASES = dict(attention_bias=True, mlp_bias=True, head_dim=8, rope_parameters=LLAMA3)
ONE_LAYER = dict(num_hidden_layers=1, num_key_value_heads=2, tie_word_embeddings=True)
PART = dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)
DELTA = dict(num_hidden_layers=4, num_key_value_heads=2, head_dim=8, rope_parameters=PART)
DELTA |= dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=5)
DELTA |= dict(linear_value_head_dim=7)
LATE = dict(num_hidden_layers=2, num_key_value_heads=2, use_sliding_window=True)
LATE |= dict(sliding_window=9)
MIXED = ["sliding_attention", "full_attention"]
EXPERTS = dict(num_experts=7, num_experts_per_tok=2, moe_intermediate_size=8)
DELTA_EXPERTS = dict(DELTA, num_hidden_layers=2, shared_expert_intermediate_size=12, **EXPERTS)
DELTA_EXPERTS |= dict(layer_types=["linear_attention", "full_attention"])
LATENT = dict(num_hidden_layers=2, num_key_value_heads=4, q_lora_rank=6, kv_lora_rank=5)
LATENT |= dict(qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=7, first_k_dense_replace=1)
LATENT |= dict(n_routed_experts=6, moe_intermediate_size=8, num_experts_per_tok=2, n_group=3)
LATENT |= dict(topk_group=2, rope_parameters=dict(YARN, mscale=0.7, mscale_all_dim=1.2))
GLM = dict(num_hidden_layers=2, num_key_value_heads=2, head_dim=8, n_routed_experts=9)
GLM |= dict(moe_intermediate_size=8, num_experts_per_tok=3, n_group=3, topk_group=2)
GLM |= dict(n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=2.5)
GLM |= dict(use_qk_norm=True, attention_bias=True, rope_parameters=PART)
MODELS = {
    "llama": ("Llama", dict(num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=True)),
    "llama, biases, llama3": ("Llama", dict(num_hidden_layers=1, **BIASES)),
    "qwen2": ("Qwen2", dict(num_hidden_layers=2, num_key_value_heads=1)),
    "qwen2, linear": ("Qwen2", dict(ONE_LAYER, rope_parameters=LINEAR)),
    "qwen3": ("Qwen3", dict(num_hidden_layers=2, num_key_value_heads=2, head_dim=6)),
    "qwen3, yarn": ("Qwen3", dict(ONE_LAYER, head_dim=8, rope_parameters=YARN)),
    "mistral": ("Mistral", dict(num_hidden_layers=2, num_key_value_heads=2, sliding_window=9)),
    "qwen2, a late window": ("Qwen2", dict(LATE, max_window_layers=1)),
    "qwen3, mixed windows": ("Qwen3", dict(LATE, head_dim=6, layer_types=MIXED)),
    "qwen3.5": ("Qwen3_5", DELTA),
    "qwen3.5, experts": ("Qwen3_5Moe", DELTA_EXPERTS),
    "qwen3-next": ("Qwen3Next", DELTA_EXPERTS),
    "deepseek, yarn": ("DeepseekV3", LATENT),
    "qwen3, experts": ("Qwen3Moe", dict(ONE_LAYER, head_dim=6, **EXPERTS)),
    "glm-4.5": ("Glm4Moe", GLM),
}
CONFIGS = {f"Qwen3_5{x}": f"Qwen3_5{x}TextConfig" for x in ("", "Moe")}
PROCESSORS = [
    dict(temperature=0.6),
    dict(temperature=1.0, top_k=7),
    dict(temperature=1.0, top_p=0.8),
    dict(temperature=1.0, min_p=0.1),
    dict(temperature=1.0, repetition_penalty=1.4),
    dict(temperature=1.3, top_k=18, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
]
PROMPT, NUM_NEW = "Once upon a time", 200


def record_model(name, family, values):
    size = {n: x for n, x in SIZE.items() if n != "intermediate_size" or family != "Qwen3_5Moe"}
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**size, **values)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    kept = dict(model.named_parameters())
    kept |= {name: x for name, x in model.named_buffers() if name in model.state_dict()}
    shapes = {name: list(weight.shape) for name, weight in kept.items()}
    tokens = np.random.RandomState(0).randint(0, SIZE["vocab_size"], (1, 24))
    with torch.no_grad():
        for tensor, weight in kept.items():
            weight.copy_(torch.from_numpy(random_tensor(tensor, tuple(weight.shape), 0)))
        logits = model(torch.from_numpy(tokens)).logits[0, -4:].numpy()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        saved = json.loads((pathlib.Path(directory) / "config.json").read_text())
    fields = dict(name=name, config=saved, shapes=shapes, tokens=tokens[0].tolist())
    return fields | dict(last_logits=logits.round(6).astype(float).round(6).tolist())


def record_processors():
    draw = np.random.RandomState(3)
    logits = (1.5 * draw.standard_normal(24)).round(3).astype(np.float32)
    seen = draw.randint(0, 24, 8)
    classes = dict(repetition_penalty=transformers.RepetitionPenaltyLogitsProcessor)
    classes |= dict(temperature=transformers.TemperatureLogitsWarper)
    classes |= dict(top_k=transformers.TopKLogitsWarper, top_p=transformers.TopPLogitsWarper)
    classes |= dict(min_p=transformers.MinPLogitsWarper)
    results = []
    for config in PROCESSORS:
        scores = torch.from_numpy(logits.copy())[None]
        for parameter, make in classes.items():
            if parameter in config:
                scores = make(config[parameter])(torch.from_numpy(seen)[None], scores)
        kept = [None if x == -np.inf else round(x, 6) for x in scores[0].tolist()]
        results.append({"config": config, "processed": kept})
    return dict(logits=logits.astype(float).round(3).tolist(), seen=seen.tolist(), results=results)


def record_greedy(directory):
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    prompt = tokenizer(PROMPT, return_tensors="pt")
    options = dict(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    options |= {name: prompt[name] for name in ("input_ids", "attention_mask")}
    tokens = model.generate(**options)[0].tolist()
    n = prompt["input_ids"].shape[1]
    return {"prompt": PROMPT, "prompt_ids": tokens[:n], "new_ids": tokens[n:]}


def main(directory=None):
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {}
    greedy = record_greedy(directory) if directory else recorded.get("stories260K")
    value = dict(versions={"torch": torch.__version__, "transformers": transformers.__version__})
    value |= dict(models=[record_model(name, *args) for name, args in MODELS.items()])
    value |= dict(processors=record_processors(), stories260K=greedy)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(value, separators=(",", ":")) + "\n")
    print(f"{FILE.relative_to(TESTS.parent)}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
