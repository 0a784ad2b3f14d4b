"""What every run of an experiment leaves in its folder."""

import json
import pathlib

from experiments.run import report


def check_run_files(folder: pathlib.Path, experiment: str) -> dict:
    """Asserts that the four files are there and agree, and returns the report."""
    config, environment, rep = (
        json.loads((folder / name).read_text(encoding="utf-8")) for name in report.FILES[:3]
    )
    assert rep["config"] == config and rep["environment"] == environment
    assert {"python", "jax", "spec_jax", "devices", "cores", "time"} <= set(environment)
    assert rep["command"].startswith(f"python -m experiments.{experiment}")
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# ") and f"`{rep['command']}`" in text
    assert environment["cpu_model"] in text and f"jax {environment['jax']}" in text
    assert environment["platform"] in text
    return rep
