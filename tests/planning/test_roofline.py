"""Rounds and predictions: sums by hand, what must grow with what, and the compiled program."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.engine.adaptive.policy import expected_tokens
from spec_jax.engine.stats import predicted_speedup
from spec_jax.planning.chips import CHIPS, Chip
from spec_jax.planning.presets import PRESETS
from spec_jax.planning.roofline import (
    Setting,
    Stack,
    Work,
    best,
    memory,
    predict,
    prefill_work,
    round_work,
)
from spec_jax.tree import DynamicTree, Tree

TARGET, DRAFT = PRESETS["llama-3.1-8b"], PRESETS["llama-3.2-1b"]
EAGLE = EagleConfig.of_target(TARGET, draft_vocab_size=32000)
MTP = MtpConfig.of_target(TARGET)
MODULES = MtpConfig.of_target(TARGET, num_modules=3, protocol="sequential")
DRAFTS = {"ngram": "ngram", "standalone": DRAFT, "eagle": EAGLE, "mtp": MTP, "modules": MODULES}
CHIP = Chip("of round figures", 1e9, 1e9, 1e12, 1e8, "a test", ("1",))


def test_pass_takes_what_the_slowest_of_the_three_takes():
    assert Work(1e12, 1e9, 1e8).floor_s(CHIP) == 1
    for work, slowest in ((Work(3e12, 2e9, 0), 3), (Work(1e12, 5e9, 0), 5), (Work(0, 0, 7e8), 7)):
        assert work.floor_s(CHIP) == slowest
    half = dataclasses.replace(CHIP, devices=2)  # one of its two devices
    assert Work(1e12, 1e9, 1e8).floor_s(half) == 2


def test_plain_8b_on_one_h100_is_bound_by_its_weights():
    # 16.06 GB of weights but for the embedding's rows, at 3.35 TB/s.
    setting = Setting(context=0)
    floor = round_work(TARGET, setting=setting).floor_s(CHIPS["h100"])
    by_hand = 2 * (8_030_261_248 - 128256 * 4096) / 3.35e12
    assert floor == pytest.approx(by_hand, rel=1e-3)
    assert 1 / floor == pytest.approx(223, rel=1e-2)


def test_rounds_have_the_passes_that_the_drafters_run():
    named = lambda draft, K: [(p.name, p.count) for p in round_work(TARGET, draft, K).passes]
    assert named("ngram", 5) == named(None, 0) == named(EAGLE, 0) == [("verify", 1)]
    assert named(DRAFT, 3) == [("verify", 1), ("draft", 1), ("draft", 2)]
    assert named(EAGLE, 3) == [("verify", 1), ("refresh", 1), ("draft", 2)]
    assert named(MODULES, 2)[1:] == [(x, 1) for x in ("refresh", "refresh", "draft", "refresh")]


def works(one):
    """The work of every pass of a round."""
    return [p.work for p in one.passes for _ in range(p.count)]


def test_passes_feed_what_the_drafters_feed():
    setting = Setting(context=100)
    run = lambda stack, *args: stack.run(setting, *args)
    target, again = (
        Stack.of(TARGET, setting),
        Stack.of(EAGLE, setting, skipped_weights=("fc", "input_norm")),
    )
    head = Stack.of(EAGLE, setting)
    one = round_work(TARGET, EAGLE, 3, setting)
    passes = works(one)
    assert passes == [run(target, 4, 4), run(head, 4, 1), run(again, 1, 1), run(again, 1, 1)]
    assert one.work == sum(passes, Work())
    assert one.floor_s(CHIP) == pytest.approx(sum(work.floor_s(CHIP) for work in passes))
    # The first pass of a standalone draft feeds two tokens.
    draft = Stack.of(DRAFT, setting)
    passes = works(round_work(TARGET, DRAFT, 2, setting))
    assert passes == [run(target, 3, 3), run(draft, 2, 1), run(draft, 1, 1)]
    # A module without an output head scores with the target's.
    module = Stack.of(MTP, setting)
    assert round_work(TARGET, MTP, 1, setting).passes[1].work == run(module, 2, 1, target)
    # Trees: a level a pass. The root has three children, of which two have one each.
    tree = Tree((0, 0, 0, 1, 2))
    passes = works(round_work(TARGET, EAGLE, 5, setting, tree))
    assert passes == [run(target, 6, 6), run(head, 3, 1), run(again, 2, 2)]
    dynamic = DynamicTree(60, 8, 10)
    passes = works(round_work(TARGET, EAGLE, 60, setting, dynamic))
    assert passes == [run(target, 61, 61), run(head, 9, 1), *[run(again, 10, 10)] * 7]


def test_prediction_is_leviathans_formula_with_the_costs_of_the_floor():
    rates, setting, chip = (0.8, 0.6, 0.5), Setting(batch=2), CHIPS["a100"]
    tokens = expected_tokens(rates)
    found = predict(TARGET, "ngram", 3, tokens[3], chip, setting)
    verify = round_work(TARGET, "ngram", 3, setting).floor_s(chip)
    plain = round_work(TARGET, setting=setting).floor_s(chip)
    assert found.speedup == pytest.approx(predicted_speedup(rates, 0.0, verify / plain))
    assert found.plain_tok_s == pytest.approx(2 / plain)
    assert found.tok_s == pytest.approx(2 * tokens[3] / verify)


def test_best_is_the_fastest_and_plain_where_nothing_is_accepted():
    chip = CHIPS["v5e"]
    tokens = expected_tokens([0.7] * 8)
    found = best(TARGET, EAGLE, tokens, chip)
    each = [predict(TARGET, EAGLE, k, t, chip).tok_s for k, t in enumerate(tokens)]
    assert found.num_draft == each.index(max(each)) and 0 < found.num_draft < 8
    assert best(TARGET, EAGLE, [1.0] * 5, chip).num_draft == 0
    # Copied tokens cost nothing while memory is the limit, so all of them are worth it.
    assert best(TARGET, "ngram", tokens, chip).num_draft == 8


def test_speculation_stops_paying_at_a_batch_that_fills_the_arithmetic():
    speedup = lambda batch: (
        predict(TARGET, EAGLE, 5, 3.0, CHIPS["v5e"], Setting(batch=batch, context=512)).speedup
    )
    sizes = [2**i for i in range(12)]
    size = next(size for size in sizes if speedup(size) <= 1)
    assert 1 < speedup(size // 2)


def test_memory_is_weights_and_caches():
    setting = Setting(batch=4, context=100)
    found = memory(TARGET, DRAFT, setting)
    assert found.params == 2 * (8_030_261_248 + 1_235_814_400)
    assert found.cache == 4 * 100 * 2 * 2 * 8 * (32 * 128 + 16 * 64)
    assert found.total == found.params + found.cache
    assert memory(TARGET, "ngram", setting) == memory(TARGET, None, setting)
    v5e = CHIPS["v5e"]
    assert found.shortfall(v5e) == found.total - 16e9
    assert memory(TARGET, DRAFT, dataclasses.replace(setting, mesh="tensor:4")).shortfall(v5e) == 0
    more = memory(TARGET, MODULES, setting).params - memory(TARGET, None, setting).params
    assert more == 3 * 2 * Stack.of(MODULES, setting).num_params


def test_prefill_is_every_tokens_maps_and_the_tokens_before_it():
    P, chunk, setting = 1000, 256, Setting(batch=2)
    found = prefill_work(TARGET, P, setting, chunk)
    maps = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096  # neither embedding, head nor norms
    # Scores and sums of 32 heads over the tokens before one: half of its pass, to half a token.
    attention = 2 * 2 * 32 * 32 * 128 * P * P / 2
    head = 2 * 128256 * 4096
    assert found.num_passes == 4
    assert found.work.flops == pytest.approx(2 * (2 * maps * P + attention + head), rel=1e-4)
    weights, rows, slot = 2 * (maps + 65 * 4096), 2 * 2 * P * 4096, 32 * 2 * 2 * 8 * 128
    cache = (
        2 * slot * (128 + 384 + 640 + 884 + P)
    )  # what stands halfway of each pass, and P written
    scored = head + 2 * 2 * 4 * 128256
    assert found.work.hbm_bytes == 4 * weights + rows + cache + scored
    shorter = [prefill_work(TARGET, P, setting, n).floor_s(CHIPS["v5e"]) for n in (1000, 100, 10)]
    assert shorter == sorted(shorter)  # the weights are read once a pass


_FIELDS = dict(batch=st.sampled_from([1, 4, 8, 64]), context=st.integers(0, 10_000))
_FIELDS |= dict(mesh=st.sampled_from(["data:1", "data:2,tensor:4", "tensor:8", "data:4"]))
_FIELDS |= dict(is_sampled=st.booleans(), is_draft_replicated=st.booleans())
_SETTINGS = st.builds(Setting, **_FIELDS)
_CHIPS = st.sampled_from(sorted(CHIPS)).map(CHIPS.get)
_DRAFTS = st.sampled_from(sorted(DRAFTS)).map(DRAFTS.get)


@settings(max_examples=60)
@given(_SETTINGS, _CHIPS, _DRAFTS, st.integers(1, 3), st.floats(0, 1))
# Bound by its links, with and without more context.
@example(Setting(batch=64, context=0, mesh="tensor:8"), CHIPS["a100-pcie"], "ngram", 1, 0.5)
def test_more_of_anything_is_never_faster(setting, chip, draft, num_draft, rate):
    a_round = lambda setting: round_work(TARGET, draft, num_draft, setting)
    floor = lambda setting, k=num_draft: round_work(TARGET, draft, k, setting).floor_s(chip)
    change = lambda **fields: dataclasses.replace(setting, **fields)
    # Rows that the mesh does not divide are sampled by several devices each, more of them by one.
    times = 8 if setting.is_sampled else 2
    assert floor(change(batch=times * setting.batch)) >= floor(setting)
    longer = change(context=setting.context + 1000)
    assert floor(longer) >= floor(setting)
    # Memory and arithmetic grow with the context, links do not.
    before, after = (a_round(s).work.times_s(chip) for s in (setting, longer))
    assert all(after[name] > before[name] for name in ("memory", "arithmetic"))
    assert after["links"] == before["links"]
    is_bound_by_links = lambda one: max(times := one.work.times_s(chip), key=times.get) == "links"
    if not all(map(is_bound_by_links, a_round(longer).passes)):
        assert floor(longer) > floor(setting)
    assert floor(setting, num_draft - 1) < floor(setting)
    faster = dataclasses.replace(chip, hbm_bytes_s=2 * chip.hbm_bytes_s, flops_s=2 * chip.flops_s)
    assert round_work(TARGET, draft, num_draft, setting).floor_s(faster) <= floor(setting)
    # A round costs a plain one at least, so nothing gains more than the tokens that it emits.
    tokens = expected_tokens([rate] * num_draft)[-1]
    found = predict(TARGET, draft, num_draft, tokens, chip, setting)
    assert found.speedup <= found.tokens + 1e-9
    one = round_work(TARGET, draft, num_draft, change(mesh="data:1")).work
    shared = round_work(TARGET, draft, num_draft, setting).work
    assert shared.flops <= one.flops
