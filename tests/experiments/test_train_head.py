"""The experiment that trains heads: from files to an exported head, resumed, refused."""

import functools
import importlib
import json
import pathlib

import jax
import numpy as np
import pytest
from support import gate_kind
from support.files import head_training, held_out, pieces_of, tiny_config, tokenizer_of, write_lines
from support.runs import check_run_files, stopped_at
from support.tiny_models import random_weights

from experiments import train_head
from experiments.training import run as training_run
from experiments.training.head import HeadExperiment, even_loss, make_head
from spec_jax.data.batches import Corpus
from spec_jax.drafters import register, registry
from spec_jax.drafters.common.vocabulary import draft_ids
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError
from spec_jax.loading import load_draft, load_model
from spec_jax.models import checkpoint
from spec_jax.train.log import read_metrics

ROOT = pathlib.Path(__file__).resolve().parents[2]
OF_MODELS = {"train_zoo_target", "train_zoo_draft"}  # of experiments.train_lm
CONFIGS = {path.stem for path in (ROOT / "configs").glob("train_*.py")} - OF_MODELS


@pytest.fixture(scope="module", autouse=True)
def registered():
    yield register(gate_kind.KIND)
    registry.unregister("gate")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, a JSONL of texts, one of responses, and a file of prompts."""
    folder = tmp_path_factory.mktemp("files")
    texts, config = held_out(6), tiny_config(3)
    # What all embeddings share makes one token likely, which four steps teach a head to draft.
    params = random_weights(config)
    params["embed"] = params["embed"] + 1
    params["head"] = params["head"].at[:, 5].add(1)
    checkpoint.save_pretrained(folder / "target", params, config, tokenizer_of(texts))
    pieces = pieces_of(texts, 2000)
    assert all(len(piece) == 400 for piece in pieces)
    write_lines(folder / "texts.jsonl", ({"text": piece} for piece in pieces))
    write_lines(folder / "prompts.jsonl", ({"prompt": piece[:20]} for piece in pieces))
    target = load_model(folder / "target")
    prompts = [target.tokenizer.encode(piece)[:6] for piece in pieces[:12]]
    rows = SpeculativeDecoder(target).generate(prompts, 40)
    pairs = zip(prompts, rows)
    answers = ({"prompt_ids": prompt, "response_ids": row.tokens} for prompt, row in pairs)
    write_lines(folder / "responses.jsonl", answers)
    return folder


def small(files, **changes):
    config = head_training(files, "eagle3", max_new_tokens=12, windows=4)
    config.optimizer.update({"name": "adamw", "lr": 1e-2, "warmup": 1})
    options = {"data.responses": str(files / "responses.jsonl"), "head.draft_vocab_size": 200}
    options |= {"eval.every": 2, "export_dtype": "float32"}
    config.update_from_flattened_dict(options | changes)
    return config


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, train_head.train(small(files), folder)


def test_a_run_leaves_a_head_that_drafts_as_it_did_when_measured(files, run):
    folder, best = run
    lines = read_metrics(folder / "metrics.jsonl")
    evaluated = [line for line in lines if "tau" in line]
    assert [line["step"] for line in evaluated] == [2, 4]
    assert best["tau"] == max(line["tau"] for line in evaluated)
    names = {"held_out_loss", "held_out_teacher_forced_accept_1", "accept_2", "tau", "cpu_s"}
    assert names <= set(evaluated[0]) and best["tau"] > 1
    # One tag is one quantity: what real decoding accepts, and what teacher-forcing predicts.
    assert all("teacher_forced_accept_1" in line for line in lines if "loss" in line)
    assert all(("accept_1" in line) == ("tau" in line) for line in lines)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4 and np.isfinite(losses).all()
    assert (folder / "training.png").stat().st_size > 10_000
    rep = check_run_files(folder, "train_head")
    assert rep["final"] == best and rep["evaluations"] == evaluated
    target = load_model(files / "target")
    head = load_draft(folder / "export", target)
    assert head.config.layer.vocab_size == 200 and head.config.taps == (0, 2)
    experiment = HeadExperiment(small(files), folder)
    params = {name: w for name, w in head.params.items() if name != "d2t"}
    figures = experiment.evaluate(experiment.init_state().replace(params=params))
    assert figures["tau"] == pytest.approx(best["tau"])


@pytest.mark.exhaustive
def test_a_stopped_run_goes_on_to_the_same_head(files, run, tmp_path):
    config = small(files, checkpoint_every_s=0.0)
    config.data.view_cache = str(tmp_path / "views")  # which changes no number either
    with stopped_at(HeadExperiment, 3):
        train_head.train(config, tmp_path / "run")
    best = train_head.train(config, tmp_path / "run")
    assert best == run[1] and len(list((tmp_path / "views").iterdir())) >= 4
    target = load_model(files / "target")
    heads = [load_draft(folder / "export", target) for folder in (tmp_path / "run", run[0])]
    jax.tree.map(np.testing.assert_array_equal, *(head.params for head in heads))


OBJECTIVES = {
    "eagle3": dict(fc_norm=True, norm_output=True),
    "mtp": dict(),
    "dspark": dict(block_size=4, markov_rank=8),
    "dflash2": dict(block_size=4, selector_rank=8, selector_top_k=8),
    "peagle": dict(draft_vocab_size=200, num_layers=2, max_draft=4),
    "gate": dict(),  # of a kind that the tests register
}
LOGGED = {"peagle": {"loss_by_step_4"}, "dflash2": {"recall_3"}}
LOGGED |= {"dspark": {"accuracy_4", "confidence_bias_1", "tau_sampled"}}


@pytest.mark.exhaustive
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_trains_and_exports(files, tmp_path, objective):
    """The head decodes as it was measured, and a run goes on from it."""
    has_anchors = objective not in ("eagle3", "mtp", "gate")
    loss = {"num_steps": 3, "num_anchors": 4} if has_anchors else {"num_steps": 2}
    config = small(files, objective=objective, steps=2)
    config.loss.update(loss)
    config.head.update(dict(draft_vocab_size=0) | OBJECTIVES[objective])
    config.data.responses = None
    config.data.has_document_masks = objective in ("eagle3", "dspark")
    config.dtype = "bfloat16" if objective == "mtp" else "float32"
    config.optimizer.accumulate = 2 if objective == "dspark" else 1
    best = train_head.train(config, tmp_path)
    head = load_draft(tmp_path / "export", load_model(files / "target"))
    assert head.method == ("eagle" if objective == "eagle3" else objective)
    if objective == "eagle3":
        assert head.config.fc_norm and head.config.norm_output and head.format == "SpecForge"
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert all(LOGGED.get(objective, set()) <= set(line) for line in lines if "loss" in line)
    experiment = HeadExperiment(config, tmp_path)
    params = {name: w for name, w in head.params.items() if name != "d2t"}
    figures = experiment.evaluate(experiment.init_state().replace(params=params))
    assert figures["tau"] == pytest.approx(best["tau"]) and best["tau"] >= 1
    check_goes_on(config, head, tmp_path)


def check_goes_on(config, head, folder):
    """A run from the exported head begins with its very weights, and trains them."""
    config.head.init_from = str(folder / "export")
    experiment = HeadExperiment(config, folder / "further")
    state = experiment.init_state()
    begun = {**state.params, **experiment.spec.constants}
    assert experiment.spec.config == head.config
    assert {w.dtype.name for w in jax.tree.leaves(state.params)} == {"float32"}
    jax.tree.map(np.testing.assert_array_equal, begun, head.params)
    # Of halved weights: the head itself may be right to the last bit.
    state = state.replace(params=jax.tree.map(lambda w: 0.5 * w, state.params))
    state, metrics = experiment.step(state, experiment.batch_at(0))
    assert np.isfinite(float(metrics["loss"])) and float(metrics["grad_norm"]) > 0
    assert experiment.init_state() is not state  # a second one is whole: the first was donated
    jax.block_until_ready(experiment.init_state().params)


def test_a_head_with_a_reduced_vocabulary_goes_on_with_its_own_ids(files, run, tmp_path):
    config = small(files)
    config.data.responses = None  # other counts, other ids: a fresh head would differ
    head = load_draft(run[0] / "export", load_model(files / "target"))
    (tmp_path / "export").symlink_to(run[0] / "export")
    check_goes_on(config, head, tmp_path)


def test_a_head_goes_on_with_new_ids(files, run, tmp_path):
    """Ids that it drafted keep their weights, and those of others are the target's."""
    target = load_model(files / "target")
    old = load_draft(run[0] / "export", target)
    places = {int(i): n for n, i in enumerate(draft_ids(old.params))}
    others = [i for i in range(target.config.vocab_size) if i not in places]
    rows = ({"text": target.tokenizer.decode(others[i:] * 9)} for i in range(60))
    write_lines(tmp_path / "texts.jsonl", rows)
    other = {"data.responses": None, "data.text": str(tmp_path / "texts.jsonl")}
    begun = {"head.init_from": str(run[0] / "export"), "head.has_new_ids": True}
    experiment = HeadExperiment(small(files, **other, **begun), tmp_path)
    fresh = HeadExperiment(small(files, **other), tmp_path / "fresh")
    d2t = experiment.spec.constants["d2t"]
    seen = {*fresh.texts[0].tokens.tolist()}
    ids = draft_ids({"d2t": d2t}).tolist()
    assert {*ids} & seen == {*draft_ids(fresh.spec.constants).tolist()} & seen
    assert {*ids} <= seen | {*places}  # an id that does not occur is replaced by none such
    columns = experiment.init_state().params["head"]
    output = target.params["head"]
    counts = [0, 0]
    for n, i in enumerate(ids):
        is_old = i in places
        expected = old.params["head"][:, places[i]] if is_old else output[:, i]
        np.testing.assert_array_equal(columns[:, n], expected)
        counts[is_old] += 1
    assert min(counts) > 3


@pytest.mark.exhaustive
def test_a_head_to_go_on_from_is_read_to_the_devices_that_train_it(files, run, tmp_path):
    mesh = dict(mesh="data:2,tensor:2", is_fully_sharded=True)
    config = small(files, **mesh, **{"head.init_from": str(run[0] / "export")})
    config.data.responses = None
    experiment = HeadExperiment(config, tmp_path)
    given, where = (
        experiment.spec.given,
        experiment.spec.shardings(experiment.placement.mesh, experiment.placement.axis_rules),
    )
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or 1 / 0, given, where)
    assert any(x.addressable_shards[0].data.size < x.size for x in jax.tree.leaves(given))
    traced = jax.make_jaxpr(experiment._make)(experiment._key, experiment.frozen, given)
    assert sum(np.size(x) for x in traced.consts) < 300  # weights are arguments
    head = load_draft(run[0] / "export", load_model(files / "target"))
    for _ in range(2):
        begun = {**experiment.init_state().params, **experiment.spec.constants}
        jax.tree.map(np.testing.assert_array_equal, begun, head.params)


@pytest.mark.exhaustive
def test_a_run_of_some_minutes_keeps_the_end_that_it_was_begun_with(files, tmp_path, monkeypatch):
    """Without an evaluation the last state is exported."""
    config = small(files, steps=9, minutes=10.0, checkpoint_every_s=0.0)
    config.eval.num_prompts = 0
    monkeypatch.setattr(training_run, "seconds_per_step", lambda experiment: 180.0)
    with stopped_at(HeadExperiment, 2):
        train_head.train(config, tmp_path)
    monkeypatch.setattr(training_run, "seconds_per_step", None)
    with pytest.raises(ConfigError, match="other values of steps "):
        train_head.train(small(files, steps=8, minutes=10.0), tmp_path)
    assert train_head.train(config, tmp_path)["step"] == 3
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3] and "tau" not in lines[-1]
    assert load_draft(tmp_path / "export", load_model(files / "target")).method == "eagle"


def test_the_last_state_may_be_exported_in_place_of_the_best(files, run):
    best = run[1]
    last = train_head.train(small(files, export_from="last"), run[0])  # finished: exports alone
    lines = [line for line in read_metrics(run[0] / "metrics.jsonl") if "tau" in line]
    assert last == {"tau": lines[-1]["tau"], "step": 4}
    assert train_head.train(small(files), run[0]) == best


def test_tau_is_measured_on_the_held_out_text_unless_prompts_are_named(files, tmp_path):
    config = small(files, **{"eval.prompts": "", "eval.prompt_tokens": 9, "data.responses": None})
    experiment = HeadExperiment(config, tmp_path)
    tokens_of = experiment.held_out.tokens.tolist()
    pieces = {tuple(tokens_of[i : i + 9]) for i in range(len(tokens_of))}
    assert len(experiment._prompts) == 3 and {len(ids) for ids in experiment._prompts} == {9}
    assert set(map(tuple, experiment._prompts)) < pieces
    changes = {"eval.prompts": "", "data.text": "", "data.held_out_share": 0.25}
    experiment = HeadExperiment(small(files, **changes), tmp_path)  # of responses alone
    assert [text.name for text in experiment.texts] == [f"{files / 'responses.jsonl'} (train)"]
    rows = [json.loads(line) for line in (files / "responses.jsonl").read_text().splitlines()]
    assert {tuple(ids) for ids in experiment._prompts} <= {tuple(r["prompt_ids"]) for r in rows}


def test_prompts_are_learnt_from_if_that_is_asked_for(files, tmp_path):
    changes = {"data.text": "", "data.held_out_share": 0.25}
    usual, whole = (
        HeadExperiment(small(files, **changes, **{"data.has_prompt_loss": has}), tmp_path)
        for has in (False, True)
    )
    batches = [experiment.batch_at(0) for experiment in (usual, whole)]
    assert np.array_equal(batches[0].tokens, batches[1].tokens)
    more = np.asarray(batches[1].mask) & ~np.asarray(batches[0].mask)
    assert more.any() and np.all(batches[1].mask | ~np.asarray(batches[0].mask))
    assert np.array_equal(usual.held_out.mask, whole.held_out.mask)  # tau begins at answers
    assert not np.all(whole.held_out.mask)


def test_documents_of_a_batch_begin_where_the_files_do_if_they_are_asked_for(files, tmp_path):
    config = small(files, **{"data.text_share": 0.0})
    before = HeadExperiment(config, tmp_path).batch_at(0)
    config.data.has_document_masks = True
    batch = HeadExperiment(config, tmp_path).batch_at(0)
    assert before.begins is None and batch.begins.shape == batch.tokens.shape
    is_first = np.asarray(batch.begins) == np.arange(config.length)
    rows = [json.loads(line) for line in (files / "responses.jsonl").read_text().splitlines()]
    texts = [row["prompt_ids"] + row["response_ids"] for row in rows]
    assert is_first[:, 1:].any()
    for row, column in np.argwhere(is_first)[:, :2]:
        after = np.asarray(batch.tokens)[row, column : column + 6].tolist()
        assert column == 0 or any(after == text[: len(after)] for text in texts)
    same = np.asarray(batch.view.hidden) == np.asarray(before.view.hidden)
    assert same.all(axis=-1)[np.asarray(batch.begins) == 0].all() and not same.all()


EAGLE1 = {"objective": "eagle1", "head.draft_vocab_size": 0, "loss.num_steps": 3}
INVALID_CHANGES = [
    (EAGLE1, "a head of eagle3; the objective"),
    ({"head.draft_vocab_size": 100}, "draft_vocab_size is 100; .* drafts 200 ids"),
    ({"head.has_new_ids": True, "head.init_from": ""}, "has_new_ids is True; expected False, with"),
]


@pytest.mark.parametrize(("changes", "message"), INVALID_CHANGES)
def test_a_head_that_cannot_go_on_is_refused(files, run, tmp_path, changes, message):
    config = small(files, **{"head.init_from": str(run[0] / "export")} | changes)
    with pytest.raises(ConfigError, match=message):
        train_head.train(config, tmp_path)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_configs_make_the_head_that_they_name(files, name):
    """For a target at hand, of fewer layers and ids than theirs."""
    module = importlib.import_module(f"configs.{name}")
    config = module.get_config()
    train_head.validate(config)
    assert "experiments.train_head" in module.__doc__
    target = load_model(files / "target")
    config.head.draft_vocab_size = min(config.head.draft_vocab_size, 200)
    config.head.taps = tuple(min(tap, 3 - i) for i, tap in enumerate(config.head.taps))
    text = Corpus("text", np.arange(300, dtype=np.int32))
    spec = make_head(config, target, [text], [text])
    assert spec.name == config.objective
    if config.objective != "eagle3":
        config.head.norm_output = True
        with pytest.raises(ConfigError, match="option of eagle3"):
            make_head(config, target, [text], [text])


def test_the_log_says_what_the_loss_of_a_head_that_knows_nothing_is(files, tmp_path):
    experiment = HeadExperiment(small(files, **{"head.is_warm_start": False}), tmp_path)
    loss = float(experiment.evaluate(experiment.init_state())["held_out_loss"])
    assert "loss: the sum of 2 steps weighted 1, 0.8, 9.5 if all 200 tokens" in experiment.summary
    assert "warm" not in experiment.summary and loss == pytest.approx(1.8 * np.log(200), rel=0.1)
    assert "begins below it" in even_loss(small(files), experiment.spec.config)
    begun = experiment.begin(experiment.init_state())
    jax.tree.map(np.testing.assert_array_equal, begun, experiment.init_state())


@pytest.mark.parametrize("normed", [False, True])
def test_a_warm_start_is_fitted_to_the_first_batches(files, tmp_path, normed):
    experiment = HeadExperiment(small(files, **{"head.norm_before_residual": normed}), tmp_path)
    begun = experiment.begin(experiment.init_state())
    again = experiment.begin(experiment.init_state())
    jax.tree.map(np.testing.assert_array_equal, begun, again)
    start, given = experiment.spec.start, dict(config=experiment.spec.config)
    add = functools.partial(start.sums, **given, model=experiment.target.model)
    fresh = experiment.init_state().params
    sums = jax.jit(add)(fresh, experiment.batch_at(0), experiment.frozen)
    params = jax.jit(functools.partial(start.weights, **given))(fresh, sums)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), begun.params, params)
    np.testing.assert_allclose(
        begun.opt_state.input_scales["fc"], start.scales(sums, **given)["fc"], rtol=1e-5
    )
    loss = float(experiment.evaluate(begun)["held_out_loss_by_step"][0])
    assert loss < np.log(200) - 0.2  # that of a head that knows nothing
