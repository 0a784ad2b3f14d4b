"""The experiment that trains by reinforcement learning: what it learns, resumes and refuses."""

import functools
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import rl_rewards
from support.files import experiment_files, held_out, pieces_of, write_lines
from support.runs import Stopped, check_run_files
from support.tiny_heads import CONFIG, TARGET
from support.tiny_models import LLAMA

from configs import rl as defaults
from experiments import rl
from experiments.grpo import experiment as grpo
from experiments.grpo import objective, report, rewards
from spec_jax import SamplerConfig, rng, testing
from spec_jax.compilation import Timed
from spec_jax.decoding import Finish
from spec_jax.errors import ConfigError, TrainingError
from spec_jax.loading import load_model
from spec_jax.models import transformer
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.log import Log, read_metrics

OF = "support.rl_rewards"


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    experiment_files(folder, LLAMA)
    pieces = pieces_of(held_out(2), 4000)[:8]
    write_lines(folder / "prompts.jsonl", ({"prompt": piece[:12]} for piece in pieces))
    return folder


def small(files, **changes):
    config = defaults.get_config()
    config.target, config.prompts = str(files / "target"), str(files / "prompts.jsonl")
    config.reward, config.reward_on = f"{OF}:small_ids", "ids"
    sizes = dict(prompt_tokens=12, max_new_tokens=8, prompts_per_step=2, samples=3, steps=4)
    config.update(**sizes, num_draft=2, eval_every=2, checkpoint_every_s=0.0)
    config.sampler.top_k = 40
    config.optimizer.lr = 1e-2
    config.update_from_flattened_dict(changes)
    return config


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    """A run with a drafter that learns, whose tokens depend on what it has learned."""
    folder = tmp_path_factory.mktemp("run")
    config = small(files, drafter="suffix", strategy="residual", compare_every=2)
    return config, folder, rl.train(config, folder)


def test_a_run_learns_and_leaves_a_model_and_a_page(files, run):
    config, folder, final = run
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "reward" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(0 < line["update_norm"] and 0 <= line["reward"] <= 1 for line in lines)
    # The policy samples what it trains on, so the ratio is 1, and it begins at the reference.
    np.testing.assert_allclose([line["ratio"] for line in lines], 1)
    assert lines[0]["kl"] < 1e-9 < lines[-1]["kl"] and lines[0]["tau"] >= 1
    assert ["plain_s" in line for line in lines] == [True, False] * 2
    assert "rollouts over plain decoding" in final
    assert {"reward, steps 1 to 2", "reward, steps 3 to 4"} < final.keys()
    rep = check_run_files(folder, "rl")
    assert [one["step"] for one in rep["evaluations"]] == [2, 4]
    page = (folder / "report.html").read_text("utf-8")
    assert "KL to the reference" in page and "share of a step" in page
    before = load_model(files / "target").params
    after = load_model(folder / "export").params
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after)))


def last_state(config, folder):
    """The newest checkpoint of a run."""
    with Checkpoints(folder / "checkpoints") as saved:
        return saved.restore(grpo.RlExperiment(config, folder).init_state())


PHASES = {
    "prompts": (grpo.RlExperiment, "batch_at"),
    "rollouts": (grpo.RlExperiment, "rollouts"),
    "rewards": (grpo.RlExperiment, "rewards"),
    "advantages": (grpo, "advantages"),
    "update": (grpo, "Batch"),
    "memory": (grpo.RlExperiment, "_remember"),
    "log": (Log, "write"),
    "checkpoint": (Checkpoints, "save"),
    "evaluation": (grpo.RlExperiment, "evaluate"),
    "export": (grpo.RlExperiment, "export"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("phase", PHASES)
def test_a_run_that_ends_in_any_phase_goes_on_to_the_same_state(phase, run, tmp_path):
    config, folder, _ = run
    owner, name = PHASES[phase]
    whole = getattr(owner, name)
    calls = []

    def stop(*args, **options):
        calls.append(args)
        if len(calls) == (1 if phase in ("export", "evaluation") else 3):
            raise Stopped
        return whole(*args, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(owner, name, stop)
        rl.train(config, tmp_path)
    assert rl.train(config, tmp_path).keys() == run[2].keys()
    equal(last_state(config, tmp_path), last_state(config, folder))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("programs_kept")
@pytest.mark.parametrize("mesh", ["", "data:2"])
def test_nothing_is_compiled_after_the_first_step_nor_after_that_of_a_resumed_run(
    mesh, files, tmp_path
):
    config = small(files, drafter="suffix", epochs=2, mesh=mesh, checkpoint_every_s=100.0)
    for first in (0, 2):
        with Checkpoints(tmp_path) as saved:
            experiment = grpo.RlExperiment(config, tmp_path)
            state = saved.restore(experiment.init_state())
            assert int(state.step) == first
            state, _ = experiment.step(state, experiment.batch_at(first))
            with Timed() as timed:
                state, _ = experiment.step(state, experiment.batch_at(first + 1))
            assert timed.compile_s == 0
            saved.save(first + 2, state)


def learn(config, steps):
    """The policy after some steps, and the rollouts of each."""
    found = []
    experiment = grpo.RlExperiment(config, pathlib.Path())
    state = experiment.init_state()
    whole = experiment.rollouts

    def kept(*args, **options):
        found.append(whole(*args, **options))
        return found[-1]

    experiment.rollouts = kept
    for step in range(steps):
        state, figures = experiment.step(state, experiment.batch_at(step))
    return experiment, state, found, figures


def zoo(**changes):
    config = defaults.get_config()
    config.update(prompts_per_step=2, samples=4, max_new_tokens=16, old_logprobs="rollout")
    config.update_from_flattened_dict(changes)
    return config


FEW = pytest.param("zoo/eagle3", 3, marks=pytest.mark.exhaustive)
MANY = [pytest.param(name, 20, marks=pytest.mark.measure) for name in ("ngram", "zoo/eagle3")]


@pytest.mark.parametrize("drafter, steps", [FEW, *MANY])
def test_steps_with_drafts_and_without_give_the_same_bits(drafter, steps):
    """Also the log-probabilities of the rollouts, which the ratios are computed with."""
    sampler = {"sampler.top_p": 0.95, "epochs": 2}
    runs = [
        learn(zoo(drafter=drafter, rollouts=mode, **sampler), steps)
        for mode in ("invariant", "invariant-plain")
    ]
    for one, other in zip(*(run[2] for run in runs), strict=True):
        for name in ("tokens", "is_output", "logprobs", "model_logprobs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    equal(runs[0][1], runs[1][1])
    accepted = [sum(int(x.counts.accepted.sum()) for x in run[2]) for run in runs]
    assert accepted[0] > 0 == accepted[1]
    start = runs[0][0].target.params
    assert all(
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (start, runs[0][1].train.params)))
    )


def explain(experiment, policy, prompts, rows):
    """Asserts that two rows of tokens part where two tokens nearly tie, noise included."""
    row, at = np.argwhere(rows[0].tokens != rows[1].tokens)[0]
    tokens = rows[0].tokens[row, :at]
    logits = transformer.logits(policy, tokens[None], config=experiment.target.config)[0, -1]
    key = rng.keys(prompts.seeds[row : row + 1], rng.Purpose.TARGET, jnp.asarray([at]))
    value = np.asarray(logits + rng.gumbel(key, len(logits))[0])
    best = np.argsort(-value)[:2]
    assert {*best} == {int(x.tokens[row, at]) for x in rows}
    assert value[best[0]] - value[best[1]] < 1e-4, "a bug: no rounding moves a logit that far"


@pytest.mark.measure
def test_steps_are_those_of_usual_plain_decoding_until_rounding_parts_two_tokens():
    """With log-probabilities recomputed nothing but the tokens can differ."""
    runs = [
        grpo.RlExperiment(zoo(rollouts=x, old_logprobs="recomputed"), pathlib.Path())
        for x in ("speculative", "plain")
    ]
    states = [one.init_state() for one in runs]
    for step in range(20):
        prompts = runs[0].batch_at(step)
        rows = [one.rollouts(state, prompts) for one, state in zip(runs, states)]
        if (rows[0].tokens != rows[1].tokens).any():
            explain(runs[0], states[0].train.params, prompts, rows)
            break
        states = [one.step(state, prompts)[0] for one, state in zip(runs, states)]
        equal(*states)
    assert step > 2


# ------------------------------------------------------------------- against independent numbers


one_pass = jax.jit(functools.partial(transformer.logits, config=CONFIG))


@pytest.mark.parametrize("max_new_tokens", [5, 20])
def test_the_loss_is_the_formulas(max_new_tokens):
    """In NumPy, of rows of several lengths, with tokens that the filters drop by now."""
    tokens = jnp.asarray(np.random.RandomState(0).randint(0, 31, (3, 9)), jnp.int32)
    begins, ends = np.asarray([[[4], [2], [5]], [[9], [7], [8]]])
    is_output = jnp.asarray((np.arange(9) >= begins) & (np.arange(9) < ends))
    warm = SamplerConfig(temperature=1.5, top_k=14)
    other = jax.tree.map(lambda w: 0.9 * w, TARGET.params)
    above = np.asarray([1.0, -0.5, 2.0])

    def numbers(params):
        """Log-probabilities f64[B,S] of the distribution that is sampled, and of the model."""
        drawn, own = np.zeros((2, 3, 9))
        logits = np.asarray(one_pass(params, tokens), np.float64)
        for row, i in np.argwhere(np.asarray(is_output)):
            x, token = logits[row, i - 1], tokens[row, i]
            is_kept = testing.reference_distribution(x, warm, (), ()) > 0
            is_kept[token] = True
            warmed = x / warm.temperature
            drawn[row, i] = warmed[token] - np.log(np.exp(warmed[is_kept]).sum())
            own[row, i] = x[token] - np.log(np.exp(x - x.max()).sum()) - x.max()
        return drawn, own

    old = jnp.asarray(numbers(other)[0], jnp.float32)
    reference = jnp.asarray(numbers(other)[1], jnp.float32)
    batch = objective.Batch(tokens, is_output, jnp.asarray(above, jnp.float32), old, reference)

    def loss(params):
        options = dict(model=TARGET.model, sampler=warm, clip=(0.2, 0.3), kl_weight=0.1)
        options |= {"max_new_tokens": max_new_tokens}
        return objective.grpo_loss(params, batch, **options)

    drawn, own = numbers(TARGET.params)
    ratio = np.exp(drawn - np.asarray(old))
    gain = np.minimum(ratio * above[:, None], np.clip(ratio, 0.8, 1.3) * above[:, None])
    apart = np.asarray(reference) - own
    each = np.where(is_output, -gain + 0.1 * (np.exp(apart) - apart - 1), 0.0)
    expected = (each.sum(axis=1) / np.asarray(is_output).sum(axis=1)).mean()
    (value, figures), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(TARGET.params)
    np.testing.assert_allclose(value, expected, rtol=1e-3)
    is_clipped = np.asarray(is_output) & ((ratio < 0.8) | (ratio > 1.3))
    assert figures["clipped"].total == is_clipped.sum() > 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_gradients_are_finite_where_tokens_lie_past_the_edge_of_the_filters():
    """As rounding between decoding and training leaves them, old ones being recomputed."""
    tokens = jnp.asarray(np.random.RandomState(1).randint(0, 31, (3, 9)), jnp.int32)
    sampler = SamplerConfig(temperature=1.5, top_k=2, top_p=0.5)
    batch = objective.Batch(tokens, jnp.arange(9) >= jnp.full((3, 1), 4), jnp.asarray([1.0, -1, 2]))
    options = dict(model=TARGET.model, sampler=sampler, clip=(0.2, 0.2), kl_weight=0.0)
    options |= {"max_new_tokens": 5}

    def loss(params):
        given = dict(model=TARGET.model, sampler=sampler, max_new_tokens=5)
        drawn = objective.logprobs(params, tokens, batch.is_output, **given)[0]
        return objective.grpo_loss(params, batch, **options)[0], drawn

    (value, drawn), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(TARGET.params)
    assert jnp.isfinite(value) and jnp.isfinite(drawn).all()
    assert all(np.isfinite(x).all() and (x != 0).any() for x in jax.tree.leaves(grads))
    logits = np.asarray(one_pass(TARGET.params, tokens))
    ranks = (logits[:, :-1] > np.take_along_axis(logits[:, :-1], tokens[:, 1:, None], 2)).sum(2)
    assert (ranks[:, 3:] >= 2).any()


def test_the_rewards_of_a_report_are_those_of_steps():
    """Of 45 steps in lines of ten, each the mean of its steps, and a last one of five."""
    rewards_of = np.arange(1.0, 46)
    begins = [0, 10, 20, 30, 40]
    lines = [
        {"step": min(b + 10, 45), "reward": rewards_of[b : b + 10].mean(), "rollout_s": 1.0}
        | {"reward_s": 1.0, "update_s": 1.0}
        for b in begins
    ]
    found = {name: value.value for name, value in report.summarise(lines).items()}
    assert found["reward, steps 1 to 20"] == pytest.approx(rewards_of[:20].mean())
    assert found["reward, steps 21 to 45"] == pytest.approx(rewards_of[20:].mean())
    text = "reward 10.500 in steps 1 to 20, 33.000 in steps 21 to 45"
    assert report.sentence(found) == text


def test_advantages_are_by_group():
    found = objective.advantages(np.asarray([[1.0, 3.0], [0.1 + 0.2, 0.3], [5.0, 5.0]]))
    np.testing.assert_array_equal(found, [[-1, 1], [0, 0], [0, 0]])
    found = objective.advantages(np.full((1, 7), 1e8 + 0.1))  # their mean is rounded
    np.testing.assert_array_equal(found, np.zeros((1, 7)))
    found = objective.advantages(np.asarray([[1.0, 4.0]]), is_scaled=False)
    np.testing.assert_array_equal(found, [[-1.5, 1.5]])


@pytest.mark.parametrize(
    "output, expected",
    [
        ("\n    return x", 1),
        ("\n    return x\n\n    y = (", 0.5),
        ("\n    return (x", 0),
        ("", 0),
        ("\n    x = '\\d'\n    y = 1\n  z", 2 / 3),
        ("\x00", 0),
    ],
)
def test_the_parser_rewards_lines_up_to_its_first_error(output, expected):
    assert rewards.parses("def f(x):", output) == pytest.approx(expected)


def test_short_answers_are_rewarded():
    assert rewards.is_short("", " It is blue. ") == 1
    assert rewards.is_short("", "It is. So it is.") == rewards.is_short("", "It is. So it") == 0.75
    assert rewards.is_short("", "word " * 80) == 0.625
    assert rewards.is_short("", "") == rewards.is_short("", " ") == 0


def test_noise_and_prompts_are_new_in_every_step(files):
    """No seed occurs in two steps, nor in a step and in an evaluation."""
    experiment = grpo.RlExperiment(small(files, drafter="none"), pathlib.Path())
    steps = [experiment.batch_at(step) for step in range(9)]
    held_out = experiment._batch(experiment._held_out, grpo._HELD_OUT_SEEDS)
    seeds = np.concatenate([prompts.seeds for prompts in (*steps, held_out)])
    assert len({*seeds.tolist()}) == len(seeds) == 60
    names = [name for prompts in steps[:3] for name in prompts.names]
    assert len({*names}) == 6 and not {*names} & {*held_out.names}
    other = grpo.RlExperiment(small(files, drafter="none", seed=1), pathlib.Path()).batch_at(0)
    assert (other.seeds != steps[0].seeds).all()


@pytest.mark.exhaustive
def test_the_reference_is_the_policy_of_the_last_multiple_of_reference_every(files):
    config = small(files, drafter="none", reference_every=2)
    _, state, _, figures = learn(config, 3)
    before = learn(config, 2)[1]
    equal(state.reference, before.train.params)
    assert float(figures["kl"].value) < 1e-9


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.exhaustive
def test_an_update_of_zero_is_refused_where_rewards_differ(files):
    config = small(files, drafter="none", **{"optimizer.lr": 1e-30})
    with pytest.raises(TrainingError, match="the update of step 1 is zero although rewards differ"):
        learn(config, 1)


@pytest.mark.parametrize(
    "name, fault", [("nothing", "returned nan"), ("raises", "raised LookupError: no such answer")]
)
def test_a_reward_that_is_no_number_names_its_prompt(name, fault):
    found = getattr(rl_rewards, name)
    with pytest.raises(TrainingError, match=f"{name} {fault} for row 0; mend it and run the same"):
        rewards.score(found, name, [([1], [2])], lambda row: f"row {row}")


@pytest.mark.parametrize(
    "finish, remedy", [("NAN_TARGET", "lower optimizer.lr"), ("INVALID_DRAFT", "another drafter")]
)
def test_a_rollout_with_a_fault_is_named_with_the_remedy(files, finish, remedy):
    experiment = grpo.RlExperiment(small(files, drafter="none"), pathlib.Path())
    prompts = experiment.batch_at(0)
    ends = [Finish.LENGTH, Finish.STOP_TOKEN, *[Finish[finish]] * 2, Finish.LENGTH, Finish.LENGTH]
    found = types.SimpleNamespace(counts=types.SimpleNamespace(finish=jnp.asarray(ends)))
    experiment.rollouts = lambda *args: found
    message = f"2 rollouts ended by {finish.lower()} in step 1, first of prompt .*, sample 2: .*"
    with pytest.raises(TrainingError, match=message + remedy):
        experiment.step(types.SimpleNamespace(step=0), prompts)


@pytest.mark.exhaustive
def test_a_run_goes_on_once_its_reward_is_mended(run, tmp_path, monkeypatch):
    config, folder, _ = run
    calls = []

    def once(prompt, output):
        calls.append(prompt)
        return float("nan") if len(calls) == 15 else rl_rewards.nothing(prompt, output)

    mended = rl_rewards.small_ids
    monkeypatch.setattr(rl_rewards, "nothing", mended)
    monkeypatch.setattr(rl_rewards, "small_ids", once)
    longer = config.copy_and_resolve_references()
    longer.steps += 3  # rates are constant, so they may change at any time
    with pytest.raises(TrainingError, match="returned nan for prompt '.*', sample 2"):
        rl.train(longer, tmp_path)
    monkeypatch.setattr(rl_rewards, "small_ids", mended)
    rl.train(config, tmp_path)
    equal(last_state(config, tmp_path), last_state(config, folder))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompt_tokens": 3}, "prompt .* has .* tokens; prompt_tokens is 3"),
        ({"prompts_per_step": 5}, "has 8 prompts; expected 10 or more, of which 5 are held out"),
        ({"samples": 1}, "samples is 1; expected 2 or more"),
        (
            {"stages": ((6, 2),)},
            r"stages is .*; expected pairs \(rows, K\), of falling rows below 6",
        ),
        ({"stages": (4, 2)}, "stages is .*; expected pairs"),
        ({"stages": ((4, 2),), "rollouts": "invariant-plain"}, "stages is .*; expected none"),
        ({"clip": (0.2,)}, "clip is .*; expected two numbers"),
        ({"clip": (-1.0, 0.2)}, "clip is .*; expected two numbers"),
        ({"num_draft": 0}, "num_draft is 0; expected 1 or more; to decode without drafts"),
        ({"sampler.top_p": 2.0}, "top_p is 2.0; expected a number from"),
        ({"dtype": "int8"}, "dtype is 'int8'; expected float32, bfloat16, or empty"),
        ({"export_dtype": "bfloat"}, "export_dtype is 'bfloat'; expected one of float32"),
        ({"seed": -1}, "seed is -1; expected an integer of 0 or more"),
        ({"eval_every": -1}, "eval_every is -1; expected 0"),
        ({"reward": f"{OF}:nothin"}, "did you mean nothing"),
        ({"optimizer.lr": 0.0}, "optimizer.lr is 0.0; expected a number above 0"),
        ({"sampler.temperature": 0.0}, "sampler.temperature is 0.0; expected a number above 0"),
        ({"drafter": "zoo/draft"}, "the vocabularies differ"),
        ({"max_new_tokens": 60}, "12 tokens and 60 new ones are 72; the target holds 64"),
        ({"drafter": "none", "rollouts": "invariant"}, "drafts nothing"),
        ({"rollouts": "invariant", "strategy": "residual"}, "strategy is .*; expected match where"),
        ({"rollouts": "invariant", "stages": ((4, 2),)}, "stages is .*; expected none where"),
        ({"optimizer.clip": -1.0}, "optimizer.clip is -1.0; expected a number above 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(files, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        rl.train(small(files, **changes), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()
