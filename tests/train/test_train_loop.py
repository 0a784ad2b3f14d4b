"""The training loop: killed, asked to stop, fed with NaN, its files damaged, its disk full."""

import functools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
import types

import jax
import numpy as np
import pytest
from support import tiny_training
from support.tiny_training import STEPS, fresh, run

from spec_jax import compilation
from spec_jax.errors import TrainingError
from spec_jax.train import loop
from spec_jax.train.checkpoint import Checkpoints
from spec_jax.train.log import flatten, read_metrics
from spec_jax.train.means import Mean, report
from spec_jax.train.optimizer import set_end, with_end

# orbax leaves the threads of a read that failed to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def start(folder):
    """A process that trains there, forked off one that has imported all that it needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([tiny_training.__name__])
    process = context.Process(target=tiny_training.main, args=(folder,))
    with pytest.MonkeyPatch.context() as patch:  # Python before 3.12.4 preloads from there alone
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        process.start()
    return process


def wait_for_lines(folder, count):
    """Returns when the run has logged so many lines."""
    for _ in range(6000):
        if len(read_metrics(folder / "metrics.jsonl")) >= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"{folder} has not logged {count} lines in a minute")


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), a, b))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    state, is_done = run(folder)
    assert is_done and int(state.step) == STEPS
    return folder, jax.device_get(state)


@pytest.mark.exhaustive
@pytest.mark.landing
def test_killed_at_ten_moments_it_ends_bit_equal(tmp_path, undisturbed):
    rng = np.random.default_rng(0)
    kills, done = 0, 0
    while kills < 10:
        process = start(tmp_path)
        wait_for_lines(tmp_path, min(done + 1 + int(rng.integers(3)), STEPS))
        time.sleep(float(rng.uniform(0, 0.05)))
        process.kill()
        process.join()
        kills += 1
        done = max((line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")), default=0)
    process = start(tmp_path)
    process.join()
    assert process.exitcode == 0
    with np.load(tmp_path / "final.npz") as found:
        expected = jax.tree.leaves(undisturbed[1])
        assert len(found.files) == len(expected)
        assert all(np.array_equal(found[n], x) for n, x in zip(found.files, expected))
    steps = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1))  # no line twice, none left out


def test_the_first_ctrl_c_saves_and_another_ends_at_once(tmp_path, capsys, monkeypatch):
    said, rarely = [], {"checkpoint_every_s": 1e9}
    monkeypatch.setattr(
        compilation, "Notice", lambda what: said.append(what) or types.SimpleNamespace(close=list)
    )

    def press(step):
        if step == 5:
            jax.jit(lambda x: x + 5)(1.0)  # as the first step compiles
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    _, is_done = run(tmp_path, on_step=press, **rarely)
    assert not is_done and signal.getsignal(signal.SIGINT) == before
    assert "Ctrl-C: saved at step 6; the same command goes on from there" in capsys.readouterr().out
    assert "compiling and running the training step" in said
    preemption = functools.partial(loop.Preemption, clock=lambda: clock_s[0])
    monkeypatch.setattr(loop, "Preemption", preemption)

    def press_again(step):
        for now_s in (7.0, 7.4, 7.6):  # the second one is the first, sent on by another program
            clock_s[0] = now_s
            signal.raise_signal(signal.SIGINT)
            pressed.append(step)

    pressed, clock_s = [], [0.0]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_step=press_again, **rarely)
    assert pressed == [6, 6]
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.last_step == 6, "where the same command goes on from"


def copy_of(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return sorted((tmp_path / "checkpoints" / "latest").glob("[0-9]*"), key=lambda p: int(p.name))


@pytest.mark.parametrize("which", range(4))
def test_a_truncated_checkpoint_is_refused_by_name(tmp_path, undisturbed, which):
    older, newest = copy_of(undisturbed[0], tmp_path)
    files = [path for path in newest.rglob("*") if path.is_file() and path.stat().st_size > 0]
    path = sorted(files, key=lambda path: -path.stat().st_size)[which % len(files)]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    said = []
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        state = checkpoints.restore(fresh(), said.append)
    if which and not said:  # a file that holds no number: all is there
        assert same(jax.device_get(state), undisturbed[1])
        return
    assert int(state.step) == int(older.name)
    assert len(said) == 1 and f"{newest} is refused" in said[0]
    assert newest.with_name(f"refused-{newest.name}").is_dir()
    again, is_done = run(tmp_path)  # the step is saved anew under its own name
    assert is_done and newest.is_dir() and same(jax.device_get(again), undisturbed[1])


def test_a_foreign_checkpoint_is_refused(tmp_path, undisturbed):
    copy_of(undisturbed[0], tmp_path)
    other = fresh()
    other = other.replace(params={**other.params, "final_norm": np.ones(9, np.float32)})
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        with pytest.raises(TrainingError, match="no checkpoint in .* can be read"):
            checkpoints.restore(other, lambda text: None)


def test_of_no_checkpoint_the_fresh_state_stays(tmp_path):
    state = fresh()
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.restore(state) is state and checkpoints.last_step is None
        with pytest.raises(TrainingError, match="holds no checkpoint"):
            checkpoints.restore_best(state)


def test_a_loss_that_is_no_number_names_step_and_batch(tmp_path):
    whole = tiny_training.step_fn()

    def step_fn(state, batch):
        state, metrics = whole(state, batch)
        bad = jax.numpy.where(state.step == 7, jax.numpy.nan, metrics["loss"])
        return state, {**metrics, "loss": bad}

    with pytest.raises(TrainingError, match=r"nan at step 7 \(windows of step 6\).* of step 6"):
        options = dict(log_every=3, describe_batch=lambda step: f"windows of step {step}")
        run(tmp_path, step_fn=step_fn, **options)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert int(checkpoints.restore(fresh()).step) == 6


@pytest.mark.exhaustive
def test_a_full_disk_is_a_clear_error_and_nothing_is_lost(tmp_path, undisturbed):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step):
        if step == 5:  # files may not grow any more
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))

    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(TrainingError, match="could not be written to .* make room"):
            run(tmp_path, on_step=fill, log_every=1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert 1 <= int(checkpoints.restore(fresh()).step) <= 6
    state, _ = run(tmp_path)
    assert same(jax.device_get(state), undisturbed[1])


def test_the_best_state_by_a_figure_is_kept(tmp_path):
    figures = {2: 1.0, 4: 3.0, 6: 2.0}
    seen = {}

    def evaluate(state):
        seen[int(state.step)] = jax.device_get(state.params)
        return {"tau": figures[int(state.step)]}

    run(tmp_path, num_steps=6, evaluate=evaluate, eval_every=2, best_by="tau")
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.best == (4, 3.0)
        best = checkpoints.restore_best(fresh())
        assert int(best.step) == 4 and same(best.params, seen[4])
        assert not checkpoints.save_best(8, fresh(), 2.5)


def test_a_position_that_no_draft_reached_has_no_figure():
    accept = Mean(np.asarray([1.0, 0.5, 0.0]), np.asarray([2.0, 0.5, 0.0]))
    assert flatten(report({"teacher_forced_accept": accept})) == {
        "teacher_forced_accept_1": 0.5,
        "teacher_forced_accept_2": 1.0,
        "teacher_forced_tau": 2.0,
    }


def test_figures_are_logged_by_step_and_position(tmp_path):
    assert flatten({"a": 1, "b": np.asarray([0.5, 0.25])}) == {"a": 1, "b_1": 0.5, "b_2": 0.25}
    run(tmp_path, num_steps=3, summarise=lambda figures: {"pair": np.ones(2), **report(figures)})
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {"loss", "grad_norm", "pair_1", "pair_2", "tok_s", "cpu_s"} <= set(lines[0])
    assert list((tmp_path / "tensorboard").iterdir())
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(lines[0])[:9])
    assert read_metrics(tmp_path / "metrics.jsonl") == lines


def test_an_end_that_is_set_later_has_the_rates_of_one_that_was_known():
    known = tiny_training.optimizer(steps=10)
    late = with_end(tiny_training.optimizer(steps=1 << 30), 0.5)
    params = {"w": np.ones((2, 2), np.float32)}
    states = [known.init(params), set_end(late.init(params), 10)]
    for step in range(12):
        grads = {"w": np.full((2, 2), 0.1 + step, np.float32)}
        updates = []
        for i, optimizer in enumerate((known, late)):
            update, states[i] = optimizer.update(grads, states[i], params)
            updates.append(np.asarray(update["w"]))
        np.testing.assert_allclose(*updates, rtol=1e-5, atol=1e-9)
        assert (np.abs(updates[0]).max() > 0) == (0 < step < 10)
