"""Timed loops of passes: what runs in them, and that no cache moves."""

import jax
import jax.numpy as jnp
import pytest
from support import block_heads, block_kind
from support.pairs import tiny_pair
from support.products import products
from support.tiny_models import MISTRAL, loaded

from spec_jax import load_model
from spec_jax.config import SpeculativeConfig
from spec_jax.decoding import System
from spec_jax.drafters import register, registry
from spec_jax.drafters.block.config import DFlashConfig, DSparkConfig
from spec_jax.drafters.loaded import draft_params
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.engine.build import make_drafter, tapped_model
from spec_jax.evaluation import costs, passes
from spec_jax.loading import random_head
from spec_jax.planning import roofline
from spec_jax.planning.work import Setting
from spec_jax.rules import GREEDY

SLOTS = 128


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tiny_pair(tmp_path_factory.mktemp("pair"))
    return load_model(folder / "target"), load_model(folder / "draft")


def of_pass(model, params, tokens, scored):
    """The products of a pass of a model, without any of the timers' code."""

    def run(tokens, cache):
        hidden = model.forward(params, tokens, cache).hidden
        return model.unembed(params, hidden[:, -scored:])

    cache = model.init_cache(params, 1, SLOTS)
    return products(jax.make_jaxpr(run)(jnp.zeros((1, tokens), jnp.int32), cache).jaxpr)


@pytest.fixture
def caught(monkeypatch):
    """Keeps loops and what they begin with, and times nothing."""
    loops = []
    monkeypatch.setattr(passes, "loop_timer", lambda run, carry, *_: loops.append((run, carry)))
    return loops


@pytest.mark.parametrize("k, num_passes", [(0, 0), (4, 0), (4, 1), (4, 4), (1, 2)])
def test_a_timed_round_is_the_passes_of_a_round(pair, caught, k, num_passes):
    target, draft = pair
    passes.round_timer(target, draft, k, num_passes, SLOTS, 1, iterations=3)
    run, carry = caught[0]
    laid_out = target.cpu_layout.prepare(k + 1)  # as the decoder lays weights out for such rounds
    expected = of_pass(target.model, laid_out, k + 1, k + 1)
    if num_passes:  # the first feeds two tokens and scores one
        laid_out = draft_params(draft, laid_out, 1, k)
        later = of_pass(draft.model, laid_out, 1, 1)
        expected += of_pass(draft.model, laid_out, 2, 1) + (num_passes - 1) * later
    assert products(jax.make_jaxpr(run)(carry).jaxpr) == 3 * expected


def test_a_timed_round_moves_no_cache(pair, caught):
    passes.round_timer(*pair, 2, 2, SLOTS, 2, iterations=2)
    run, carry = caught[0]
    lengths = lambda carry: [cache.length.tolist() for _, cache in carry[1:]]
    before = lengths(carry)
    assert before == [[62, 62], [63, 63], [63, 63]]  # half of the slots
    assert lengths(run(carry)) == before


DRAFTS = {
    "sequential": lambda target: MtpConfig.of_target(target, num_modules=3, protocol="sequential"),
    "block": lambda target: block_heads.new(target.hidden_size, target.vocab_size, (1, 3)),
    "dflash": lambda target: DFlashConfig.of_target(target, block_size=5),
    "dspark": lambda target: DSparkConfig.of_target(target, block_size=4, markov_rank=3),
}


@pytest.fixture
def block():
    yield register(block_kind.KIND)
    registry.unregister("block")


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("name", DRAFTS)
def test_what_a_kind_says_of_its_passes_is_what_its_drafter_runs(pair, name):
    """Of drafters whose passes are timed together: every product of a round; no slot is kept."""
    target, K = pair[0], 3
    head = random_head(DRAFTS[name](target.config), jax.random.key(0))
    config = SpeculativeConfig(head.method, K)
    drafter = make_drafter(config, tapped_model(target, head), head)
    planned = roofline.round_work(target.config, head.config, K, Setting(1, SLOTS))
    params = {"head": head.params, "target": target.params}
    system = System(tapped_model(target, head), drafter, GREEDY, K)  # as a decoder has it
    step = passes.drafting_step(system, params, SLOTS, 1)
    args = (params, jnp.zeros(1, jnp.int32), step.carry)
    flops = sum(one.count * one.work.flops for one in planned.passes if one.name != "verify")
    assert 2 * products(jax.make_jaxpr(step.run)(*args).jaxpr) == flops
    lengths = lambda carry: [x.tolist() for x in jax.tree.leaves(carry[0]) if x.shape == (1,)]
    assert lengths(step.carry) == lengths(jax.jit(step.run)(*args)[1]) == [[SLOTS // 2]]


def test_a_drafter_is_timed_beside_a_target_with_a_shorter_window():
    target = loaded(MISTRAL)
    head = random_head(DFlashConfig.of_target(target.config, block_size=5), jax.random.key(0))
    model = tapped_model(target, head)
    drafter = make_drafter(SpeculativeConfig("dflash", 3), model, head)
    params = {"head": head.params, "target": target.params}
    step = passes.drafting_step(System(model, drafter, GREEDY, 3), params, SLOTS, 2)
    assert step.carry[3].shape == (2, 4, len(head.config.taps) * target.config.hidden_size)


def test_what_is_timed_is_what_the_costs_of_every_k_need(pair):
    target, draft = pair
    wanted = costs.timer_makers(
        target, {"standalone": draft}, {"standalone": {1, 4}, "ngram": {6}}, 128, 1
    )
    assert [*wanted] == [
        *(costs.TimedLoop("target", k) for k in (0, 1, 4, 6)),
        costs.TimedLoop("standalone", 4, 1),
        costs.TimedLoop("standalone", 4, 4),
    ]
