"""Several processes: they decode what one does, agree before they begin, and stop together."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import decode_worker
from support.files import tiny_config, tokenizer_of, write_lines
from support.launched import begin, run
from support.tiny_models import random_weights

from configs import regenerate_zoo
from experiments import launch
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


@pytest.mark.exhaustive
def test_two_processes_regenerate_the_lines_of_one_device(tmp_path):
    text = ["def f(x):\n    return x + 1\n", "for i in range(10):\n    print(i)\n"]
    tokenizer = tokenizer_of(text * 20, 280)
    options = dict(max_position_embeddings=64, eos_token_id=tuple(range(5, 30)))
    config = tiny_config(vocab_size=288, num_attention_heads=4, **options)
    for seed, name in enumerate(("target", "draft")):
        weights = random_weights(config, seed)
        checkpoint.save_pretrained(tmp_path / name, weights, config, tokenizer)
    prompts = [f"def f{i}(x): return {i}" for i in range(7)]
    write_lines(tmp_path / "prompts.jsonl", ({"prompt": prompt} for prompt in prompts))
    values = dict(target=str(tmp_path / "target"), draft=str(tmp_path / "draft"), num_prompts=0)
    values |= dict(prompts=str(tmp_path / "prompts.jsonl"), max_prompt_tokens=32, batch=4)
    values |= dict(max_new_tokens=8, log_every_s=0, temperatures=(1.0,))
    alone = regenerate_zoo.get_config()
    alone.update(values)
    regenerate(alone, tmp_path / "alone")
    flags = [f"--config.{key}={value}" for key, value in values.items() if key != "temperatures"]
    code, output = run(
        2,
        2,
        "experiments.regenerate",
        f"--workdir={tmp_path / 'two'}",
        *flags,
        "--config.mesh=data:2,tensor:2",
        "--config.temperatures=1.0",
    )
    assert code == 0, output
    read = lambda name: sorted((tmp_path / name / "responses.jsonl").read_text().splitlines())
    assert read("two") == read("alone") and len(read("two")) == len(prompts)
    assert json.loads((tmp_path / "two" / "report.json").read_text())["responses"] == len(prompts)
    assert "[0] 7 responses" in output and "[1] 7 responses" not in output


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
    assert "(config.target) is [[2, " in said and "; what is in prompts.txt (config.pro" in said
    assert "the processes differ" not in outputs[1]


@pytest.mark.parametrize("what", ["value", "shape", "config.json", "tokenizer.json", "gone"])
def test_a_model_is_known_by_its_shapes_and_a_file_by_its_contents(tmp_path, what):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    save_file({"w": np.zeros(4)}, folder / "model.safetensors")
    values = {"config.target": str(folder), "config.steps": 3, "config.drafts": ("zoo/draft", "")}
    before = inputs.of_config(values)
    assert list(before)[0] == f"what is in {folder} (config.target)" and len(before) == 2
    if what == "gone":
        assert list(inputs.of_config(values | {"config.target": "no/such"})) == list(before)[1:]
        return
    if what.endswith("json"):
        (folder / what).write_text("[]")
    else:
        array = np.ones(4) if what == "value" else np.zeros((2, 2))
        save_file({"w": array}, folder / "model.safetensors")
    assert (inputs.of_config(values) == before) == (what == "value")
    texts = {"config.data.text": str(folder), "config.prompts": str(folder / "config.json")}
    assert len(inputs.of_config(texts)) == 1  # process 0 alone reads the former


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
    began = time.monotonic()
    code, output = run(2, 1, WORKER, "--config.act=kill")
    assert code == 128 + 9 and time.monotonic() - began < 40
    assert "process 1 was killed by SIGKILL; the others are stopped" in output
