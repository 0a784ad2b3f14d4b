"""States of delta nets, keys of attention and latents while a queue decodes, also on a mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import HOT
from support.mtp_modules import write_with_modules
from support.tiny_models import DEEPSEEK_TARGET, QWEN35, QWEN35_MOE

import spec_jax
from spec_jax import DecodeQueue, SpeculativeConfig, SpeculativeDecoder
from spec_jax.engine.engine import Engine
from spec_jax.models import transformer

_TYPES = ("linear_attention", "full_attention") * 2
LOOP = dataclasses.replace(QWEN35_MOE, num_hidden_layers=4, layer_types=_TYPES, scan_layers=True)
CASES = {
    "one device": (QWEN35, None, None),
    "one device, latents": (DEEPSEEK_TARGET, None, None),
    "mesh": (QWEN35, "data:2,tensor:2", None),
    "mesh, experts, tree, a loop over layers": (LOOP, "data:2,tensor:2", (2, 1)),
    "mesh, latents, tree": (DEEPSEEK_TARGET, "data:2,tensor:2", (2, 1)),
}


def contents(cache):
    """What is committed, slots of the window left out."""
    snapshot = cache.snapshot()
    length = np.asarray(snapshot.seq_len)
    is_held = lambda x: (np.arange(x.shape[2]) < length[:, None])[:, None, :, None]
    hide = lambda x: np.where(is_held(x), x, 0)
    return [
        jax.tree.map(hide if "keys" in group else np.asarray, group) for group in snapshot.groups
    ]


@functools.partial(jax.jit, static_argnames=("config", "slots"))
def prefilled(params, tokens, lengths, config, slots):
    cache = transformer.init_cache(config, len(tokens), slots)
    return transformer.forward(params, tokens, cache, config=config).cache.commit(lengths)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_the_state_of_every_row_equals_a_fresh_prefill(tmp_path, monkeypatch, name):
    """After every call of a queue: rows that took the place of others, drafts rejected, chunks."""
    config, on, tree = CASES[name]
    write_with_modules(tmp_path, config)
    target = spec_jax.load_model(tmp_path, mesh=on, scan_layers=config.scan_layers)
    module = spec_jax.load_draft(tmp_path, target, mesh=on)
    shape = {"num_speculative_tokens": 3} if tree is None else {"tree": tree}
    match = SpeculativeConfig("mtp", rejection_sampling_strategy="match", **shape)
    decoder = SpeculativeDecoder(target, module, match, target_sampler=HOT, prefill_chunk=5)
    config = dataclasses.replace(config, scan_layers=False)  # an oracle without the loop
    whole, checked, generate = spec_jax.load_model(tmp_path), [], Engine.generate

    def generate_and_check(self, *args):
        state, chunk = generate(self, *args)
        tokens, length = jnp.asarray(np.asarray(state.tokens)), np.asarray(state.target.length)
        slots = state.target.slots
        fed = jnp.zeros((len(length), slots), jnp.int32).at[:, : tokens.shape[1]].set(tokens)
        fresh = prefilled(whole.params, fed, jnp.asarray(length), config, slots)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-5)
        jax.tree.map(close, contents(state.target), contents(fresh))
        checked.append(length.tolist())
        return state, chunk

    monkeypatch.setattr(Engine, "generate", generate_and_check)
    prompts = [[i % 31 for i in range(n)] for n in (17, 3, 9, 1, 12, 6)]
    limits = dict(batch=2, max_prompt_tokens=17, max_new_tokens=9)
    assert len(dict(DecodeQueue(decoder, enumerate(prompts), **limits))) == 6
    stats = decoder.stats
    assert len(checked) > 3 and 0 < stats.accepted < stats.drafted
    assert len({max(lengths) for lengths in checked}) > 1  # rows were replaced
