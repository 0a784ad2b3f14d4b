"""What tests cost: measured in every run, and used to order the next one.

A run with workers writes ``costs.json`` beside the compiled programs that are kept; where there is
none yet, the order is that of ``tests/recorded/costs.json``, which

    python tests/support/cost.py

replaces by what the last runs measured. Both have CPU-seconds by file and test function, a mean of
its cases; functions of less than half a second are one mean, by the name "".
"""

import collections
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable

import pytest

RECORDED = pathlib.Path(__file__).parents[1] / "recorded" / "costs.json"
_LEAST_S = 0.5  # of a function that is named
_USUAL_S = 0.1  # of a test of a file that no run has measured

Costs = dict[str, dict[str, float]]


def read(folder: pathlib.Path) -> Costs:
    """What the last runs have measured, by a folder of kept programs; else what is committed."""
    costs = json.loads(RECORDED.read_text(encoding="utf-8"))
    kept = folder / "costs.json"
    return costs | (json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {})


def write(costs: Costs, path: pathlib.Path) -> None:
    """Writes costs in one step, so that a run that reads them meanwhile has the old or the new."""
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(costs, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(path)


def units(ids: Iterable[str], costs: Costs, workers: int) -> dict[str, str]:
    """Splits tests into units of work, each for one worker.

    A unit is a file, whose tests share what they make and compile; or a part of a file that is
    more than an eighth of a worker's work.

    Args:
      ids: of tests, in any order.
      costs: CPU-seconds by file and function.
      workers: how many there are.

    Returns:
      The unit of each test; the most expensive unit is first.
    """
    ids = sorted(ids)
    most_s = sum(expected_s(test, costs) for test in ids) / workers / 8
    unit_of, total_s, part = {}, collections.Counter(), 0
    for test in ids:
        file, cost_s = test.partition("::")[0], expected_s(test, costs)
        if total_s[f"{file} {part}"] and total_s[f"{file} {part}"] + cost_s > most_s:
            part += 1
        unit_of[test] = f"{file} {part}"
        total_s[f"{file} {part}"] += cost_s
    return dict(sorted(unit_of.items(), key=lambda item: (-total_s[item[1]], item[1])))


def expected_s(test: str, costs: Costs) -> float:
    """The CPU-seconds of a test, given by its id."""
    file, _, name = test.partition("::")
    of_file = costs.get(file, {})
    return of_file.get(name.partition("[")[0], of_file.get("", _USUAL_S))


class Recorder:
    """A pytest plugin that measures every test, and sums up in the process that reports."""

    def __init__(self, folder: pathlib.Path):
        import jax

        self._folder, self._programs, self._begin = folder, 0, (0.0, 0)
        self._tests: list[tuple[str, float, int]] = []
        self._workers = collections.defaultdict(collections.Counter)
        self._begin_s = time.time()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, name, duration, **options):
        self._programs += name == "/jax/core/compile/backend_compile_duration"

    def _now(self):
        t = os.times()
        return time.process_time() + t.children_user + t.children_system, self._programs

    def pytest_runtest_logstart(self):
        self._begin = self._now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":
            report.cost = [b - a for a, b in zip(self._begin, self._now())]
        return report

    def pytest_runtest_logreport(self, report):
        worker = self._workers[getattr(report, "worker_id", "the run")]
        worker["busy_s"] += report.duration
        worker["end_s"] = time.time() - self._begin_s
        if hasattr(report, "cost"):
            worker["cpu_s"] += report.cost[0]
            self._tests.append((report.nodeid, *report.cost))

    def pytest_terminal_summary(self, terminalreporter, config):
        if not self._tests:
            return
        files = collections.defaultdict(lambda: collections.defaultdict(list))
        for test, cpu_s, _ in self._tests:
            file, _, name = test.partition("::")
            files[file][name.partition("[")[0]].append(cpu_s)
        sums = {file: sum(map(sum, functions.values())) for file, functions in files.items()}
        most = sorted(sums, key=sums.get, reverse=True)[:5]
        for line in (
            f"{sum(sums.values()):.0f} CPU-seconds, {sum(row[2] for row in self._tests)} programs; "
            + ", ".join(f"{pathlib.Path(file).name} {sums[file]:.0f}" for file in most),
            *(
                f"{name}: {w['cpu_s']:.0f} CPU-seconds, busy for {w['busy_s']:.0f} seconds, "
                f"ended after {w['end_s']:.0f}"
                for name, w in sorted(self._workers.items())
            ),
        ):
            terminalreporter.write_line(line)
        if getattr(config.option, "numprocesses", None):
            write(read(self._folder) | self._means(files), self._folder / "costs.json")

    def _means(self, files) -> Costs:
        """Costs by file and function; functions that did not run keep what they had."""
        costs, before = {}, read(self._folder)
        for file, functions in files.items():
            means = {name: sum(cases) / len(cases) for name, cases in functions.items()}
            cheap = [mean for mean in means.values() if mean < _LEAST_S]
            costs[file] = {k: s for k, s in before.get(file, {}).items() if k not in means}
            costs[file] |= {name: round(s, 1) for name, s in means.items() if s >= _LEAST_S}
            if cheap:
                costs[file][""] = round(sum(cheap) / len(cheap), 2)
        return costs


def main() -> None:
    from support import programs

    root = RECORDED.parents[2]
    costs = read(programs.root())
    write({file: costs[file] for file in costs if (root / file).exists()}, RECORDED)


if __name__ == "__main__":
    sys.path.insert(0, str(RECORDED.parents[1]))
    main()
