"""Sampling parameters against a brute-force oracle, and draws against their distribution."""

import dataclasses
import functools
import itertools
import random
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spec_jax import testing
from spec_jax.config import GREEDY_BELOW, SamplerConfig
from spec_jax.errors import ConfigError
from spec_jax.processors import TokenCounts
from spec_jax.sampling import (
    _one_by_one,
    argmax,
    draft_samplers,
    filters_of,
    is_dropped,
    make_sampler,
    process,
    sample,
    top_k,
)

INF = float("inf")
V, T = 40, 4
run = jax.jit(process, static_argnames="is_argmax")

PENALTIES = dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)
PENALTIES |= dict(logit_bias={1: 1.0, 2: -INF})
EACH = {
    "plain": SamplerConfig(temperature=1.0),
    "greedy": SamplerConfig(),
    "temperature": SamplerConfig(temperature=0.4),
    "top-k": SamplerConfig(temperature=1.0, top_k=5),
    "top-k above V": SamplerConfig(temperature=1.0, top_k=100),
    "top-p": SamplerConfig(temperature=1.0, top_p=0.8),
    "top-k, top-p": SamplerConfig(temperature=1.0, top_k=6, top_p=0.7),
    "min-p": SamplerConfig(temperature=1.0, min_p=0.2),
    "repetition": SamplerConfig(temperature=1.0, repetition_penalty=1.7),
    "reward": SamplerConfig(temperature=1.0, repetition_penalty=0.6),
    "presence": SamplerConfig(temperature=1.0, presence_penalty=1.1),
    "frequency": SamplerConfig(temperature=1.0, frequency_penalty=0.7),
    "bias": SamplerConfig(temperature=1.0, logit_bias={0: 2.5, 5: -INF, 39: -3.0}),
    "greedy, penalties": SamplerConfig(frequency_penalty=2.0, repetition_penalty=2.0),
    "all": SamplerConfig(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05, **PENALTIES),
}


def scene(rows, vocab=V, nodes=T, seed=0, scale=2.0):
    """Logits, prompts, outputs and drafts in which tokens repeat, some of them often."""
    draw = np.random.RandomState(seed)
    logits = (scale * draw.standard_normal((rows, nodes, vocab))).astype(np.float32)
    prompts = [draw.randint(0, vocab, draw.randint(1, 9)) for _ in range(rows)]
    outputs = [draw.randint(0, vocab // 2, draw.randint(1, 12)) for _ in range(rows)]
    drafted = draw.randint(0, 3, (rows, nodes - 1))  # few ids: repeats among the drafts
    return logits, prompts, outputs, drafted


def after(sampler, prompts, outputs, vocab=V):
    """The sampler after prompts and outputs of different lengths."""

    def pad(rows):
        lengths = [len(row) for row in rows]
        full = np.zeros((len(rows), max(*lengths, 1)), np.int32)
        for row, tokens in zip(full, rows):
            row[: len(tokens)] = tokens
        return jnp.asarray(full), jnp.asarray(lengths)

    return sampler.start(*pad(prompts), vocab).advance(*pad(outputs))


def expected_of(config, logits, prompt=(), output=(), margin=1e-5):
    """The oracle's distribution f64[V] of one node, and whether it decides clearly what is kept."""
    dists = []
    for x in (0.0, -margin, margin):
        top_p = config.top_p if config.top_p == 1 else min(config.top_p + x, 1.0)
        near = dataclasses.replace(config, top_p=top_p, min_p=min(config.min_p * (1 + x), 1.0))
        dists.append(testing.reference_distribution(logits, near, prompt, [*output]))
    return dists[0], ((dists[1] > 0) == (dists[2] > 0)).all()


def compare(configs, logits, prompts, outputs, drafted, margin=1e-5):
    """Runs both; every kept set must be equal and every kept probability close."""
    B, num_nodes, vocab = logits.shape
    sampler = after(make_sampler(configs, B, vocab), prompts, outputs, vocab)
    x = np.asarray(run(jnp.asarray(logits), sampler, jnp.asarray(drafted)))
    for row, node in itertools.product(range(B), range(num_nodes)):
        history = [*outputs[row], *drafted[row][:node]]
        dist, is_clear = expected_of(
            configs[row], logits[row, node], [*prompts[row]], history, margin
        )
        assert is_clear, "the example decides nothing clearly; choose another seed"
        np.testing.assert_array_equal(x[row, node] > -INF, dist > 0)
        probs = np.exp(x[row, node].astype(np.float64) - x[row, node].max())
        np.testing.assert_allclose(probs / probs.sum(), dist, rtol=1e-4, atol=1e-9)
    return x


def test_every_parameter_and_all_together_in_one_batch_of_mixed_rows():
    compare(list(EACH.values()), *scene(len(EACH)))


def test_a_row_does_not_depend_on_its_neighbours():
    """Filters and penalties that any row wants run for all; the others must not notice.

    Nor does it matter whether a feature that a row does not use is in the program.
    """
    configs = list(EACH.values())
    B = len(configs)
    logits, prompts, outputs, drafted = scene(B)
    drafted = jnp.asarray(drafted)
    sampled = lambda configs: after(make_sampler(configs, B, V), prompts, outputs)
    mixed = run(logits, sampled(configs), drafted)
    quiet = SamplerConfig(temperature=1.0, logit_bias={0: 0.0})
    for row, config in enumerate(configs):
        company = [quiet] * B
        company[row] = config
        alone = run(logits, sampled(company), drafted)
        np.testing.assert_array_equal(alone[row], mixed[row])


WIDE = 300  # more than the filters look at before they sort everything
CASES = [  # top_k, top_p, scale of the logits, and the least and most tokens kept
    (0, 0.9, 4.0, 1, 127),
    (128, 1.0, 2.0, 128, 128),
    (100, 0.99, 0.3, 90, 99),
    (0, 0.95, 0.3, 129, 299),  # from here on the narrow width does not suffice
    (129, 1.0, 2.0, 129, 129),
    (200, 1.0, 2.0, 200, 200),
    (250, 0.97, 0.3, 129, 249),
    (200, 0.5, 2.0, 1, 127),
]
WAYS = {"none is wide": [0, 1, 2], "one by top-p": [3, 0, 1], "one by top-k": [2, 4, 0]}


@pytest.mark.parametrize("rows", [*WAYS.values(), [5, 6, 7]], ids=[*WAYS, "all"])
def test_large_vocabularies_take_the_narrow_and_the_wide_path(rows):
    top_k, top_p, scale, least, most = zip(*(CASES[row] for row in rows))
    logits, *history = scene(3, vocab=WIDE, nodes=2, seed=7, scale=1.0)
    logits *= np.asarray(scale, np.float32)[:, None, None]
    configs = [SamplerConfig(1.0, top_k=k, top_p=p) for k, p in zip(top_k, top_p)]
    kept = (compare(configs, logits, *history, margin=1e-6) > -INF).sum(axis=-1).T
    assert (np.asarray(least) <= kept).all() and (kept <= np.asarray(most)).all()


TOP_KS = {
    "few": [1, 2, 9, 40],  # with their ties fewer than are found without sorting everything
    "few without ties": [9, 127],
    "any": [0, 0, 1, 2, 9, 40, 127, 128, 129, 200],
}


def tied(vocab, seed, top_ks, rows=48):
    """Configs and logits of few values, such as bfloat16 has, so that thresholds hit ties."""
    draw = np.random.default_rng(seed)
    values, frequencies = [-3.0, -1.5, -0.0, 0.0, 0.5, 1.25], [0.4, 0.3, 0.1, 0.1, 0.05, 0.05]
    logits = draw.choice(values, (rows, 2, vocab), p=frequencies)
    logits[::3] = draw.normal(size=logits[::3].shape).astype(jnp.bfloat16)
    logits[1] = -np.arange(vocab)
    choose = lambda values: draw.choice(values, rows).tolist()
    columns = dict(
        temperature=choose([0.5, 0.8, 2.0]),
        top_k=choose(TOP_KS[top_ks]),
        top_p=choose([1.0, 0.05, 0.3, 0.52, 0.77, 0.93, 0.99]),
        min_p=choose([0.0, 0.0, 0.013, 0.17, 0.9]),
    )
    configs = [SamplerConfig(**dict(zip(columns, row))) for row in zip(*columns.values())]
    logits[2, :, 12:] = logits[2, :, :12:2] = -INF  # six are left: 1, 3, ...
    logits[2, :, 1:12:2] = 1.0
    configs[1] = SamplerConfig(temperature=1.0, min_p=1e-40)  # below what float32 has
    configs[2] = SamplerConfig(temperature=1.0, top_p=0.5)
    configs[4] = SamplerConfig(temperature=2.0, top_p=0.98, top_k=max(TOP_KS[top_ks]))
    return configs, logits.astype(np.float32)


def check_ties(vocab, seed, top_ks):
    """Every set of a clear margin is the oracle's."""
    configs, logits = tied(vocab, seed, top_ks)
    x = np.asarray(run(logits, make_sampler(configs, len(configs), vocab)))
    num_checked = 0
    for config, row, ours in zip(configs, logits, x):
        for node, kept in zip(row, ours > -INF):
            dist, is_clear = expected_of(config, node)
            if is_clear:
                np.testing.assert_array_equal(kept, dist > 0)
                num_checked += 1
    assert num_checked > 1.5 * len(configs)
    return x


@pytest.mark.parametrize(("vocab", "top_ks"), [(V, "any"), *((WIDE, x) for x in TOP_KS)])
def test_top_p_keeps_the_smallest_set_and_other_filters_all_ties(vocab, top_ks):
    x = check_ties(vocab, vocab, top_ks)
    np.testing.assert_array_equal(np.flatnonzero(x[2, 0] > -INF), [1, 3, 5])


@pytest.mark.exhaustive
@pytest.mark.parametrize("vocab", [12, 128, 129, 1000])
def test_tied_logits_of_many_seeds_are_filtered_as_by_the_oracle(vocab):
    for seed, top_ks in itertools.product(range(10), TOP_KS):
        check_ties(vocab, seed, top_ks)


def test_the_narrow_width_is_not_found_by_sorting_everything():
    """XLA sorts if the values are sliced again; on a CPU that takes twenty times as long."""
    sampler = make_sampler(EACH["all"], 1, WIDE)
    program = jax.jit(is_dropped).lower(jnp.zeros((1, 2, WIDE)), sampler.filters).compile()
    lines = program.as_text().splitlines()
    assert sum("TopK" in line for line in lines) == sum(" sort(" in line for line in lines) == 1


EXTREMES = dict(temperature=[1e-5, 0.5, 1e20], repetition_penalty=[1e-10, 1.0, 1e10])
EXTREMES |= dict(presence_penalty=[-1e20, 1e20], frequency_penalty=[-1e20, 1e20])
EXTREMES |= dict(logit_bias=[{1: 1e20}, {1: -1e20}, {1: -3e38}], top_p=[1e-29], min_p=[1e-300])


def test_the_extremes_of_every_parameter_overflow_nothing():
    rows = itertools.product(*EXTREMES.values())
    configs = [SamplerConfig(**dict(zip(EXTREMES, row))) for row in rows]
    logits = np.tile(np.float32([-100, 100, 0, 7]), (len(configs), 1, 1))
    texts = [[*range(4)]] * len(configs), [[0, 1, 1]] * len(configs)
    x = run(logits, after(make_sampler(configs, len(configs), 4), *texts, 4))
    assert not np.isnan(x).any() and np.isfinite(x.max(axis=-1)).all()


def test_a_temperature_is_greedy_whatever_float32_makes_of_it():
    below = float(np.nextafter(GREEDY_BELOW, 0))
    rows = [SamplerConfig(temperature=x) for x in (below, GREEDY_BELOW, 1.0)]
    assert make_sampler(rows, 3, V).is_greedy.tolist() == [True, False, False]


MIXED = dict(temperature=[0.0, 0.3, 1.0, 1.9], top_k=[0, 1, 3, 9, 20], top_p=[0.05, 0.6, 0.95, 1.0])
MIXED |= dict(min_p=[0.0, 0.02, 0.3], repetition_penalty=[0.7, 1.0, 1.4])
MIXED |= dict(presence_penalty=[-0.5, 0.0, 1.0], frequency_penalty=[-0.25, 0.0, 0.5])
MIXED |= dict(logit_bias=[{}, {3: -INF}, {0: -INF, 8: 2.5}, {1: -3.5, 4: 0.7}])


def test_any_mix_of_parameters_equals_the_oracle():
    draw = random.Random(0)
    mix = lambda: SamplerConfig(**{name: draw.choice(values) for name, values in MIXED.items()})
    compare([mix() for _ in range(75)], *scene(75, vocab=10, nodes=3, seed=1))


def test_filters_keep_a_token_however_the_compiler_rounds():
    """Logits that are computed in the same program, which XLA may compute again with other bits.

    The threshold of one copy then lies above every logit of the other.
    """
    options = dict(
        repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.3, logit_bias={1: 0.5}
    )
    config = SamplerConfig(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05, **options)
    B, draw = 4096, np.random.default_rng(0)
    x, n = draw.normal(size=(B, 3)).astype(np.float32), draw.integers(0, 5, (B, 3), np.int32)
    sampler = make_sampler(config, B, 3)
    as_users_compile = {"xla_backend_optimization_level": 3}

    @functools.partial(jax.jit, compiler_options=as_users_compile)
    def run(x, n):
        own = sampler.start(jnp.zeros((B, 1), jnp.int32), jnp.zeros(B, jnp.int32), 3)
        bias, penalties = own.processors
        penalties = penalties.replace(state=TokenCounts(n > 1, n))
        return process((x * 1.7 + n)[:, None], own.replace(processors=(bias, penalties)))

    kept = run(x, n)
    assert jnp.isfinite(kept.max(axis=-1)).all()


def test_greedy_without_filters_has_the_same_argmax():
    """What the greedy rule leaves out cannot change its token."""
    configs = [SamplerConfig(), EACH["greedy, penalties"], SamplerConfig(logit_bias={3: 9.0})]
    logits, prompts, outputs, drafted = scene(3, seed=2)
    args = (logits, after(make_sampler(configs, 3, V), prompts, outputs), drafted)
    np.testing.assert_array_equal(
        run(*args, is_argmax=True).argmax(axis=-1), run(*args).argmax(axis=-1)
    )


@pytest.mark.parametrize("name", ["plain", "greedy", "top-k", "top-p", "min-p", "all"])
def test_a_nan_stays_and_spoils_no_other_row(name):
    configs = [EACH[name], EACH["all"], EACH["greedy"]]
    logits, prompts, outputs, drafted = scene(3)
    args = (after(make_sampler(configs, 3, V), prompts, outputs), jnp.asarray(drafted))
    clean = np.asarray(run(logits, *args))
    logits[0, 1, 7] = np.nan
    x = np.asarray(run(logits, *args))
    assert np.isnan(x[0, 1]).any()
    np.testing.assert_array_equal(x[1:], clean[1:])
    np.testing.assert_array_equal(x[0, [0, 2, 3]], clean[0, [0, 2, 3]])


def test_draws_match_the_processed_distribution_and_never_take_a_dropped_token():
    dist = jnp.log(jnp.asarray([0.5, 0.25, 0.0, 0.2, 0.05])) + 3.0  # unnormalised
    gumbel = jax.random.gumbel(jax.random.key(0), (40_000, 5))
    tokens = sample(jnp.broadcast_to(dist, gumbel.shape), gumbel)
    assert tokens.dtype == jnp.int32
    seen = np.bincount(np.asarray(tokens), minlength=5)
    assert seen[2] == 0
    expected = 40_000 * np.asarray([0.5, 0.25, 0.2, 0.05])
    assert stats.chisquare(np.delete(seen, 2), expected).pvalue > 1e-4


@pytest.mark.parametrize(
    "options", [dict(top_k=np.uint32(3)), dict(top_p=Fraction(1, 2)), dict(min_p=1), dict(top_k=2)]
)
def test_a_number_of_any_type_makes_the_same_arrays(options):
    """As one type a parameter has one program."""
    filters = filters_of([SamplerConfig(temperature=1.0, **options)])
    types = {name: str(x.dtype) for name, x in filters.items()}
    assert types == {"top_k": "int32", "top_p": "float32", "log_min_p": "float32"}


def test_filters_of_greedy_rows_alone_are_left_out():
    cold = SamplerConfig(top_k=3, top_p=0.5, min_p=0.1)
    assert make_sampler([cold, SamplerConfig()], 2, V).filters is None
    assert make_sampler([cold, EACH["plain"]], 2, V).filters is None
    assert make_sampler([cold, EACH["top-k"]], 2, V).filters is not None


def test_rows_of_one_config_get_seeds_that_follow_and_wrap():
    sampler = make_sampler(SamplerConfig(seed=2**32 - 2), 3, V)
    assert sampler.seed.dtype == jnp.uint32
    assert sampler.seed.tolist() == [2**32 - 2, 2**32 - 1, 0]
    own = [SamplerConfig(seed=s) for s in (5, 5, 1)]
    assert make_sampler(own, 3, V).seed.tolist() == [5, 5, 1]
    assert make_sampler(own, 3, V, seeds=[7, 8, 9]).seed.tolist() == [7, 8, 9]


INVALID_ARGS = [
    (([SamplerConfig()] * 2, 3, V), "2 sampler configs for 3 rows"),
    ((SamplerConfig(), 3, V, [1, 2]), "seeds is .*; expected 3 integers"),
    ((SamplerConfig(), 2, V, [1, -2]), "seeds is"),
    ((SamplerConfig(), 2, V, [1, 2**32]), "seeds is"),
    ((SamplerConfig(logit_bias={40: 1.0}), 3, V), "token 40; the vocabulary is 40"),
]


@pytest.mark.parametrize(("args", "named"), INVALID_ARGS)
def test_a_sampler_that_does_not_fit_its_batch_is_an_error(args, named):
    with pytest.raises(ConfigError, match=named):
        make_sampler(*args)


def test_insert_row_replaces_one_row_of_every_parameter():
    many, one = list(EACH.values())[:5], EACH["all"]
    many[0] = EACH["all"]
    full = make_sampler(many, 5, V, seeds=range(5)).insert_row(3, make_sampler(one, 1, V, [9]))
    expected = make_sampler([*many[:3], one, many[4]], 5, V, seeds=[0, 1, 2, 9, 4])
    jax.tree.map(np.testing.assert_array_equal, full, expected)


NAMES = [
    ("bias", "logit_bias"),
    ("presence", "penalties"),
    ("min-p", "filters"),
    ("greedy", "temperature"),
]


@pytest.mark.parametrize(("name", "feature"), NAMES)
def test_a_row_needs_a_batch_that_was_made_with_its_features(name, feature):
    plain, other = make_sampler(EACH["plain"], 2, V), make_sampler(EACH[name], 1, V)
    with pytest.raises(ConfigError, match=f"only one has .*{feature}"):
        plain.insert_row(0, other)
    both = make_sampler([EACH["plain"], EACH[name]], 2, V)
    row = jax.tree.map(lambda x: x[1:], both)
    jax.tree.map(np.testing.assert_array_equal, both.insert_row(1, row), both)


def test_argmax_is_the_first_of_the_largest():
    nan, inf = np.nan, np.inf
    rows = [[1, 3, 3, 2], [-inf] * 4, [inf, 1, inf, 0], [0, nan, 5, nan], [nan] * 4, [-0.0, 0] * 2]
    x = jnp.asarray(rows, jnp.float32)
    np.testing.assert_array_equal(argmax(x), jnp.argmax(x, axis=-1))
    assert argmax(x).dtype == jnp.int32


def test_the_few_largest_are_those_of_sorting():
    """On a TPU they are found one by one."""
    x = np.random.default_rng(0).integers(0, 3, (6, V)).astype(np.float32)  # with ties
    x[1] = x[2, 2:] = -INF
    x[3, [5, 9]] = INF
    for k in (1, 4):
        expected = jax.lax.top_k(x, k)
        for found in (top_k(x, k), _one_by_one(x, k=k)):
            jax.tree.map(np.testing.assert_array_equal, tuple(found), tuple(expected))


def test_drafts_are_drawn_as_given_or_at_the_drafters_own_temperature():
    warm, cold = SamplerConfig(temperature=0.8, top_k=3), SamplerConfig()
    own = dataclasses.replace(warm, temperature=0.0)
    assert draft_samplers(None, [warm, cold], 0.0) == [own, cold]
    assert draft_samplers(None, warm, None) == warm
    assert draft_samplers(cold, warm, 0.5) == cold
    assert draft_samplers(None, cold, 0.5) == cold  # a greedy target has greedy drafts
