"""Attention over the filled part of a cache: equal to all of it, and no more is read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.meshes import mesh
from support.tiny_models import LLAMA, random_weights

from spec_jax.config import SpeculativeConfig
from spec_jax.decoding.loop import prefill_target
from spec_jax.drafters.loaded import head_of
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.loading import LoadedModel, load_draft, load_model
from spec_jax.models import attention, transformer
from spec_jax.models.sees import Sees

S, N, G, H = attention.MIN_SLOTS + 88, 4, 2, 4  # slots that prefixes do not divide
SIZE = -(-S // attention.NUM_PARTS)
EDGES = [n * SIZE + d for n in range(1, attention.NUM_PARTS) for d in (-1, 0, 1)]

over_prefix, over_all = jax.jit(attention.attend_prefix), jax.jit(attention.attend)


def inputs(mask):
    """Queries, keys and values for this mask bool[B,T,S]."""
    B, T, S = mask.shape
    draw = np.random.RandomState(0).standard_normal
    shapes = ((B, T, N, H), (B * G, S, H), (B * G, S, H))
    return [draw(shape).astype(np.float32) for shape in shapes]


def chains(lengths, T):
    """bool[B,T,S]: the mask of each row's T tokens after as many others as given."""
    ends = np.asarray(lengths)[:, None] + np.arange(T)
    return np.arange(S) <= ends[:, :, None]


def assert_reads_the_prefix_alone(mask):
    q, k, v = inputs(mask)
    np.testing.assert_allclose(over_prefix(q, k, v, mask), over_all(q, k, v, mask), atol=1e-5)
    last = np.flatnonzero(mask.any(axis=(0, 1)))[-1]
    past = (last // SIZE + 1) * SIZE if last < attention.PREFIXES[-1] * SIZE else S
    k[:, past:], v[:, past:] = np.nan, np.nan  # which would reach the output, masked or not
    assert np.isfinite(over_prefix(q, k, v, mask)).all()
    if past < S:
        assert np.isnan(over_all(q, k, v, mask)).any()


def tree(edge):
    """A root whose children see nothing of each other, of which the last is before the edge."""
    mask = np.broadcast_to(np.arange(S) < (edge - 4), (1, 4, S)).copy()
    mask[0, :, edge - 4 : edge] = np.eye(4, dtype=bool)
    mask[0, :, edge - 4] = True
    return mask


MASKS = {
    "two tokens": (lambda edge: chains([edge - 2], 2), EDGES),
    "five tokens": (lambda edge: chains([edge - 5], 5), EDGES),
    "ragged rows": (lambda edge: chains([3, edge - 3, 40], 3), EDGES[:6] + [S]),
    "tree": (tree, EDGES[:6] + [S]),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_window_reads_the_shortest_prefix_that_holds_its_last_token(name):
    mask, edges = MASKS[name]
    for edge in edges:
        assert_reads_the_prefix_alone(mask(edge))


def test_a_layer_of_a_stack_is_read_whole():
    mask = chains([20, 60], 3)
    q, k, v = inputs(mask)
    of_stack = [x.reshape(2, G, S, H) for x in (k, v)]
    jaxpr = str(jax.make_jaxpr(attention.attend_prefix)(q, *of_stack, mask))
    assert jaxpr.count("dot_general") == 2
    np.testing.assert_allclose(over_prefix(q, *of_stack, mask), over_all(q, k, v, mask), atol=1e-5)


def test_a_long_cache_has_short_prefixes():
    """Each read holds all slots seen, and a slot in the first eighth costs at most twice itself."""
    assert attention.prefix_sizes(1024) == [128, 256, 1024]
    assert attention.prefix_sizes(16384) == [256, 512, 1024, 2048, 4096, 16384]
    draw, many = np.random.RandomState(0).standard_normal, 8192
    shapes = [(1, 1, N, H), (G, many, H), (G, many, H)]
    q, k, v = (jnp.asarray(draw(shape), jnp.float32) for shape in shapes)
    for last in (0, 255, 256, 511, 512, 1023, 2047, 2048, many - 1):
        mask = (np.arange(many) <= last)[None, None]
        read = next(n for n in attention.prefix_sizes(many) if n > last)
        assert last < read <= max(2 * (last + 1), 256) or last >= many // 4
        out = over_prefix(q, *(x.at[:, read:].set(jnp.nan) for x in (k, v)), mask)
        np.testing.assert_allclose(out, over_all(q, k, v, mask), atol=1e-5)


CHOICES = [
    (5, S, "cpu", len(attention.PREFIXES) + 1),
    (5, 16384, "cpu", len(attention.PREFIXES) + 4),
    (1, S, "cpu", len(attention.PREFIXES) + 1),
    (5, attention.MIN_SLOTS - 1, "cpu", 1),
    (5, S, "tpu", 1),
    (5, S, "cuda", 1),
]


@pytest.mark.parametrize("T, slots, platform, num_prefixes", CHOICES)
def test_there_is_a_choice_of_prefixes_on_a_cpu_alone(T, slots, platform, num_prefixes):
    mask = np.ones((1, T, slots), bool)
    traced = jax.jit(attention.attend_prefix).trace(*inputs(mask), mask)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("dot_general") == 2 * num_prefixes  # scores and values


BLOCK, SLOTS = 8, 37  # the last block overlaps the one before it
STARTS = jnp.array([3, 20, 9])  # of three rows, whose window has four tokens
PATHS = np.tril(np.ones((1, 4, 4), bool)) & ~np.eye(4, k=-2, dtype=bool)  # no grandparents
NEXT_LEVEL = np.concatenate([np.ones((3, 4, 3), bool), PATHS[[0] * 3]], axis=2)
MANY = np.tril(np.ones((1, 4, 37), bool), 33) & (np.arange(37) % 3 != 1)
MANY |= np.eye(4, 37, 33, dtype=bool)  # each sees itself
WINDOWS = {
    "chain": Sees(STARTS, 4),
    "to the end": Sees(jnp.array([3, 33, 9]), 4),
    "from slot 2 on": Sees(STARTS, 4, first=2),
    "documents": Sees(STARTS, 4, first=np.array([[2, 2, 5, 5], [0, 0, 0, 0], [9, 10, 11, 11]])),
    "tree": Sees(STARTS, 4, inside=PATHS),
    "tree's next level": Sees(STARTS, 4, 3, NEXT_LEVEL),
    "more nodes than a number has bits": Sees(jnp.full(3, 33), 4, 33, MANY),
    "chain that slides": Sees(STARTS, 4, size=3),
    "tree that slides": Sees(STARTS, 4, 3, NEXT_LEVEL, size=3),
}


def mask_of(sees):
    """bool[3,4,SLOTS], what each token sees, one by one."""
    mask = np.zeros((3, 4, SLOTS), bool)
    for b, t in np.ndindex(mask.shape[:2]):
        begin = int(sees.start[b]) - sees.offset
        if sees.inside is None:
            seen = [*range(begin + sees.offset + t + 1)]
        else:
            nodes = np.flatnonzero(np.asarray(sees.inside)[b % len(sees.inside), t])
            seen = [*range(begin), *(begin + nodes)]
        first = np.broadcast_to(sees.first, (3, 4))[b, t]
        seen = [s for s in seen if s >= first]
        mask[b, t, seen if sees.size is None else seen[-sees.size :]] = True
    return mask


@pytest.mark.parametrize("name", WINDOWS)
def test_each_token_sees_what_it_is_said_to(name):
    """At positions in any order, and in any row's order."""
    expected = mask_of(WINDOWS[name])
    assert expected.any(axis=2).all()
    np.testing.assert_array_equal(WINDOWS[name](jnp.arange(SLOTS)), expected)
    order = np.stack([np.roll(np.arange(SLOTS), b) for b in (3, 11, 0)])
    taken = np.take_along_axis(expected, order[:, None], axis=2)
    np.testing.assert_array_equal(WINDOWS[name](jnp.asarray(order)), taken)
    assert not WINDOWS[name](jnp.full((1,), -1)).any() or WINDOWS[name].size is None


@pytest.mark.parametrize("name", WINDOWS)
def test_blocks_up_to_the_longest_row_are_the_whole_of_what_is_seen(name):
    """In every shape of a cache; and the block after the longest row is not read."""
    sees = WINDOWS[name]
    draw = np.random.RandomState(0).standard_normal
    q, k = (draw(shape).astype(np.float32) for shape in ((3, 4, N, H), (3, G, SLOTS, H)))
    v = draw((3, G, SLOTS, 3)).astype(np.float32)
    expected = attention.attend(q, k, v, mask_of(sees))
    end = -(-int(sees.end.max()) // BLOCK) * BLOCK
    k[:, :, end:], v[:, :, end:] = np.nan, np.nan
    run = jax.jit(lambda k, v: attention.attend_filled(q, k, v, 1, sees, block=BLOCK))
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    stacked = lambda x: np.stack([np.full_like(x, np.nan), x])
    for shape in (np.asarray, flat, stacked):
        np.testing.assert_allclose(run(shape(k), shape(v)), expected, atol=1e-5)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_many_slots_are_read_in_blocks_off_a_cpu_and_on_it_by_many_tokens(platform):
    def loops(slots, name="auto", num_tokens=2):
        config = dataclasses.replace(LLAMA, attention=name)
        params = jax.eval_shape(lambda: transformer.init_params(config, jax.random.key(0)))
        cache = jax.eval_shape(lambda: transformer.init_cache(config, 1, slots))
        forward = jax.jit(functools.partial(transformer.forward, config=config))
        tokens = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32)
        traced = forward.trace(params, tokens, cache)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return text.count("stablehlo.while")

    layers = LLAMA.num_hidden_layers
    assert loops(attention.MIN_BLOCKED) == (0 if platform == "cpu" else layers)
    assert (loops(attention.MIN_BLOCKED - 1), loops(64, "xla")) == (0, layers)
    many = attention.CPU_TOKENS
    assert loops(S, num_tokens=many) == (layers if platform == "cpu" else 0)
    assert loops(S, num_tokens=many - 1) == loops(attention.MIN_SLOTS - 1, num_tokens=many) == 0


DOCUMENTS = {"one": (None, None), "four": ([0, 7, 90, 128], None), "sliding": ([0, 7, 90], 40)}


@pytest.mark.parametrize("starts, size", DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_tpus_kernel_attends_as_all_scores_at_once_do(starts, size, monkeypatch):
    """In the interpreter: outputs and gradients, with tokens that blocks do not divide."""
    monkeypatch.setattr(attention, "SPLASH_BLOCK", 128)
    draw, T = np.random.RandomState(0).standard_normal, 130
    shapes = ((1, T, 4, 128), (1, 2, T, 128), (1, 2, T, 128), (1, T, 512))
    *given, weights = (jnp.asarray(draw(shape), jnp.float32) for shape in shapes)

    def outputs_and_gradients(function):
        def weighted(*given):
            out = function(*given)
            return (out * weights).sum(), out

        return jax.jit(jax.grad(weighted, (0, 1, 2), has_aux=True))(*given)

    first = 0
    if starts is not None:
        number = np.searchsorted(starts, np.arange(T), "right") - 1
        first = jnp.asarray(starts, jnp.int32)[number][None]
    sees = Sees(jnp.zeros(1, jnp.int32), T, first=first, size=size)
    mask = sees(jnp.arange(T))
    by_splash = functools.partial(attention.by_splash, sees=sees, is_interpreted=True)
    kernel = outputs_and_gradients(by_splash)
    whole = outputs_and_gradients(lambda q, k, v: attention.attend(q, k, v, mask))
    for one, other in zip(jax.tree.leaves(kernel), jax.tree.leaves(whole)):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(
    "platform, kind, count", [("tpu", "auto", 1), ("tpu", "xla", 0), ("cpu", "auto", 0)]
)
def test_long_sequences_are_attended_over_by_a_kernel_on_a_tpu_alone(platform, kind, count):
    T = attention.MIN_SPLASH
    q, k = (jax.ShapeDtypeStruct(x, "bfloat16") for x in ((1, T, 4, 128), (1, 2, T, 128)))
    sees = Sees(jnp.zeros(1, jnp.int32), T)
    traced = jax.jit(functools.partial(attention.causal_attention, kind=kind, sees=sees)).trace(
        q, k, k
    )
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("tpu_custom_call") == count


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "MIN_BLOCK", BLOCK)
    monkeypatch.setattr(attention, "BLOCK_BYTES", 1)


def tiny(attention="xla", **changes):
    config = dataclasses.replace(LLAMA, attention=attention, **changes)
    return LoadedModel("tiny", transformer.model(config), random_weights(config), config=config)


PROMPTS = [[1, 2, 3], [*range(30)]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["data:2,tensor:2", "data:1,tensor:4"])
def test_decoding_in_blocks_on_a_mesh_emits_the_plain_tokens(where, small_blocks):
    """Chunked prompts and ragged rows, with scanned layers; the second splits no heads."""
    config = SpeculativeConfig(num_speculative_tokens=2, rejection_sampling_strategy="greedy")
    draft = (tiny(scan_layers=True), config) if where == "data:2,tensor:2" else ()
    options = dict(prefill_chunk=7, mesh=mesh(where))
    blocks = SpeculativeDecoder(tiny(scan_layers=True), *draft, **options).generate(PROMPTS, 20)
    whole = SpeculativeDecoder(tiny("auto", scan_layers=True)).generate(PROMPTS, 20)
    for one, other in zip(blocks, whole):
        assert list(one.tokens) == list(other.tokens)


@pytest.mark.exhaustive
def test_the_memory_of_a_chunk_in_blocks_does_not_grow_with_the_slots(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_BYTES", 1)

    def temporaries(slots, model):
        tokens = jax.ShapeDtypeStruct((1, slots), jnp.int32)
        lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
        params = jax.eval_shape(lambda: model.params)
        options = dict(target=model.model, slots=slots, chunk=64)
        memory = prefill_target.lower(params, tokens, lengths, **options).compile()
        return memory.memory_analysis().temp_size_in_bytes

    for kind in ("xla", "auto"):
        few, many = (temporaries(n, tiny(kind, scan_layers=True)) for n in (1024, 4096))
        assert many < 1.1 * few


@pytest.mark.representatives("zoo/eagle3")
@pytest.mark.parametrize("name", ["zoo/draft", "zoo/eagle3", "zoo/mtp"])
def test_a_drafts_cache_is_attended_over_as_it_was_loaded(name):
    target = load_model("zoo/target")
    for asked, expected in ((None, "auto"), ("auto", "auto"), ("xla", "xla")):
        draft = load_draft(name, target, attention=asked)
        is_model = isinstance(draft, LoadedModel)
        model = draft.model if is_model else head_of(draft, target.model)
        params = draft.params if is_model else {"head": draft.params, "target": target.params}
        cache = jax.eval_shape(lambda: model.init_cache(params, 1, 64))
        assert cache.attention == expected
