"""Training in two processes: the losses and the figures of one device, checkpoints that move."""

import signal

import jax
import numpy as np
import pytest
from support import train_worker
from support.files import experiment_files, tiny_config
from support.launched import begin, run

from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.loading import load_model, random_head
from spec_jax.train.log import read_metrics

WORKER = "support.train_worker"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, a head, texts and prompts."""
    folder = tmp_path_factory.mktemp("files")
    config = experiment_files(folder, tiny_config())
    head = random_head(EagleConfig.of_target(config, 1), jax.random.key(1))
    head.save(folder / "head", load_model(folder / "target"))
    return folder


def check_same(one, other):
    """Figures of two runs by step, which were summed in another order."""
    one, other = (read_metrics(folder / "metrics.jsonl") for folder in (one, other))
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for a, b in zip(one, other):
        for name in a.keys() - {"cpu_s", "tok_s"}:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, err_msg=name)


@pytest.mark.exhaustive
def test_two_processes_train_as_one_device_does(files, tmp_path):
    alone, two, views = (tmp_path / name for name in ("alone", "two", "views"))
    options = ["--config.what=head", f"--config.files={files}", f"--workdir={two}"]
    options += ["--config.mesh=data:2,tensor:2", "--config.is_fully_sharded=True"]
    code, output = run(2, 2, WORKER, *options, f"--config.views={views}")
    assert code == 0, output
    final = train_worker.train("head", alone, files)
    check_same(alone, two)
    exported = [(folder / "export" / "model.safetensors").stat().st_size for folder in (alone, two)]
    assert exported[0] == exported[1]
    resumed = train_worker.train("head", two, files)  # their checkpoint, on one device
    assert resumed.keys() == final.keys()
    for name, value in final.items():
        np.testing.assert_allclose(resumed[name], value, rtol=1e-4, err_msg=name)
    check_views(views, files, tmp_path / "again", alone)


def check_views(views, files, folder, alone):
    """Each process wrote its two rows of 6 batches and of one that is evaluated on twice, and one
    process reads them all."""
    stored = [(views.parent / f"stored_by_{i}").read_text().split() for i in range(2)]
    assert [len(names) for names in stored] == [2 * (train_worker.STEPS + 1)] * 2
    assert {path.stem for path in views.iterdir()} == {*stored[0], *stored[1]}
    assert not {*stored[0]} & {*stored[1]}
    before = {path: path.stat().st_mtime_ns for path in views.iterdir()}
    train_worker.train("head", folder, files, views=str(views))
    assert {path: path.stat().st_mtime_ns for path in views.iterdir()} == before
    check_same(alone, folder)


@pytest.mark.exhaustive
def test_sigterm_in_one_process_saves_and_ends_all_and_what_is_damaged_stops_all(tmp_path):
    options = ["--config.mesh=data:2", "--config.steps=100000", f"--workdir={tmp_path}"]
    begun = begin(WORKER, options, options)
    for line in begun[0].stdout:
        if "step=2 " in line:
            break
    begun[1].send_signal(signal.SIGTERM)
    outputs = [child.communicate(timeout=150)[0] for child in begun]
    assert [child.returncode for child in begun] == [0, 0], outputs
    (step,) = (path.name for path in (tmp_path / "checkpoints" / "latest").iterdir())
    assert f"SIGTERM in another process: saved at step {step};" in outputs[0]

    # What one of them cannot read stops both, since the other may have read its part.
    newest = tmp_path / "checkpoints" / "latest" / step
    for path in newest.rglob("ocdbt.process_1/d/*"):
        path.write_bytes(path.read_bytes()[:10])
    outputs = [child.communicate(timeout=150)[0] for child in begin(WORKER, options, options)]
    assert f"{newest} cannot be read" in outputs[0] and "move it away" in outputs[0]
    assert [path.name for path in newest.parent.iterdir()] == [step]  # and nothing was renamed
