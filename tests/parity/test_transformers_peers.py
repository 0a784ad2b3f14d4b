"""The part "peers" of the benchmark with its real workers: transformers on torch, and ours."""

import pytest
from needs import torch, transformers  # noqa: F401

from configs import benchmark as default
from experiments import benchmark
from experiments.benchmarks.peers import OURS, THEIRS
from experiments.benchmarks.shapes import random_model
from spec_jax.models.checkpoint import save_pretrained

SHAPE = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
SHAPE |= dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256)
SHAPE |= dict(tie_word_embeddings=True)


def test_a_peer_decodes_the_same_tokens(tmp_path):
    config = default.get_config()
    # The draft is the target itself: every draft of a model is accepted.
    target = random_model("target", SHAPE, 0)
    save_pretrained(tmp_path / "target", target.params, target.config)
    options = dict(num_prompts=2, max_prompt_tokens=9, new_tokens=13)
    config.peers.update(target=str(tmp_path / "target"), draft=str(tmp_path / "target"), **options)
    config.peers.update({"ks": (2,), "dtypes": "float32", "head": "", "repeats": 1})
    record = benchmark.run(config, tmp_path / "run", ("peers",))
    found = record["parts"]["peers"]["float32"]
    assert found["rows"] == 2 and set(found["versions"]) >= {"torch", "transformers", "jax"}
    for label, same in found["identical_rows"].items():
        assert same == {"own plain": 2, "peer": 2 if label.startswith(OURS) else None}, label
    tau = found["tau"]
    assert tau[f"{OURS} plain"] == tau[f"{THEIRS} plain"] == 1
    assert tau[f"{OURS} standalone, K=2"] == 3  # twelve tokens after the first, in four rounds
    # Four passes of three tokens and one of the last one.
    assert tau[f"{THEIRS} assisted generation, K=2"] == pytest.approx(13 / 5)
    barred = [line for line in record["lines"] if line["bar"] is not None]
    assert len(barred) == 1 and barred[0]["bar"] == config.bars.peers
