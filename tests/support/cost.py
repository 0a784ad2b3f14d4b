"""What each test costs, and a table of it by file.

    SPEC_JAX_TEST_COSTS=costs.jsonl SPEC_JAX_TEST_CACHE=$(mktemp -d) pytest -n 2
    python tests/support/cost.py costs.jsonl             # a table for docs/measurements.md
    python tests/support/cost.py costs.jsonl --record    # and tests/recorded/costs.json

Files begin in the order of ``tests/recorded/costs.json``, the most expensive first.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import sys
import time

import pytest

RECORDED = pathlib.Path(__file__).parents[1] / "recorded" / "costs.json"


class Recorder:
    """A pytest plugin that appends one JSON line a test to a file."""

    def __init__(self, path: str):
        import jax

        self._path, self._programs = path, 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, name, duration, **options):
        self._programs += name == "/jax/core/compile/backend_compile_duration"

    def _now(self):
        t = os.times()
        return time.process_time() + t.children_user + t.children_system, self._programs

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        begin = self._now()
        result = yield
        cpu_s, programs = (b - a for a, b in zip(begin, self._now()))
        row = {"id": item.nodeid, "cpu_s": round(cpu_s, 3), "programs": programs}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return result


def main(path: str, *options: str) -> None:
    files = collections.defaultdict(lambda: [0, 0.0, 0])
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name in (row["id"].split("::")[0], "together"):
            for i, value in enumerate((1, row["cpu_s"], row["programs"])):
                files[name][i] += value
    files = dict(sorted(files.items(), key=lambda item: -item[1][1]))
    print("| file | tests | CPU-seconds | programs compiled |\n|---|---|---|---|")
    for name, (tests, cpu_s, programs) in files.items():
        print(f"| {name} | {tests} | {cpu_s:.1f} | {programs} |")
    if "--record" in options:
        del files["together"]
        costs = {pathlib.Path(name).name: round(row[1]) for name, row in files.items()}
        kept = {name: cpu_s for name, cpu_s in costs.items() if cpu_s >= 3}
        RECORDED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
