"""What generation_config.json states of sampling is what transformers makes of it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from needs import torch, transformers
from support.tiny_models import LLAMA, random_weights

from spec_jax.loading import load_model
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.sampling import make_sampler, process

FILES = [
    {},
    {"temperature": 0.6, "top_p": 0.5},  # greedy: it does not say do_sample
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.7},
    {"do_sample": True, "top_k": 4, "min_p": 0.3, "repetition_penalty": 1.7, "eos_token_id": [2]},
    {"do_sample": True, "top_k": 0, "top_p": 0.9, "typical_p": 1.0, "max_new_tokens": 5},
    {"repetition_penalty": 4.0, "num_beams": 1, "temperature": None},
]


run = jax.jit(process, static_argnames="is_argmax")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_pretrained(directory, random_weights(LLAMA), LLAMA)
    return directory


@pytest.mark.parametrize("stated", FILES, ids=json.dumps)
def test_the_distribution_is_theirs(directory, stated):
    (directory / "generation_config.json").write_text(json.dumps(stated))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    theirs, _ = model._prepare_generation_config(None)
    processors = model._get_logits_processor(theirs, input_ids_seq_length=4, device="cpu")
    sampler, V = load_model(directory).stated_sampler(), LLAMA.vocab_size
    rng = np.random.default_rng(0)
    for _ in range(5):
        prompt, logits = rng.integers(0, V, (1, 4)), rng.normal(0, 2, (1, V)).astype(np.float32)
        expected = processors(torch.tensor(prompt), torch.tensor(logits)).numpy()
        lengths, noise = jnp.asarray([4]), jnp.zeros((1, 0), jnp.int32)
        ours = make_sampler(sampler, 1, V).start(jnp.asarray(prompt, jnp.int32), lengths, V)
        found = run(jnp.asarray(logits)[:, None], ours, noise)[:, 0]
        assert bool(theirs.do_sample) == (sampler.temperature > 0)
        if theirs.do_sample:
            np.testing.assert_allclose(found, expected, atol=1e-5)
        else:
            assert int(found.argmax()) == int(expected.argmax())
