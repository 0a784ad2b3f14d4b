"""The compiled loop holds each cache once: donated, aliased, and never copied as a whole.

Read off the optimised program of ``decoding.generate``.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from support.decoders import rule
from support.tiny_models import DEEPSEEK_TARGET, QWEN35_MOE

from spec_jax import decoding
from spec_jax import planning as plan
from spec_jax.config import SamplerConfig
from spec_jax.drafters.eagle.model import EagleConfig, eagle, init_head
from spec_jax.drafters.early_exit import early_exit
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.drafters.ngram import ngram
from spec_jax.drafters.standalone.model import standalone
from spec_jax.meshes import make_mesh
from spec_jax.models import layers, transformer
from spec_jax.models.attention import NUM_PARTS, PREFIXES, attend_cache
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.config import ModelConfig
from spec_jax.models.families.deepseek import DeepseekConfig
from spec_jax.models.families.qwen3_moe import Qwen3MoeConfig
from spec_jax.models.runs import runs_of
from spec_jax.planning import hlo
from spec_jax.planning.work import Setting, Stack
from spec_jax.sampling import make_sampler
from spec_jax.tree import DynamicTree, Tree

SLOTS, VOCAB = 512, 48  # slots enough for a choice among prefixes
# What moves an array without computing anything; a bitcast moves nothing.
_MOVES = ("copy", "copy-start", "slice", "dynamic-slice", "transpose", "concatenate", "gather")


def config(num_layers: int, scan_layers: bool = False) -> ModelConfig:
    settings = dict(
        max_position_embeddings=SLOTS, tie_word_embeddings=True, scan_layers=scan_layers
    )
    options = dict(
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2, **settings
    )
    return ModelConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, **options)


TARGET_LAYERS = 4  # a layer is then an eighth of the cache, keys and values


def weights_of(config):
    return jax.eval_shape(lambda: transformer.init_params(config, jax.random.key(0)))


def compile_system(system, params, batch=1, slots=SLOTS):
    """The program of rounds, by the shapes of weights alone, and the bytes of both caches."""
    sampler = make_sampler(SamplerConfig(), batch, system.target.vocab_size)
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    request = i32(batch, 16), i32(batch), i32(batch), i32(batch, 1), sampler, sampler
    prefill = functools.partial(decoding.prefill, system=system, slots=slots)
    state = jax.eval_shape(prefill, params, *request)
    program = decoding.generate.lower(params, state, i32(batch), i32(), system=system).compile()
    caches = jax.tree.leaves((state.target, state.draft))
    return program, sum(math.prod(x.shape) * x.dtype.itemsize for x in caches)


def compile_generate(
    num_draft,
    batch=1,
    draft_layers=1,
    scan_layers=False,
    strategy="greedy",
    tree=None,
    kind="standalone",
):
    target, draft = config(TARGET_LAYERS, scan_layers), config(draft_layers, scan_layers)
    model = transformer.model(target)
    params = {"target": weights_of(target), "draft": None}
    if not num_draft:
        drafter = NO_DRAFT
    elif kind == "ngram":
        drafter = ngram()
    elif kind == "self":
        drafter = early_exit(model, TARGET_LAYERS // 2, tree)
    elif kind == "head":
        head = EagleConfig.of_target(target, draft_vocab_size=VOCAB // 2)
        model = transformer.model(target, head.taps)
        drafter = eagle(head, model, tree)
        head_params = jax.eval_shape(functools.partial(init_head, head), jax.random.key(0))
        params["draft"] = {"head": head_params, "target": params["target"]}
    else:
        drafter, params["draft"] = standalone(transformer.model(draft), tree), weights_of(draft)
    return compile_system(decoding.System(model, drafter, rule(strategy), num_draft), params, batch)


def compile_target(target, num_draft, slots):
    """The program of one row whose drafts are copied."""
    params = {"target": weights_of(target), "draft": None}
    system = decoding.System(transformer.model(target), ngram(), rule("greedy"), num_draft)
    return compile_system(system, params, slots=slots)


def in_loops(text: str) -> dict[str, hlo.Instruction]:
    """Every instruction of every loop and of what it calls, by name."""
    program = hlo.read(text)
    waiting = [i for i in program.instructions.values() if i.opcode == "while"]
    inside = {}
    while waiting:
        i = waiting.pop()
        for name in {*i.called.values(), *i.branches}:
            more = program.computations[name].instructions
            waiting += [] if more.keys() <= inside.keys() else more.values()
            inside |= more
    return inside


def moves_in_loops(text: str, num_elements: int, moves=_MOVES) -> list[str]:
    """Instructions inside of any loop's body that move so many float32 elements or more."""
    inside = in_loops(text).values()
    assert inside, "the program has no loop"
    is_large = lambda array: array.dtype == "f32" and math.prod(array.dims) >= num_elements
    return [i.name for i in inside if i.opcode in moves and any(map(is_large, i.arrays))]


def elements(num_layers: int, batch: int) -> int:
    """Of the keys of so many layers."""
    c = config(num_layers)
    return num_layers * batch * c.num_key_value_heads * SLOTS * c.head_dim


# Compiling is what these tests cost, so batch and depth of the draft take turns.
UNROLLED = ((0, 1, 1), (4, 1, 2), (4, 2, 1))  # K, batch, layers of the draft
SCANNED = ((0, 2, 1), (4, 1, 1), (4, 2, 2))
CASES = [
    pytest.param(k, batch, draft_layers, scan, id=f"K{k}-B{batch}-draft{draft_layers}-{name}")
    for scan, name, shapes in ((False, "unrolled", UNROLLED), (True, "scanned", SCANNED))
    for k, batch, draft_layers in shapes
]


@functools.cache
def compiled(num_draft, batch, draft_layers, scan_layers):
    program, cache_bytes = compile_generate(num_draft, batch, draft_layers, scan_layers)
    return program.as_text(), program.memory_analysis(), cache_bytes


@pytest.mark.representatives(
    "K0-B1-draft1-unrolled", "K4-B1-draft2-unrolled", "K0-B2-draft1-scanned"
)
@pytest.mark.parametrize("num_draft, batch, draft_layers, scan_layers", CASES)
def test_generate_is_given_every_cache_and_copies_none(num_draft, batch, draft_layers, scan_layers):
    text, memory, cache_bytes = compiled(num_draft, batch, draft_layers, scan_layers)
    assert memory.alias_size_in_bytes >= cache_bytes
    # The smallest array that is a cache as a whole: the draft's keys.
    smallest = elements(draft_layers if num_draft else TARGET_LAYERS, batch)
    assert moves_in_loops(text, smallest, ("copy", "copy-start")) == []
    assert memory.temp_size_in_bytes < cache_bytes / 2


@pytest.mark.representatives("0-1-1", "4-1-2")
@pytest.mark.parametrize("num_draft, batch, draft_layers", UNROLLED)
def test_unrolled_layers_are_read_where_they_lie(num_draft, batch, draft_layers):
    """No whole layer's keys are moved: the products read the cache itself, or a prefix of it.

    One query a row moves no more than the longest prefix.
    """
    text, _, _ = compiled(num_draft, batch, draft_layers, False)
    whole = elements(1, batch)
    smallest = whole if num_draft else whole * max(PREFIXES) // NUM_PARTS + 1
    assert moves_in_loops(text, smallest) == []


@pytest.mark.representatives("self-chain")
@pytest.mark.parametrize(
    "kind, tree, batch, strategy",
    [
        ("ngram", None, 2, "residual"),
        ("head", None, 1, "match"),
        ("head", Tree.branching((2, 2)), 2, "traversal"),
        ("head", DynamicTree(12, 3, 4), 1, "greedy"),
        ("standalone", DynamicTree(12, 3, 4), 2, "residual"),
        ("self", None, 1, "greedy"),
        ("self", Tree.branching((2, 2)), 2, "residual"),
    ],
    ids=[
        *("ngram", "head-chain", "head-static", "head-dynamic", "standalone-dynamic"),
        *("self-chain", "self-static"),
    ],
)
def test_no_drafter_tree_or_rule_moves_a_cache(kind, tree, batch, strategy):
    """The accepted path is gathered slot by slot, and the window's mask is no copy of a cache."""
    num_draft = 4 if tree is None else tree.num_nodes
    program, cache_bytes = compile_generate(
        num_draft, batch, kind=kind, strategy=strategy, tree=tree
    )
    assert moves_in_loops(program.as_text(), elements(1, batch)) == []
    assert program.memory_analysis().alias_size_in_bytes >= cache_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["hybrid", "latent"])
def test_a_loop_over_layers_copies_no_stack_of_a_cache(family):
    """Neither keys nor states; the latest inputs of a convolution are few, and made anew."""
    settings = dict(vocab_size=VOCAB, max_position_embeddings=SLOTS, scan_layers=True)
    if family == "hybrid":
        pattern = ("linear_attention", "linear_attention", "full_attention") * 2
        target = dataclasses.replace(QWEN35_MOE, num_hidden_layers=6, layer_types=pattern)
        target = dataclasses.replace(target, num_key_value_heads=4, **settings)
    else:
        target = dataclasses.replace(DEEPSEEK_TARGET, num_hidden_layers=6, first_k_dense_replace=2)
        target = dataclasses.replace(target, **settings)
    assert len(runs_of(target)) == (1 if family == "hybrid" else 2)
    program, cache_bytes = compile_target(target, 4, SLOTS)
    cache = jax.eval_shape(lambda: transformer.init_cache(target, 1, SLOTS))
    stacks = {x.shape for x in jax.tree.leaves(cache) if x.ndim == 5}
    assert len(stacks) == (2 if family == "hybrid" else 1)
    for dims in stacks:
        moved = moves_in_loops(program.as_text(), math.prod(dims), ("copy", "copy-start"))
        named = in_loops(program.as_text())
        assert not [name for name in moved if any(x.dims == dims for x in named[name].arrays)]
    assert program.memory_analysis().alias_size_in_bytes >= cache_bytes


_LATENT = dict(num_attention_heads=8, kv_lora_rank=512, q_lora_rank=384, qk_nope_head_dim=128)
_LATENT |= dict(qk_rope_head_dim=64, v_head_dim=128, num_hidden_layers=2, intermediate_size=4096)
LATENT = DeepseekConfig(vocab_size=1024, hidden_size=1024, **_LATENT)


@pytest.mark.representatives("None")
@pytest.mark.parametrize("on", [None, "data:1,tensor:2"])
def test_a_round_moves_what_is_counted_of_latents(on):
    """Within 15 %. On a CPU both products of attention read the cache; the count has it once."""
    slots, num_draft = 4096, 3 if on is None else 0
    if on is None:
        program, cache_bytes = compile_target(LATENT, num_draft, slots)
        read = hlo.read(program.as_text())
        moved = hlo.traffic(read, read.round()).hbm_bytes
        assert moves_in_loops(program.as_text(), slots * LATENT.latent_dim) == []
        assert program.memory_analysis().alias_size_in_bytes >= cache_bytes
    else:
        job = plan.Job(target=LATENT, batch=1, slots=slots, mesh=on, dtype="float32")
        counted = plan.compile_and_count(lambda: plan.trace_decode(job, make_mesh(on))).counted
        assert counted.copies == []
        moved = counted.hbm_bytes
    setting = Setting(context=slots, mesh=on or "data:1,tensor:1", dtype="float32")
    stack = Stack.of(LATENT, setting)
    read = slots * stack.slot_bytes
    assert read == slots * 2 * (512 + 64) * 4
    expected = stack.run(setting, num_draft + 1, num_draft + 1).hbm_bytes + read
    assert expected <= moved <= 1.15 * expected


_ROUTED = dict(num_experts=64, num_experts_per_tok=2, moe_intermediate_size=384)
_ROUTED |= dict(hidden_size=512, intermediate_size=64, num_hidden_layers=2, head_dim=64)
ROUTED = Qwen3MoeConfig(
    vocab_size=512, num_attention_heads=4, num_key_value_heads=2, **_ROUTED, norm_topk_prob=True
)


def test_a_round_moves_the_experts_that_its_tokens_chose():
    """Of two layers of 64 experts, of which four tokens choose two each. How many differ is what
    the loop over them counts: with the fewest and with the most the bytes lie within 15 %.

    A product on a CPU takes no slice of a stack, so each matrix is copied, into the same place as
    the one before; the bytes of that copy are left out, and there is never more than one of each.
    """
    slots, tokens, matrices = 64, 4, {(512, 384), (384, 512)}
    program, _ = compile_target(ROUTED, tokens - 1, slots)
    text, setting = program.as_text(), Setting(context=slots, dtype="float32")
    stack = Stack.of(ROUTED, setting)
    others = stack.run(setting, tokens, tokens).hbm_bytes - 4 * stack.experts_read(tokens)
    assert 7 < 64 * stack.experts_read(tokens) / stack.experts < 8

    def copies(move):
        operands = [a for i in found.operands(move.step.instruction) for a in i.arrays]
        arrays = [*operands, *move.step.instruction.arrays]
        return sum(x.num_bytes for x in arrays if x.dims in matrices) * move.step.times

    for count in (2, 8):
        found = hlo.read(text, unknown_trips=count)
        moved = hlo.traffic(found, found.round())
        copied, chosen = sum(map(copies, moved.moves)), 4 * count * stack.experts // 64
        assert copied == 2 * chosen  # written once and read once
        assert others + chosen <= moved.hbm_bytes - copied <= 1.15 * (others + chosen)
        assert moved.hbm_bytes - copied - others <= 1.15 * chosen
    loops = [n for n, trips in hlo.read(text).loops().items() if trips is None]
    assert len(loops) == 2 + 1  # of each layer, and of rounds
    one = 4 * 512 * 384
    assert program.memory_analysis().temp_size_in_bytes < 2 * 3 * one + 4 * slots * 512


@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
def test_a_round_moves_no_cache_of_a_sliding_window(scan_layers):
    """A pass reads and writes it in place, also where it goes on at the first slot."""
    window = dict(sliding_window=200, max_pass=56, max_position_embeddings=4096)
    sliding = dataclasses.replace(config(2, scan_layers), **window)
    program, num_bytes = compile_target(sliding, 3, 4096)
    assert num_bytes == 2 * 2 * 256 * 2 * 8 * 4 + 4
    layer = 256 * 2 * 8
    text = program.as_text()
    copied = layer + 1 if scan_layers else layer  # of a stack a product takes a copied layer
    assert moves_in_loops(text, copied) == []
    assert program.memory_analysis().alias_size_in_bytes >= num_bytes


def test_latents_are_read_once_in_blocks():
    """Both products take the same block."""
    cache = jax.eval_shape(lambda: transformer.init_cache(LATENT, 1, 4096))
    kv = dataclasses.replace(config(2), num_key_value_heads=1, head_dim=LATENT.latent_dim)
    both = jax.eval_shape(lambda: KVCache.create(kv, 1, 4096))
    q = jax.ShapeDtypeStruct((1, 1, 8, LATENT.latent_dim), jnp.float32)

    def blocks(cache):
        def attend(q, cache):
            sees = layers.Window.after(LATENT, cache, 1, 1).sees
            return attend_cache(q, cache.replace(attention="xla"), 0, sees, None)

        text = jax.jit(attend).lower(q, cache).compile().as_text()
        slices = [i for i in in_loops(text).values() if i.opcode == "dynamic-slice"]
        return sum(math.prod(i.arrays[0].dims) >= 512 * LATENT.latent_dim for i in slices)

    assert (blocks(cache), blocks(both)) == (1, 2)
