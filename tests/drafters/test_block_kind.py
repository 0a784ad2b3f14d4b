"""A kind from outside of the package that drafts a block in one pass goes where any kind goes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import block_kind
from support.block_heads import make_head, new
from support.block_kind import block_drafter
from support.tiny_models import LLAMA, random_weights

import spec_jax
from spec_jax import SpeculativeConfig, SpeculativeDecoder
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context
from spec_jax.drafters import register, registry
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.evaluation import costs
from spec_jax.loading import LoadedModel
from spec_jax.meshes import make_mesh
from spec_jax.models import transformer
from spec_jax.named import to_rule
from spec_jax.planning import programs, roofline
from spec_jax.planning.work import Setting
from spec_jax.sampling import make_sampler
from spec_jax.testing.certificate.reported import force_all
from spec_jax.testing.certificate.rounds import check_round
from spec_jax.testing.certificate.subjects import certified_rows, make_subject, prefixes

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5]]
TARGET = LoadedModel("tiny", transformer.model(LLAMA), random_weights(LLAMA), config=LLAMA)


@pytest.fixture(scope="module", autouse=True)
def registered():
    yield register(block_kind.KIND)
    registry.unregister("block")


@pytest.fixture(scope="module")
def head(registered):
    return make_head(new(LLAMA.hidden_size, LLAMA.vocab_size, taps=(1, 3)))


K = 4
TEXT = np.random.default_rng(5).integers(0, LLAMA.vocab_size, 12)


def rms(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def turn(x, positions):
    """Rotary embedding of x[T,N,H], one pair of dimensions at a time."""
    out, H = np.empty_like(x), x.shape[-1]
    for j in range(H // 2):
        angle = positions[:, None] * 10000.0 ** (-2 * j / H)
        a, b = x[..., j], x[..., j + H // 2]
        out[..., j] = a * np.cos(angle) - b * np.sin(angle)
        out[..., j + H // 2] = b * np.cos(angle) + a * np.sin(angle)
    return out


def block_logits(config, params, features, pending, num_draft, shift=0):
    """Logits f64[K,V] of a block, from the states f64[n,E] of the tokens before the pending one."""
    p, layer, n = params["head"], config.layer, len(features)
    heads = lambda x: x.reshape(len(x), -1, layer.head_dim)
    block = [pending] + [layer.vocab_size - 1] * (num_draft - 1)
    x, context = p["embed"][block], features @ p["fc"]
    before, inside = np.arange(n), n + shift + np.arange(num_draft)
    for i in range(layer.num_hidden_layers):
        w = p["layers"][str(i)]
        a = rms(x, w["attention_norm"])
        key = lambda c, at: turn(rms(heads(c @ w["k"]), w["k_norm"]), at)
        k = np.concatenate([key(context, before), key(a, inside)])
        v = np.concatenate([heads(context @ w["v"]), heads(a @ w["v"])])
        q = turn(rms(heads(a @ w["q"]), w["q_norm"]), inside)
        scores = np.einsum("tnh,sh->nts", q, k[:, 0]) / np.sqrt(layer.head_dim)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("nts,sh->tnh", weights, v[:, 0]).reshape(num_draft, -1) @ w["o"]
        h = rms(x, w["mlp_norm"])
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    return rms(x, p["norm"]) @ params["target"]["head"]


@pytest.mark.exhaustive
def test_a_block_is_scored_as_by_independent_arithmetic_after_every_prefix(head):
    """After prefill, and after a commit of any number of tokens; one row a prefix."""
    config, n = head.config, np.arange(1, 8)
    model = transformer.model(LLAMA, config.taps)
    drafter = block_kind.KIND.make_drafter(head, model, SpeculativeConfig("block", K))
    params, B = {"head": head.params, "target": TARGET.params}, len(n)
    tokens = jnp.asarray(np.tile(TEXT, (B, 1)), jnp.int32)
    features = transformer.forward(TARGET.params, tokens, config=LLAMA, taps=config.taps).features
    sampler = make_sampler(SamplerConfig(temperature=1.0), B, LLAMA.vocab_size)

    @jax.jit
    def propose(state, length):
        request = jnp.zeros(B, jnp.uint32)
        context = Context(tokens, length, sampler, request, False, True, True)
        return drafter.propose(params, state, context, K)

    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, features[0]))

    def check(proposal, lengths):
        for b, length in enumerate(lengths):
            expected = block_logits(config, exact[0], exact[1][:length], TEXT[length], K)
            np.testing.assert_allclose(proposal.logits[b], expected, atol=2e-4)
            late = block_logits(config, exact[0], exact[1][:length], TEXT[length], K, shift=1)
            assert np.abs(late - expected).max() > 1e-2  # one position further is another block

    state = drafter.init(params, B, 16)
    state = drafter.prefill(
        params, state, tokens[:, :8], jnp.asarray(n), tokens[:, 0], features[:, :8]
    )
    proposal, state = propose(state, jnp.asarray(n))
    check(proposal, n)
    more = 1 + n % 4
    fed = n[:, None] + np.arange(4)
    new = jnp.take_along_axis(features, jnp.asarray(fed)[:, :, None], axis=1)
    state = drafter.commit(params, state, tokens[:, :4], jnp.asarray(more), new, None)
    check(propose(state, jnp.asarray(n + more))[0], n + more)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [{}, {"adaptive": {"buckets": (0, 3)}}], ids=["fixed", "adaptive"]
)
def test_it_decodes_as_plain_decoding_does(head, options):
    config = SpeculativeConfig(
        "block", rejection_sampling_strategy="match", **(options or {"num_speculative_tokens": K})
    )
    samplers = [SamplerConfig(), SamplerConfig(temperature=1.0, seed=3)]
    decoder, plain = SpeculativeDecoder(TARGET, head, config), SpeculativeDecoder(TARGET)
    fast, slow = (d.generate(PROMPTS, 14, sampler=samplers) for d in (decoder, plain))
    assert [row.tokens for row in fast] == [row.tokens for row in slow]
    assert decoder.stats.drafted > 0


def of_toy(target):
    """The toy target's states are its logits, so the head is as wide as its vocabulary."""
    return new(target.model.vocab_size, target.model.vocab_size, num_layers=1)


def make(target):
    return block_drafter(of_toy(target), target.model)


def make_params(target):
    return {"head": make_head(of_toy(target)).params, "target": target.params}


@pytest.mark.exhaustive
def test_a_round_of_it_is_proved():
    """The heart of a certificate, without the loop: all outcomes of rounds of 2 drafts."""
    subject, rows = make_subject(make, make_params, 0), certified_rows()[:3]
    system = subject.system(to_rule("residual"), 2)
    forced = force_all(system, subject.params, rows, prefixes(subject, 3, 1), 3, 512)
    found = check_round(system, forced, rows, subject.logits_of, 1e-6)
    assert found.error <= 1e-6 and found.num_outcomes >= 20


@pytest.mark.exhaustive
def test_its_distribution_is_certified():
    certificate = spec_jax.certify("residual", make, params=make_params, trials=500)
    assert certificate.failure is None and certificate.max_error <= 1e-6


def test_its_passes_are_planned():
    config, setting = new(LLAMA.hidden_size, LLAMA.vocab_size, taps=(1, 3)), Setting(2, 100)
    verify, refresh, draft = roofline.decode_round(LLAMA, config, K, setting).passes
    assert [(x.name, x.count) for x in (verify, refresh, draft)] == [
        ("verify", 1),
        ("refresh", 1),
        ("draft", 1),
    ]
    size = lambda names: sum(
        w.size
        for path, w in jax.tree_util.tree_leaves_with_path(make_head(config).params)
        if path[-1].key in names
    )
    own, B = 2 * LLAMA.hidden_size * LLAMA.vocab_size, setting.batch  # the target's output head
    kv, ctx, heads = 2 * 2 * 4, setting.context, 2  # key-value numbers of a token, query heads
    assert refresh.work.flops == 2 * B * (K + 1) * size({"fc", "k", "v"})
    maps = size({"q", "k", "v", "o", "gate", "up", "down"})
    assert draft.work.flops == B * K * (2 * maps + own + 2 * heads * kv * ctx)
    one = (
        roofline.memory(LLAMA, config, setting).params
        - roofline.memory(LLAMA, None, setting).params
    )
    assert one == setting.itemsize * make_head(config).num_params
    job = programs.Job(target=LLAMA, draft=config, num_draft=K, slots=64, dtype="float32")
    traced = programs.trace_decode(job, make_mesh(job.mesh))
    assert "stablehlo.while" in traced.lowered.as_text()
    assert {x.shape for x in jax.tree.leaves(traced.params["draft"])} == {
        w.shape for w in jax.tree.leaves(make_head(config).params)
    }


@pytest.mark.exhaustive
def test_it_is_compared_and_its_speed_up_predicted(head):
    found = spec_jax.compare(
        TARGET, {"block": head}, PROMPTS, ks=K, temperatures=1.0, max_new_tokens=8
    )
    plain, drafted = found.results
    assert plain.cell.is_plain and drafted.cell.rule == "residual"
    assert drafted.predicted_speedup > 0 and drafted.round_time.draft_cost >= 0
    assert [*found.costs.first_ms] == ["block"] and not found.costs.draft_ms


def test_all_its_passes_are_timed_together(head):
    wanted = costs.timer_makers(TARGET, {"block": head}, {"block": {2, 5}}, 64, 1)
    passes = [costs.TimedLoop("target", k) for k in (0, 2, 5)]
    assert [*wanted] == [*passes, costs.TimedLoop("block", 2, 2), costs.TimedLoop("block", 5, 2)]
    times = {what: np.full(4, 2.0 + what.num_passes * what.num_draft) for what in wanted}
    found = costs.Costs.of_times(times, slots=64, batch=1)
    assert found.first_ms == {"block": {2: 4.0, 5: 10.0}}
    assert found.draft_cost("block", 5) == 10 / 5 / 2 and found.is_significant("block")


def test_without_a_format_it_is_neither_loaded_nor_saved(head, tmp_path):
    with pytest.raises(ConfigError, match="method 'block' has no weights to load: the format of"):
        spec_jax.load_draft("zoo/draft", TARGET, method="block")
    with pytest.raises(ConfigError, match="its kind 'block' has no `write`"):
        head.save(tmp_path, TARGET)


def test_weights_of_nested_tables_are_named_where_they_are_wrong(head):
    params = {**head.params, "layers": {**head.params["layers"]}}
    params["layers"]["1"] = {**params["layers"]["1"], "q": jnp.zeros((1, 1))}
    wrong = dataclasses.replace(head, params=params)
    with pytest.raises(WeightsError, match=r"layers\.1\.q has shape \[1, 1\]; its config asks for"):
        SpeculativeDecoder(TARGET, wrong, SpeculativeConfig("block", K))


@pytest.mark.exhaustive
def test_it_decodes_on_a_mesh(head):
    plain = SpeculativeDecoder(TARGET).generate(PROMPTS, 8)
    decoder = SpeculativeDecoder(
        TARGET, head, SpeculativeConfig("block", K), mesh="data:2,tensor:2"
    )
    assert [row.tokens for row in decoder.generate(PROMPTS, 8)] == [row.tokens for row in plain]
