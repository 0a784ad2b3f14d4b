"""The benchmark of a GPU: its code on small shapes, and parts that fail alone."""

from __future__ import annotations

import sys
import time

import pytest
from support import programs
from support.runs import check_run_files

from configs import benchmark_gpu
from experiments import benchmark
from experiments.benchmarks import gpu
from spec_jax.errors import ConfigError

# A process of a part that measures nothing: each step says what happens.
FAKE = """
import os, time
from experiments.benchmarks.worker_lines import serve

def answer(request):
    (step,) = request["step"]
    if step == "dies":
        os._exit(137)
    if step == "hangs":
        time.sleep(600)
    line = {"what": step, "values": [3.0], "predicted": 1 / (step != "fails")}
    return {"lines": [line], "peak_gb": 1}

serve(lambda setup: ({"card": setup["part"]}, answer))
"""


@pytest.fixture
def config():
    config = benchmark_gpu.get_config()
    config.tiny, config.repeats = True, 1
    return config


@pytest.mark.exhaustive
def test_every_part_measures_beside_a_prediction(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(programs.folder()))
    record = benchmark.run(config, tmp_path)
    assert check_run_files(tmp_path, "benchmark")["is_complete"]
    assert not record["left_out"] and not [x for x in record["notes"] if "busy" not in x]
    assert {line["part"] for line in record["lines"]} == {*gpu.parts(config)}
    assert all(line["value"] > 0 and line["predicted"] > 0 for line in record["lines"])
    equal = [line for line in record["lines"] if "rows equal" in line["what"]]
    assert len(equal) == 6 and all(line["value"] == line["predicted"] for line in equal)
    text, out = (tmp_path / "report.md").read_text(), capsys.readouterr().out
    assert "predicted" in text and all(f"| {line['what']} |" in out for line in record["lines"])


FAILS = dict(fails="part, fails: ZeroDivisionError: division by zero", dies="exit code 137")
FAILS |= dict(hangs="its limit of")


@pytest.mark.representatives("fails", "dies")
@pytest.mark.parametrize("last", FAILS)
def test_what_a_part_measured_before_it_fails_stays(config, monkeypatch, last):
    monkeypatch.setattr(gpu, "_PROCESS", (sys.executable, "-c", FAKE))
    end = time.monotonic() + 120
    part = gpu.Part("part", 15 if last == "hangs" else 120, [("first",), (last,)], end)
    lines, record, notes, _ = part.measure(config, {})
    assert [line.what for line in lines] == ["first"] and record["card"] == "part"
    assert len(notes) == 1 and FAILS[last] in notes[0]
    if last == "fails":
        with pytest.raises(ConfigError, match="division by zero"):  # no figure at all
            part._replace(steps=[(last,)]).measure(config, {})
        with pytest.raises(ConfigError, match="none are left"):
            part._replace(end=time.monotonic()).measure(config, {})


def test_a_device_without_known_figures_is_refused(config, tmp_path):
    for changes, words in (
        ({"tiny": False}, "expected a GPU"),
        ({"chip": "h300"}, "no published figures of 'h300' are known"),
        ({"repeats": 0}, "repeats is 0"),
    ):
        wrong = config.copy_and_resolve_references()
        wrong.update(changes)
        with pytest.raises(ConfigError, match=words):
            benchmark.run(wrong, tmp_path / "run")
    assert not (tmp_path / "run").exists()
