"""Several processes: they decode what one does, agree before they begin, and stop together."""

import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from support import decode_worker
from support.files import held_out, tiny_config, tokenizer_of, write_lines
from support.launched import begin, run
from support.tiny_models import random_weights

from configs import evaluate_zoo, regenerate_zoo
from experiments import launch
from experiments.evaluate import evaluate
from experiments.regenerate import regenerate
from experiments.run import inputs
from spec_jax import processes
from spec_jax.errors import ConfigError
from spec_jax.models import checkpoint

WORKER = "support.process_worker"
ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_one_process_needs_no_other():
    value = {"any": object()}
    assert processes.from_writer(value) is value
    assert processes.is_writer() and (processes.index(), processes.count()) == (0, 1)
    assert not processes.any_process(False) and processes.any_process(True)
    processes.check_same({"a": 1})
    processes.barrier("nowhere")
    processes.finish()


def test_half_of_an_address_is_refused():
    with pytest.raises(ConfigError, match="num_processes 2 and process_id None; expected all thr"):
        processes.start("127.0.0.1:1", 2)


def test_the_launcher_refuses_no_processes(capsys):
    with pytest.raises(SystemExit):
        launch.main(["--processes=0", "experiments.decode"])
    assert "--processes is 0; expected 1 or more" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_two_processes_decode_what_one_device_decodes(tmp_path):
    """Cancellation in process 0 alone, and Ks chosen by clocks, are the same in both."""
    code, output = run(
        2, 4, "support.decode_worker", "--config.mesh=data:2,tensor:4", f"--workdir={tmp_path}"
    )
    assert code == 0, output
    first, second = (json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2))
    assert first == second
    assert first["fixed"] == decode_worker.fixed(None)
    assert first["cancelled"] == json.loads(json.dumps(decode_worker.cancelled(None)))
    assert [reason for reason, _ in first["cancelled"]].count("cancelled") == 1


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """Options of experiments: a target, a draft and prompts."""
    folder = tmp_path_factory.mktemp("files")
    (text,) = held_out(1)
    tokenizer = tokenizer_of([text])
    config = tiny_config(max_position_embeddings=64, eos_token_id=tuple(range(5, 30)))
    weights = random_weights(config)
    near = jax.tree.map(lambda w, noise: w + 0.2 * noise, weights, random_weights(config, 1))
    for name, params in (("target", weights), ("draft", near)):
        checkpoint.save_pretrained(folder / name, params, config, tokenizer)
    prompts = ({"prompt": text[i : i + 12]} for i in (0, 40, 90, 200))
    write_lines(folder / "prompts.jsonl", prompts)
    names = {"target": "target", "draft": "draft", "prompts": "prompts.jsonl"}
    return {name: str(folder / file) for name, file in names.items()} | dict(max_new_tokens=8)


def run_two(module, values, folder):
    """The report that two processes write, and what they print; a tuple is written with commas."""
    text = lambda value: ",".join(map(str, value)) if isinstance(value, tuple) else value
    options = [f"--config.{name}={text(value)}" for name, value in values.items()]
    options += ["--config.mesh=data:2,tensor:2", f"--workdir={folder}"]
    code, output = run(2, 2, module, *options)
    assert code == 0, output
    return json.loads((folder / "report.json").read_text(encoding="utf-8")), output


@pytest.mark.exhaustive
def test_two_processes_regenerate_the_lines_of_one_device(values, tmp_path):
    values = values | dict(num_prompts=0, max_prompt_tokens=32, batch=4, log_every_s=0)
    values["temperatures"] = (1.0,)
    alone = regenerate_zoo.get_config()
    alone.update(values)
    regenerate(alone, tmp_path / "alone")
    report, output = run_two("experiments.regenerate", values, tmp_path / "two")
    read = lambda name: sorted((tmp_path / name / "responses.jsonl").read_text().splitlines())
    assert read("two") == read("alone") and len(read("two")) == report["responses"] == 4
    assert "[0] 4 responses" in output and "[1] 4 responses" not in output


COUNTS = ("emitted", "first", "accepted", "corrected", "bonus", "drafted", "rounds")


@pytest.mark.exhaustive
def test_two_processes_evaluate_as_one_device_does(values, tmp_path):
    """``experiments.decode`` is the same experiment with other values."""
    values = dict(target=values["target"], drafts=values["draft"], data=values["prompts"])
    values |= dict(num_prompts=4, batches=(4,), max_new_tokens=8, ks=(2,), repeats=1)
    two = run_two("experiments.evaluate", values, tmp_path / "two")[0]["results"]
    config = evaluate_zoo.get_config()
    config.update(values)
    one = evaluate(config, tmp_path / "one")["results"]
    counts = lambda results: [[row[name] for name in COUNTS] for row in results]
    assert counts(two) == counts(one)
    assert [row["identical_to_plain"] for row in two] == [True, True]
    assert two[1]["tau"] == pytest.approx(one[1]["tau"]) and two[1]["accepted"] > 0
    assert two[1]["tau_interval"] == pytest.approx(one[1]["tau_interval"])


@pytest.mark.exhaustive
def test_a_process_that_does_not_write_reads_no_plot(values, tmp_path, monkeypatch):
    """Another process may be writing it at that moment."""
    monkeypatch.setattr(processes, "is_writer", lambda: False)
    (tmp_path / "acceptance.svg").write_text("")
    config = evaluate_zoo.get_config()
    config.update(target=values["target"], drafts=values["draft"], data=values["prompts"])
    config.update(num_prompts=1, max_new_tokens=4, ks=(2,), repeats=1)
    evaluate(config, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["acceptance.svg"]


@pytest.mark.exhaustive
def test_different_configurations_and_inputs_are_refused_by_every_process(tmp_path):
    folders = [tmp_path / name for name in ("a", "b")]
    for size, folder in enumerate(folders, 4):
        (folder / "model").mkdir(parents=True)
        (folder / "prompts.txt").write_text(f"{size}")
        (folder / "model" / "config.json").write_text("{}")
        save_file({"w": np.zeros(size)}, folder / "model" / "model.safetensors")
    paths = ["--config.prompts=prompts.txt", "--config.target=model"]
    begun = begin(
        WORKER, [*paths, "--config.number=2"], [*paths, "--config.number=3"], folders=folders
    )
    outputs = [child.communicate(timeout=100)[0] for child in begun]
    assert [child.returncode for child in begun] == [2, 2], outputs
    (said,) = (line for line in outputs[0].splitlines() if "the processes differ" in line)
    assert "config.number is 3 in process 1 and 2 in process 0; what is in model " in said
    assert (
        "(config.target): model.safetensors is " in said
        and "; what is in prompts.txt (config.pro" in said
    )
    assert "the processes differ" not in outputs[1]


@pytest.mark.parametrize("what", ["value", "shape", "config.json", "tokenizer.json", "gone"])
def test_a_model_is_known_by_its_shapes_and_a_file_by_its_contents(tmp_path, what):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    save_file({"w": np.zeros(4)}, folder / "model.safetensors")
    values = {"config.target": str(folder), "config.steps": 3, "config.drafts": ("zoo/draft", "")}
    of_config = functools.partial(inputs.of_config, has_weights=False)
    before = of_config(values)
    assert list(before)[0] == f"what is in {folder} (config.target)" and len(before) == 2
    if what == "gone":
        assert list(of_config(values | {"config.target": "no/such"})) == list(before)[1:]
        return
    if what.endswith("json"):
        (folder / what).write_text("[]")
    else:
        array = np.ones(4) if what == "value" else np.zeros((2, 2))
        save_file({"w": array}, folder / "model.safetensors")
    assert (of_config(values) == before) == (what == "value")
    texts = {"config.data.text": str(folder), "config.prompts": str(folder / "config.json")}
    assert len(of_config(texts)) == 1  # process 0 alone reads the former


@pytest.mark.exhaustive
def test_an_error_in_one_process_stops_the_others():
    code, output = run(2, 1, WORKER, "--config.act=config")
    assert code == 2, output
    assert "[1] process 1 of 2: error: a file that one process lacks" in output
    assert "[0] process 1 has stopped: a file that one process lacks" in output


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_waiting", [False, True])
def test_the_others_stop_within_a_minute_of_a_kill_and_name_it(is_waiting):
    """Whether they compute together, or each is busy on its host."""
    options = ["--config.act=kill", f"--config.is_waiting={is_waiting}"]
    begun = begin(WORKER, options, options, options)
    outputs = [child.communicate(timeout=150)[0] for child in begun]
    took_s = time.time() - float(re.search(r"act ([\d.]+)", outputs[1])[1])
    assert [child.returncode for child in begun] == [1, -9, 1], outputs
    assert took_s < 60
    for output in (outputs[0], outputs[2]):
        assert f"process 1 has stopped: no sign of life for 30 s (pid {begun[1].pid}" in output


def test_ctrl_c_reaches_launched_processes_once_and_the_launcher_waits_for_them():
    command = [sys.executable, "-m", "experiments.launch", "--processes=2", "support.interrupted"]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    options = dict(text=True, env=os.environ | {"PYTHONPATH": path}, start_new_session=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as launcher:
        began = [launcher.stdout.readline() for _ in range(2)]
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
        ended = launcher.communicate(timeout=60)[0].splitlines()
    assert sorted(began) == ["[0] ready\n", "[1] ready\n"] and launcher.returncode == 0
    assert sorted(ended) == ["[0] interrupted 1 times", "[1] interrupted 1 times"]


@pytest.mark.exhaustive
@pytest.mark.landing
def test_the_launcher_names_a_killed_process_at_once():
    code, output = run(2, 1, WORKER, "--config.act=kill")
    assert code == 128 + 9
    assert "process 1 was killed by SIGKILL; the others are stopped" in output
