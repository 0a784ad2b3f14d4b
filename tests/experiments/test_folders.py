"""Folders of runs: whose they are, what is left out for good, and what a damaged one says."""

import json

import pytest
from support.pairs import tiny_pair

from configs import evaluate_zoo
from experiments.comparison import session
from experiments.comparison.answers import key_of, text_of
from experiments.comparison.setup import Setup
from experiments.run import cli, report
from spec_jax.errors import ConfigError, PromptError
from spec_jax.evaluation import costs


def test_no_experiment_begins_in_the_folder_of_another_ones_run(tmp_path):
    run, empty = tmp_path / "run", tmp_path / "empty"
    report.begin("evaluate", run, {"target": "a"})
    before = {path: path.read_bytes() for path in run.iterdir()}
    for open_folder in (cli.open_workdir, cli.make_workdir):
        for name in ("decode", "benchmark", "train_head", "regenerate"):
            with pytest.raises(ConfigError, match="holds a run of experiments.evaluate; name"):
                open_folder(name, run)
    assert {path: path.read_bytes() for path in run.iterdir()} == before
    assert cli.make_workdir("evaluate", run) == cli.open_workdir("evaluate", run) == run
    empty.mkdir()
    (empty / "process-0.log").write_text("")
    assert cli.open_workdir("decode", empty) == empty
    (run / "environment.json").unlink()
    with pytest.raises(ConfigError, match="holds the config.json of another run"):
        cli.open_workdir("decode", run)
    assert cli.make_workdir("evaluate", run) == run


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """Three questions at two batch sizes, on a tiny target."""
    folder = tmp_path_factory.mktemp("folders")
    rows = [{"turns": [text]} for text in ("x = 1", "import os", "def f(")]
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = evaluate_zoo.get_config()
    options = dict(
        num_prompts=0, data=str(folder / "q.jsonl"), max_new_tokens=4, ks=(2,), batches=(2, 3)
    )
    config.update(target=str(tiny_pair(folder) / "target"), drafts="ngram", **options)
    return Setup.of(config)


@pytest.fixture
def refused(monkeypatch):
    """The batch sizes that cannot be measured; nothing is compiled, answers are of one token."""
    sizes = set()

    def compile_all(bench, cells, **_):
        if bench.batch in sizes:
            raise PromptError(f"no room for {bench.batch}")
        return costs.Costs(1.0, {}, {1: 1.0}, 128, 1)

    def line(self, stage, run, group, q, probs):
        found = dict(prompt=text_of(stage.bench.target, stage.bench.prompts[q]), tokens=[5])
        found |= dict(finish="length", decode_s=[0.5, 0.5], prefill_s=0.1, peak_bytes=None)
        found |= dict(counts={"emitted": 1, "first": 1})
        name = self.setup.questions.chosen[q].name
        return {**key_of(run.cell, stage.bench.batch, name), "turns": [found]}

    def measure(self, stage, groups, bar):
        for group in groups:
            self._answers.append(
                [
                    self._line(stage, run, group, q, None)
                    for q in group.questions
                    for run in stage.runs
                ]
            )

    monkeypatch.setattr(session, "compile_all", compile_all)
    monkeypatch.setattr(session.Evaluation, "_line", line)
    monkeypatch.setattr(session.Evaluation, "_measure", measure)
    return sizes


def test_what_is_left_out_once_stays_out_when_the_run_goes_on(setup, refused, tmp_path):
    refused.add(2)
    first = session.Evaluation(setup, tmp_path)
    assert [stage.bench.batch for stage in first.run()] == [3]
    refused.clear()
    again = session.Evaluation(setup, tmp_path)
    (stage,) = again.run()
    assert stage.bench.batch == 3 and again.num_saved == 6  # of plain decoding and ngram
    assert stage.plain.rows[1].tokens == (5,)
    assert first.notes == again.notes == ["batch 2, T=0: no room for 2"]


def test_a_run_of_which_nothing_can_be_measured_says_why(setup, refused, tmp_path):
    refused.update((2, 3))
    for _ in range(2):
        with pytest.raises(ConfigError, match="measured: batch 2, .*no room for 2; batch 3, T=0"):
            session.Evaluation(setup, tmp_path).run()


DAMAGES = [
    (lambda line: "[1]", "line 2: TypeError.*expected an answer; delete this line and all"),
    (lambda line: "{", "line 2: JSONDecodeError"),
    (lambda line: line.replace('"prompt": "', '"prompt": "z'), "answers another .* today's date"),
    (lambda line: line.replace('"turns"', '"turn"'), "line 2: KeyError.'turns'"),
    (lambda line: line.replace('"emitted": 1', '"emitted": 2'), "line 2: AssertionError"),
    (
        lambda line: line.replace('"turns": [', '"turns": [], "more": ['),
        "line 2: the number of turns is 0, and this run has 1 there",
    ),
]


@pytest.mark.parametrize("damage, message", DAMAGES)
def test_a_damaged_line_is_named_with_the_remedy(setup, refused, tmp_path, damage, message):
    session.Evaluation(setup, tmp_path).run()
    path = tmp_path / session.ANSWERS
    first, second, *more = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text(first + damage(second.rstrip()) + "\n" + "".join(more), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"answers.jsonl,? {message}"):
        session.Evaluation(setup, tmp_path).run()
    path.write_text(first, encoding="utf-8")  # as it says
    assert len(session.Evaluation(setup, tmp_path).run()) == 2
    assert len(path.read_text(encoding="utf-8").splitlines()) == 12


def test_damaged_configs_and_inputs_are_named(tmp_path):
    config = {"target": "a", "has_audit": False}
    (tmp_path / session.ANSWERS).write_text("")
    for name in ("config.json", session.INPUTS):
        path = tmp_path / name
        for text in (None, "", "[]"):
            if text is not None:
                path.write_text(text)
            with pytest.raises(ConfigError, match=f"{name} cannot be read .*name another"):
                session.check_folder(tmp_path, config)
        path.write_text(json.dumps(config) if name == "config.json" else "{}")
    assert session.check_folder(tmp_path, config) == {}
    session.check_folder(tmp_path, config | {"has_audit": True})  # of the answers that are there
