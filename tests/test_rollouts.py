"""``rollout`` inside a caller's program: tokens, log-probabilities, counts, features."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.meshes import mesh
from support.tiny_heads import CONFIG, TARGET, UNROLLED, random_params

import spec_jax
from spec_jax import testing
from spec_jax.config import TreeConfig
from spec_jax.errors import ConfigError, PromptError, ShapeError
from spec_jax.meshes import use_mesh
from spec_jax.models import transformer

NEW = 10
WARM = spec_jax.SamplerConfig(temperature=2.0, top_k=12)
PROMPTS = jnp.array([[3, 1, 4, 1], [7, 2, 0, 0]])
LENGTHS = jnp.array([4, 2])
SEEDS = jnp.arange(40, 44)
HEAD = spec_jax.LoadedHead("head", UNROLLED["eagle-3"], random_params(UNROLLED["eagle-3"]))


@functools.partial(jax.jit, static_argnames="taps")
def one_pass(params, tokens, *, taps):  # without a cache
    out = transformer.forward(params, tokens, config=CONFIG, taps=taps)
    return transformer.unembed(params, out.hidden), out.features


def decoder(draft: str | None, **options) -> spec_jax.SpeculativeDecoder:
    config = draft and spec_jax.SpeculativeConfig(draft, 2, rejection_sampling_strategy="match")
    head = HEAD if draft == "eagle" else None
    return spec_jax.SpeculativeDecoder(TARGET, head, config, target_sampler=WARM, **options)


def params_of(target, draft):
    return {"target": target, "draft": draft and {"head": HEAD.params, "target": target}}


def sampling(of: spec_jax.SpeculativeDecoder, **options):
    """A jitted function of the target's weights, of seeds and of the place of a prompt's rows."""
    options = {"system": of.system(), "max_new_tokens": NEW, "samples": 2} | options
    sample = functools.partial(spec_jax.rollout, **options)

    @jax.jit
    def run(target, seeds):
        return sample(params_of(target, of.draft), PROMPTS, LENGTHS, WARM, seeds)

    return run


@functools.cache
def plain_rows():
    ids = [PROMPTS[0].tolist(), PROMPTS[1, :2].tolist()]
    rows = decoder(None).generate(ids, NEW, num_samples=2, seeds=SEEDS.tolist())
    return [[*ids[i // 2], *row.tokens] for i, row in enumerate(rows)]


def check(found: spec_jax.Rollout):
    """Asserts that tokens are plain decoding's, and counts and probabilities those of a pass."""
    lengths = np.repeat(LENGTHS, 2)
    passes = np.asarray(one_pass(TARGET.params, found.tokens, taps=())[0], np.float64)
    for row, (text, length) in enumerate(zip(plain_rows(), lengths)):
        n = len(text)
        assert found.tokens[row].tolist() == [*text, *[0] * (4 + NEW - n)]
        is_output = (np.arange(4 + NEW) >= length) & (np.arange(4 + NEW) < n)
        np.testing.assert_array_equal(found.is_output[row], is_output)
        logits = passes[row]
        own = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        drawn = [testing.reference_distribution(x, WARM, (), ()) for x in logits]
        assert found.counts.output[row] == n - length == NEW
        for i in range(4 + NEW):
            expected = [own[i - 1, text[i]], np.log(drawn[i - 1][text[i]])] if is_output[i] else 0
            values = [found.model_logprobs[row, i], found.logprobs[row, i]]
            np.testing.assert_allclose(values, expected, atol=2e-4)


@pytest.mark.representatives("eagle")
@pytest.mark.parametrize("draft", ["eagle", "ngram"])
def test_rows_are_plain_decodings_with_the_probabilities_of_a_pass_without_a_cache(draft):
    run = sampling(decoder(draft), has_features=draft == "eagle")
    found = run(TARGET.params, SEEDS)
    check(found)
    counts = found.counts
    np.testing.assert_array_equal(counts.output, 1 + counts.rounds + counts.accepted)
    assert (counts.drafted >= counts.accepted).all() and counts.passes == counts.rounds.max()
    if draft == "eagle":
        taps = HEAD.config.taps
        features = one_pass(TARGET.params, found.tokens, taps=taps)[1]
        is_fed = np.arange(4 + NEW) < np.repeat(LENGTHS, 2)[:, None] + NEW - 1
        expected = np.where(is_fed[..., None], features, 0)
        np.testing.assert_allclose(found.features, expected, atol=1e-4)
    other = jax.tree.map(lambda w: 1.1 * w, TARGET.params)
    assert (run(other, SEEDS).tokens != found.tokens).any()
    assert (run(TARGET.params, SEEDS + 4).tokens != found.tokens).any()
    assert run._cache_size() == 1


def test_outside_of_jit_the_rows_are_the_same_and_the_callers_arrays_stay():
    of = decoder("eagle")
    options = {"system": of.system(), "max_new_tokens": NEW, "samples": 2, "has_features": True}
    seeds = SEEDS.astype(jnp.uint32)
    for _ in range(2):
        params = params_of(TARGET.params, of.draft)
        found = spec_jax.rollout(params, PROMPTS, LENGTHS, WARM, seeds, **options)
    check(found)
    inside = sampling(of, has_features=True)(TARGET.params, SEEDS)
    np.testing.assert_allclose(found.features, inside.features, atol=1e-4)


@pytest.mark.exhaustive
def test_rows_that_finish_leave_and_the_others_go_on_with_another_k():
    """Rows stop at different lengths, so that both stages begin while some are running."""
    stop = [row[-4] for row in plain_rows()[:2]]
    of = decoder("eagle")
    whole = sampling(of, stop_tokens=stop)(TARGET.params, SEEDS)
    stages = {"stop_tokens": stop, "stages": ((3, 1), (1, 4))}
    staged = sampling(of, **stages)(TARGET.params, SEEDS)
    options = {"system": of.system(), "max_new_tokens": NEW, "samples": 2}
    given = (params_of(TARGET.params, of.draft), PROMPTS, LENGTHS, WARM, SEEDS)
    eager = spec_jax.rollout(*given, **options, **stages)  # outside of jit
    np.testing.assert_array_equal(eager.tokens, staged.tokens)
    assert len({*whole.counts.output.tolist()}) > 2
    for name in ("tokens", "is_output"):
        np.testing.assert_array_equal(getattr(staged, name), getattr(whole, name))
    np.testing.assert_array_equal(staged.counts.finish, whole.counts.finish)
    np.testing.assert_allclose(staged.logprobs, whole.logprobs, atol=2e-4)
    assert (staged.counts.drafted < whole.counts.drafted).any()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "draft, name", [("eagle", "data:2,tensor:4"), ("ngram", "data:4,tensor:2")]
)
def test_a_mesh_of_eight_devices_changes_no_token(draft, name):
    of = decoder(draft, mesh=mesh(name))
    head = of.draft and of.draft.params
    sample = functools.partial(spec_jax.rollout, system=of.system(), max_new_tokens=NEW, samples=2)

    @jax.jit
    def run(target, head):
        params = {"target": target, "draft": head and {"head": head, "target": target}}
        return sample(params, PROMPTS, LENGTHS, WARM, SEEDS)

    with use_mesh(mesh(name)):
        check(jax.device_get(run(of.target.params, head)))


def test_what_does_not_fit_is_refused_with_its_numbers():
    plain = decoder(None).system()
    of = functools.partial(spec_jax.rollout, params_of(TARGET.params, None), PROMPTS, LENGTHS, WARM)
    known = {"system": plain, "max_new_tokens": NEW, "samples": 2}
    with pytest.raises(ShapeError, match="seeds"):
        of(SEEDS[:3], **known)
    with pytest.raises(ConfigError, match="4 tokens and 200 new ones are 204; the target holds"):
        of(SEEDS, **known | {"max_new_tokens": 200})
    with pytest.raises(ShapeError, match=r"rows \[4\]; expected falling numbers below 4"):
        of(SEEDS, **known, stages=((4, 2),))
    with pytest.raises(ConfigError, match="taps no states"):
        jax.eval_shape(functools.partial(of, **known, has_features=True), SEEDS)


PARAMS = {"target": TARGET.params, "draft": None}


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens is 0; expected an integer of 1"),
        ({"samples": 0}, ConfigError, "samples is 0; expected an integer of 1"),
        ({"seeds": SEEDS + 0.5}, ShapeError, "seeds has dtype float32; expected integers"),
        ({"prompts": PROMPTS + 0.5}, ShapeError, "prompts has dtype float32; expected integers"),
        ({"prompts": PROMPTS[0]}, ShapeError, r"prompts has shape \(4,\); expected \[P T\]"),
        ({"prompts": PROMPTS.at[1, 3].set(31)}, PromptError, "prompts has 31; expected 0 to 30"),
        ({"prompts": np.int64(PROMPTS) - 2**32}, PromptError, "prompts has -429.*; expected 0 to"),
        ({"lengths": [4, 0]}, PromptError, "lengths has 0; expected 1 to 4"),
        ({"lengths": [4, 5]}, PromptError, "lengths has 5; expected 1 to 4"),
        ({"stop_tokens": (31,)}, PromptError, "stop_tokens has 31; expected 0 to 30"),
        ({"stop_tokens": 31}, PromptError, "stop_tokens has 31; expected 0 to 30"),
        ({"params": {"target": TARGET.params}}, ConfigError, r"params is \['target'\]; expected"),
        ({"stages": ((2,),)}, ConfigError, r"stages is \(\(2,\),\); expected pairs \(rows, num"),
        ({"stages": ((2, -1),)}, ConfigError, "stages is .*; expected pairs"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_while_tracing(changes, error, message):
    given = {"params": PARAMS, "prompts": PROMPTS, "lengths": LENGTHS, "seeds": SEEDS} | changes
    system = decoder(None).system()
    with pytest.raises(error, match=message):
        spec_jax.rollout(
            **{"system": system, "max_new_tokens": NEW, "samples": 2} | given, samplers=WARM
        )


def test_stages_keep_the_k_of_a_tree():
    tree = TreeConfig(children=(2, 1))
    config = spec_jax.SpeculativeConfig("eagle", rejection_sampling_strategy="match", tree=tree)
    of = spec_jax.SpeculativeDecoder(TARGET, HEAD, config, target_sampler=WARM)
    with pytest.raises(ConfigError, match="expected 4, which the tree fixes"):
        sampling(of, stages=((2, 4), (1, 1)))(TARGET.params, SEEDS)


@pytest.mark.parametrize("name", ["prompts", "target"])
@pytest.mark.parametrize("axis", [(), ("data",)])
def test_a_mesh_of_explicit_axes_is_refused_with_the_remedy(name, axis):
    axes = jax.make_mesh((2,), ("data",))
    where = jax.sharding.NamedSharding(axes, jax.sharding.PartitionSpec(*axis))
    given = {"target": TARGET.params, "prompts": PROMPTS}
    given[name] = jax.device_put(PROMPTS if name == "prompts" else {"norm": jnp.ones(4)}, where)
    sample = functools.partial(
        spec_jax.rollout, system=decoder(None).system(), max_new_tokens=NEW, samples=2
    )

    @jax.jit
    def run(target, prompts):
        return sample({"target": target, "draft": None}, prompts, LENGTHS, WARM, SEEDS)

    with pytest.raises(ConfigError, match="explicit axes; .* as spec_jax.make_mesh makes them"):
        run.eval_shape(**given)


@pytest.mark.exhaustive
def test_samples_of_a_prompt_share_its_prefill():
    """Operations of the compiled program of one output token after a prompt of 1,000 tokens."""
    target = spec_jax.load_model("zoo/target")
    head = spec_jax.load_draft("zoo/eagle3", target)
    config = spec_jax.SpeculativeConfig(head.method, 3)
    of = spec_jax.SpeculativeDecoder(target, head, config, target_sampler=WARM)

    def operations(samples):
        sample = functools.partial(
            spec_jax.rollout, system=of.system(), max_new_tokens=1, samples=samples
        )

        def run(params, prompt, seeds):
            given = {"target": params, "draft": {"head": head.params, "target": params}}
            return sample(given, prompt, jnp.array([1000]), WARM, seeds)

        prompt, seeds = jnp.zeros((1, 1000), jnp.int32), jnp.arange(samples)
        return jax.jit(run).lower(target.params, prompt, seeds).compile().cost_analysis()["flops"]

    assert operations(8) < 1.3 * operations(1)
