"""A round's stages in a recorded trace: names from the program's text, every moment once."""

import dataclasses
import gzip
import json
import statistics

import numpy as np
import pytest
from jax.profiler import ProfileData

from experiments.benchmarks.shapes import random_model
from spec_jax import processes
from spec_jax.config import SamplerConfig
from spec_jax.errors import ConfigError
from spec_jax.evaluation import profile as profiling
from spec_jax.evaluation import stages
from spec_jax.evaluation.bench import Bench
from spec_jax.evaluation.cells import Cell
from spec_jax.evaluation.stages import OperationRun, stage_of

# As XLA prints it: a fusion with a computation of its own, a loop, and a copy without metadata.
PROGRAM = """HloModule jit_generate, is_scheduled=true

%fused_computation (param_0: f32[4]) -> f32[4] {
  %param_0 = f32[4]{0} parameter(0)
  ROOT %multiply.1 = f32[4]{0} multiply(%param_0, %param_0), metadata={op_name="jit(f)/while/body/draft/draft_pass/mlp/mul" stack_frame_id=3}
}

%body (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[], /*index=1*/f32[4]{0}) parameter(0)
  %fusion.1 = f32[4]{0} fusion(%arg), kind=kLoop, calls=%fused_computation, metadata={op_name="jit(f)/while/body/draft/draft_pass/mlp/mul"}
  %copy.2 = f32[4]{0} copy(%fusion.1)
  %dot.3 = (f32[4]{0}, s8[0]{0}) custom-call(%copy.2), metadata={op_name="jit(f)/while/body/verify/attention/dot_general"}
  %while.9 = (s32[], f32[4]{0}) while(%arg), condition=%c, body=%b, metadata={op_name="jit(f)/while/body/verify/while"}
  %reduce.7 = f32[] reduce(%dot.3), metadata={op_name="reduce_sum"}
  ROOT %tuple.4 = (s32[], f32[4]{0}) tuple(%arg), metadata={op_name="jit(f)/while/body/verify/jit(take)/add"}
}

ENTRY %main (p: s32[]) -> s32[] {
  %add.5 = s32[] add(%p, %p), metadata={op_name="jit(f)/while/cond/lt"}
  ROOT %copy.6 = s32[] copy(%add.5)
}
"""  # noqa: E501


SCOPES = {
    "jit(f)/while/body/verify/attention/cond/branch_1_fun/mlp/mul": ("verify", "attention"),
    "jit(f)/while/body/draft/while/body/draft_pass/attention/add": ("draft", "draft_pass"),
    "jit(f)/while/body/commit/draft_pass/mlp/mul": ("commit", "draft_pass"),
    "jit(f)/while/body/accept/vmap()/iota": ("accept", ""),
    "jit(f)/while/body/verify/jit(take_along_axis)/draft": ("verify", ""),
    "jit(f)/while/body/add": ("loop", ""),
    "reduce_sum": ("loop", ""),
}


def test_a_scope_names_its_stage_and_the_outermost_part():
    assert {scope: stage_of(scope) for scope in SCOPES} == SCOPES


def test_a_program_names_the_stage_of_every_operation_but_of_loops():
    found = stages.read_program(PROGRAM)
    drafted, attended, other = ("draft", "draft_pass"), ("verify", "attention"), ("verify", "")
    assert found == {
        "param_0": drafted,
        "multiply.1": drafted,
        "arg": drafted,
        "fusion.1": drafted,
        "copy.2": attended,  # it prepares the next operation
        "dot.3": attended,
        "reduce.7": other,
        "tuple.4": other,
        "add.5": ("loop", ""),
        "copy.6": ("loop", ""),
    }


def _brute_force(spans, kinds):
    """Goes through the time nanosecond by nanosecond."""
    busy, waiting = [0.0] * len(spans), [0.0] * len(spans)
    for t in range(int(min(s.begin_ns for s in spans)), int(max(s.end_ns for s in spans))):
        running = [i for i, s in enumerate(spans) if s.begin_ns <= t < s.end_ns]
        for i in running:
            busy[i] += 1 / len(running)
        if not running:
            waiting[min((s.begin_ns, i) for i, s in enumerate(spans) if s.begin_ns > t)[1]] += 1
    usual = lambda times, kind: sum(
        min(statistics.median(runs), statistics.mean(runs)) * len(runs)
        for name in kinds
        if kinds[name] == kind
        for runs in [[x for x, s in zip(times, spans) if s.name == name]]
        if runs
    )
    ran = {kinds[s.name] for s in spans}
    return {k: usual(busy, k) + usual(waiting, k) for k in ran}, {k: usual(busy, k) for k in ran}


@pytest.mark.parametrize("seed", range(3))
def test_every_moment_counts_once(seed):
    draw = np.random.default_rng(seed)
    stage = [("verify", "mlp"), ("draft", ""), ("accept", ""), ("loop", ""), ("verify", "mlp")]
    kinds = dict(zip("abcde", stage))
    begins = np.sort(draw.choice(400, 24, replace=False))
    spans = [
        OperationRun(str(draw.choice(list(kinds))), float(t), float(t + draw.integers(1, 25)))
        for t in begins
    ]
    *found, delays = stages.add_up(spans, kinds)
    total, busy = _brute_force(spans, kinds)
    whole = max(span.end_ns for span in spans) - spans[0].begin_ns
    assert delays[:2] == ("delays", "") and delays.operations == 0 and delays.time_ns >= 0
    assert sum(stage.time_ns for stage in [*found, delays]) == pytest.approx(whole)
    assert {s[:2]: s.time_ns for s in found} == pytest.approx(total)
    assert {s[:2]: s.busy_ns for s in found} == pytest.approx(busy)
    assert sum(stage.operations for stage in found) == len(spans)
    order = [stage.stage for stage in found]
    assert order == sorted(order, key=["draft", "verify", "accept", "loop"].index)
    assert stages.add_up([], kinds) == []


def _trace(path, planes):
    """Writes a trace; ``planes`` hold (line, name, begin ns, duration ns, stats) by name."""
    names = ("hlo_op", "_p", "_c")
    text = ""
    for plane, events in planes.items():
        metadata = {name: i + 1 for i, name in enumerate(dict.fromkeys(e[1] for e in events))}
        text += f'planes {{ name: "{plane}"\n'
        for name, i in metadata.items():
            text += f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}\n'
        for i, name in enumerate(names):
            text += f'stat_metadata {{ key: {i + 1} value {{ id: {i + 1} name: "{name}" }} }}\n'
        for line, name, begin, duration, given in events:
            stats = "".join(
                f"stats {{ metadata_id: {names.index(key) + 1} "
                + (f'str_value: "{x}"' if isinstance(x, str) else f"int64_value: {x}")
                + " }"
                for key, x in given.items()
            )
            text += (
                f'lines {{ id: {line} name: "{line}" events {{ metadata_id: {metadata[name]} '
                f"offset_ps: {begin * 1000} duration_ps: {duration * 1000} {stats} }} }}\n"
            )
        text += "}\n"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return path


def test_a_trace_of_a_cpu_says_when_results_are_ready(tmp_path):
    path = _trace(
        tmp_path / "cpu.xplane.pb",
        {
            "/host:CPU": [
                (1, "fusion.1", 10, 5, {"hlo_op": "fusion.1", "_p": 7}),
                (2, "end: fusion.1", 30, 1, {"_c": 7}),  # another thread has ended it
                (1, "dot.3", 40, 20, {"hlo_op": "dot.3", "_p": 8}),
                (1, "ThunkExecutor::Execute", 0, 100, {}),
                (1, "copy", 0, 3, {"hlo_op": "copy"}),  # of another program
            ]
        },
    )
    spans = stages.read_spans(path, stages.read_program(PROGRAM))
    assert spans == [OperationRun("fusion.1", 10, 30), OperationRun("dot.3", 40, 60)]


def test_a_trace_of_devices_counts_one_of_them(tmp_path):
    host = [(1, "dot.3", 0, 90, {"hlo_op": "dot.3"})]
    one = [(1, "%dot.3 = f32[4] custom-call(%copy.2)", 5, 6, {}), (1, "%other = f32[]", 1, 2, {})]
    two = [(1, "void kernel<float>()", 5, 6, {"hlo_op": "dot.3"}), one[0]]
    path = _trace(tmp_path / "x.pb", {"/host:CPU": host, "/device:T:0": one, "/device:T:1": two})
    assert stages.read_spans(path, {"dot.3"}) == [OperationRun("dot.3", 5, 11)] * 2


def test_a_table_says_what_is_left_and_several_processes_are_refused(monkeypatch):
    stage = profiling.StageTime("verify", "mlp", 1.92, 0.96, 0.1, 80.0)
    record = profiling.RoundProfile(9, 2.0, 3.0, 0.96, (stage,))
    late = dataclasses.replace(record, covered=1.01, spread=1.7)
    empty = dataclasses.replace(record, note="nothing traced")
    one, two, three = profiling.sections({"mine": record, "late": late, "empty": empty})
    assert one.table.rows[0] == ("verify: mlp", "1.920", "96.0%", "0.100", "80.0")
    left = [section.table.rows[1][:3] for section in (one, two)]
    rest = "begin and end of the call"
    assert left == [(rest, "0.080", "4.0%"), (rest, "0.000", "0.0%")]
    assert "a call without a trace took up to 1.70 times" in two.text[0]
    assert three.text == ["nothing traced"]
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(ConfigError, match="traces one process; these are 2"):
        profiling.check()


@pytest.mark.exhaustive
def test_the_stages_of_a_traced_round_add_up_to_it(tmp_path):
    shape = dict(vocab_size=512, hidden_size=128, intermediate_size=512, num_attention_heads=4)
    shape["max_position_embeddings"] = 512
    target = random_model("target", shape | {"num_hidden_layers": 2}, 0)
    draft = random_model("draft", shape | {"num_hidden_layers": 1}, 1)
    bench = Bench(target, {"standalone": draft}, [[1, 2, 3]], SamplerConfig(), 32)
    cell = Cell("standalone", 2, 0.0, "greedy")
    (record,) = profiling.profile_cells(bench, [cell], tmp_path).values()
    folder = tmp_path / "standalone_K=2_T=0_greedy"
    assert [*folder.glob("plugins/profile/*/*.xplane.pb")]
    events = json.loads(gzip.open(folder / "stages.trace.json.gz", "rt").read())["traceEvents"]
    assert {"draft", "verify", "verify: mlp"} <= {e["name"] for e in events if e["ph"] == "X"}
    found = {(s.stage, s.part): s for s in record.stages}
    assert {s[0] for s in found} == {"draft", "verify", "accept", "commit", "loop", "delays"}
    # A busy machine begins a call late, which is no stage: CI has neighbours.
    assert 0.5 < record.covered <= 1, record
    total_ms = sum(s.ms for s in found.values())
    assert total_ms == pytest.approx(record.covered * record.round_ms)
    # Two layers of attention and of an MLP, in every round.
    assert found["verify", "mlp"].operations >= 2
    assert found["verify", "attention"].ms > found["accept", ""].ms
