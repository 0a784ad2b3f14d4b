"""Whether the installed jax writes caches in place, and what is said where it does not."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from support import writes
from support.eagle_heads import CONFIGS, head_of
from support.tiny_models import LLAMA, random_weights

from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.models import transformer
from spec_jax.models.caches.kv import put_rows
from spec_jax.models.caches.rewriting import is_rewritten

DTYPES = (jnp.float32, jnp.bfloat16)
NAMES = {(0, 0): "", (1, 0): "target", (0, 1): "draft", (1, 1): "target and draft"}


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_a_write_touches_its_slot_alone_unless_it_is_known_to_rewrite(dtype):
    """By the bytes that the compiler counts for one step of a loop."""
    cost = writes.lower(2, 4096, dtype, put_rows).compile().cost_analysis()
    whole = 2 * 4096 * writes.WIDTH * jnp.dtype(dtype).itemsize
    assert (cost["bytes accessed"] > whole / 2) == is_rewritten(dtype, "cpu")


@pytest.mark.parametrize("is_old", [False, True], ids=["new jax", "old jax"])
@pytest.mark.parametrize("is_head", [False, True], ids=["model", "head"])
@pytest.mark.parametrize("dtypes", NAMES, ids=lambda pair: NAMES[pair] or "none")
def test_rewritten_caches_are_named_with_the_remedy(dtypes, is_head, is_old, monkeypatch):
    version = (0, 10, 2) if is_old else (0, 11, 2)
    known = functools.partial(is_rewritten, version=version)
    monkeypatch.setattr("spec_jax.models.caches.rewriting.is_rewritten", known)
    model, head = random_weights(LLAMA), head_of(CONFIGS["eagle-3"])
    target, draft, head = (
        jax.tree.map(lambda x: x.astype(DTYPES[i]) if x.dtype == jnp.float32 else x, params)
        for params, i in zip((model, model, head), (*dtypes, dtypes[1]))
    )
    target, draft = (
        LoadedModel("a model", transformer.model(LLAMA), params, None, LLAMA)
        for params in (target, draft)
    )
    if is_head:
        draft = LoadedHead("a head", CONFIGS["eagle-3"], head)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SpeculativeDecoder(target, draft)
    messages = [str(warning.message) for warning in caught]
    if is_old and any(dtypes):
        name = NAMES[dtypes]
        assert len(messages) == 1 and f"bfloat16 cache, here of {name}, whenever" in messages[0]
        assert f"load {name} in float32, or install jax 0.11.2 or newer" in messages[0]
        assert caught[0].filename == __file__  # points at who makes the decoder
    else:
        assert messages == []
    assert not is_rewritten(jnp.bfloat16, "tpu", version)


@pytest.mark.measure
def test_writes_take_as_long_however_many_slots_there_are(capsys):
    """The check of a new release of jax: 0.11.1 fails it in float32, and its program looks well."""
    times = writes.table(put_rows, DTYPES)
    with capsys.disabled():
        print(f"\njax {jax.__version__}, microseconds a write at {writes.SLOTS} slots: {times}")
    for name, times_us in times.items():
        expected = not is_rewritten(name.split()[-1], "cpu")
        assert writes.is_in_place(times_us) == expected, (name, times_us)
