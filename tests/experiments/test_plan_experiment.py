"""The planner's experiment: what it writes and refuses, and a small plan where libtpu is there."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from support.runs import check_run_files

from configs import plan as default
from experiments import plan
from experiments.planning import plan_cells, plan_report
from experiments.planning.plan_inputs import find_draft
from spec_jax.errors import ConfigError
from spec_jax.planning import roofline
from spec_jax.planning.chips import CHIPS
from spec_jax.planning.presets import PRESETS
from spec_jax.tree import DynamicTree

ROOT = pathlib.Path(__file__).resolve().parents[2]


def config(**changes):
    found = default.get_config()
    found.is_compiled = False
    found.update(changes)
    return found


def test_floors_alone_yield_the_best_k_of_every_place_and_a_run_is_continued(
    tmp_path, monkeypatch, capsys
):
    sweep = config(topology="v5e:2x4,h100:8", batch="8,256", num_draft="2,5", acceptance="0.8,0.6")
    result = plan.run(sweep, str(tmp_path))
    assert len(result["cells"]) == 2 * 2 * 3 and len(result["best"]) == 4
    (one,) = [c for c in result["cells"] if (c["topology"], c["batch"], c["k"]) == ("h100:8", 8, 2)]
    setting = roofline.Setting(8, 2048, one["mesh"])
    models = PRESETS["llama-3.1-8b"], PRESETS["llama-3.2-1b"]
    tokens = 1 + 0.8 + 0.8 * 0.6
    expected = roofline.predict(*models, 2, tokens, CHIPS["h100"], setting)
    assert one["tok_s"] == pytest.approx(expected.tok_s)
    assert plan_report.speedup(one, result["cells"]) == pytest.approx(expected.speedup)
    slowed = roofline.predict(*models, 2, tokens, CHIPS["h100"], setting, overhead_s_per_pass=3e-4)
    assert plan_report.speedup(one, result["cells"], 0.3) == pytest.approx(slowed.speedup)
    check_run_files(tmp_path, "plan")
    assert (tmp_path / "plan.png").stat().st_size > 0
    assert "best K" in capsys.readouterr().out
    count = []
    monkeypatch.setattr(plan_cells.roofline, "memory", lambda *args: count.append(args))
    again = plan.run(sweep, str(tmp_path))
    assert again["best"] == result["best"] and not count


def test_the_best_k_is_one_that_fits():
    at = {"topology": "v5e:1x1", "mesh": "data:1,tensor:1", "batch": 1, "slots": 64}
    cell = lambda k, tok_s, fits: at | {"k": k, "tok_s": tok_s, "fits": fits}
    assert plan_report.best([cell(0, 10, True), cell(2, 30, False), cell(1, 15, True)]) == [
        at | {"k": 1, "tok_s": 15, "speedup": 1.5}
    ]
    assert plan_report.best([cell(0, 10, False)])[0]["k"] is None


def test_a_tree_has_the_floor_of_its_passes_and_no_predicted_speed(tmp_path):
    found = plan.run(config(draft="eagle3", tree="8:3:4", num_draft="7"), str(tmp_path))
    plain, one = found["cells"]
    assert (plain["k"], one["k"], one["tree"]) == (0, 8, "8:3:4")
    models = (PRESETS["llama-3.1-8b"], find_draft("eagle3", PRESETS["llama-3.1-8b"]))
    setting = roofline.Setting(8, 2048, one["mesh"])
    floor = roofline.round_work(*models, 8, setting, DynamicTree(8, 3, 4)).floor_s(CHIPS["v5e"])
    assert one["floor_s"] == pytest.approx(floor) and one["tok_s"] is None
    assert found["best"] == []


def test_the_report_says_which_weights_a_round_writes_again(tmp_path):
    result = plan.run(config(draft="", batch="1"), str(tmp_path))
    nothing = dict.fromkeys(("collectives", "copies"), {}) | dict(hbm_bytes=1e9, rewrites=[])
    counted = nothing | dict(gathers=[("fusion.7", 3, 2 * 10**9, "round")])
    counted["rewrites"] = [("copy.1", 2, 10**9, "round"), ("copy.2", 1, 5 * 10**9, "entry")]
    (cell,) = result["cells"]
    cell["compiled"] = dict(needs=dict(total=1, temporaries=0), cpu_s=1, counted=counted)
    said = {section.title: section.text for section in plan_report.sections(result)}
    (line,) = said["Weights written"]
    assert line.endswith("2 times of weights again, 2.00 GB and 3 times of chosen experts, 6.00 GB")
    counted |= dict(rewrites=[], gathers=[])
    assert "Weights written" not in {section.title for section in plan_report.sections(result)}


def test_a_queue_divides_its_time_between_prefill_and_rounds(tmp_path):
    sizes = dict(prompt_tokens=1024, new_tokens=100, batch="64", num_draft="2", draft="ngram")
    found = plan.run(config(**sizes, mesh="data:2,tensor:4", acceptance="0.5"), str(tmp_path))
    target, chip = PRESETS["llama-3.1-8b"], CHIPS["v5e"]
    filling = roofline.prefill_work(target, 1024, roofline.Setting(2, mesh="data:2,tensor:4"))
    for cell in found["cells"]:
        rounds = 100 / cell["tokens"]
        prefill_s, decode_s = filling.floor_s(chip) / 2, rounds * cell["floor_s"] / 64
        assert cell["queue"]["prefill_share"] == pytest.approx(prefill_s / (prefill_s + decode_s))
        assert cell["queue"]["tok_s"] == pytest.approx(100 / (prefill_s + decode_s))
        assert cell["queue"]["tok_s"] < cell["tok_s"]


def test_what_is_trained_on_gpus_is_counted_without_a_program(tmp_path):
    sizes = dict(program="train", topology="h100:8", target="qwen3-8b", is_fully_sharded=True)
    model, head = (
        plan.run(config(**sizes, draft=draft), str(tmp_path / (draft or "model")))["cells"][0]
        for draft in ("", "eagle3")
    )
    weights = 8_190_735_360  # of the published model
    assert model["state"]["state"] == pytest.approx(3 * 4 * weights / 8, rel=1e-3)
    assert model["state"]["gradients"] == pytest.approx(4 * weights / 8, rel=1e-3)
    assert not model["state"]["frozen"] and model["fits"] and model["tok_s"] is None
    assert head["state"]["frozen"] == pytest.approx(2 * weights / 8, rel=1e-3)
    assert head["state"]["state"] == pytest.approx(3 * head["state"]["gradients"], rel=1e-3)
    alone = sizes | {"topology": "h100:1", "draft": ""}
    (lacking,) = plan.run(config(**alone), str(tmp_path / "alone"))["cells"]
    assert lacking["shortfall"] == pytest.approx(16 * weights - 80e9, rel=0.02)


def measured(folder: pathlib.Path, **report) -> str:
    path = folder / "report.json"
    path.write_text(json.dumps(report))
    return str(path)


def decoded(method="plain", k=0, tree=None, accepted=()):
    """A row of 100 rounds in a report of ``experiments.decode``."""
    fields = dict(method=method, k=k, tree=tree, temperature=0.0, rule="greedy", rounds=100)
    return fields | dict(accepted_at=list(accepted))


def test_measured_acceptance_is_that_of_the_named_row(tmp_path):
    rows = [
        decoded(),
        decoded("ngram", 3, accepted=(60, 30, 0)),
        decoded("eagle", 9, "3x2", accepted=(90, 45)),
    ]
    path = measured(tmp_path, results=rows)
    planned = lambda name, **more: plan.run(config(draft="eagle3", **more), str(tmp_path / name))
    chain = planned("chain", acceptance=f"{path}:1", num_draft="1,3,5")
    assert [c["tokens"] for c in chain["cells"]] == pytest.approx([1, 1.6, 1.9, 1.9])
    tree = planned("tree", acceptance=f"{path}:2", tree="3,2")
    assert tree["cells"][1]["tokens"] == pytest.approx(2.35) and tree["best"][0]["k"] == 9
    for more, message in (
        ({"acceptance": path}, "has 2 rows; name one as .*:ROW, of 1: ngram K=3.*; 2: eagle tree"),
        ({"acceptance": f"{path}:3"}, "no row 3"),
        ({"acceptance": f"{path}:2"}, "of the tree 3x2, by level"),
    ):
        with pytest.raises(ConfigError, match=message):
            planned("refused", **more)
    row = {"draft": "zoo/eagle3", "accept": [[0.7, 0.6, 0.8], [0.5, 0.4, 0.6], [None, None, None]]}
    path = measured(tmp_path, rows=[row])
    (_, one) = planned("one", acceptance=path, num_draft="2")["cells"]
    assert one["tokens"] == pytest.approx(1 + 0.7 + 0.7 * 0.5)
    with pytest.raises(ConfigError, match="has no row with accepted drafts"):
        planned("none", acceptance=measured(tmp_path, results=[decoded()]))


def test_without_libtpu_the_message_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'spec_jax\[tpu\]'"):
        plan.run(config(is_compiled=True), str(tmp_path))


def compiled_plan(folder: pathlib.Path, num_layers: int, **flags) -> dict:
    """Runs the command on a small model; returns its report."""
    hf = dict(model_type="llama", vocab_size=8192, hidden_size=1024, intermediate_size=4096)
    hf |= dict(num_hidden_layers=num_layers, num_attention_heads=8, num_key_value_heads=8)
    hf |= dict(head_dim=128, max_position_embeddings=4096)
    (folder / "config.json").write_text(json.dumps(hf))
    flags |= {"target": folder, "topology": "v5e:2x2", "batch": 8}
    command = [sys.executable, "-m", "experiments.plan", f"--workdir={folder / 'run'}"]
    command += [f"--config.{name}={value}" for name, value in flags.items()]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "run" / "report.json").read_text())


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra tpu)"
)


@pytest.mark.exhaustive
@needs_libtpu
def test_a_planned_training_step_holds_its_share_of_weights_and_moments(tmp_path):
    flags = {"program": "train", "draft": "", "is_fully_sharded": True, "length": 128}
    report = compiled_plan(tmp_path, 2, **flags)
    (cell,) = report["cells"]
    params = 2 * (4 * 1024**2 + 3 * 1024 * 4096) + 2 * 8192 * 1024  # norms left out
    assert cell["compiled"]["needs"]["params"] == pytest.approx(4 * params / 4, rel=0.01)
    state = cell["compiled"]["needs"]["state"]
    assert state == cell["compiled"]["needs"]["aliased"] == pytest.approx(3 * params, rel=0.01)
    assert cell["state"]["state"] == pytest.approx(state, rel=0.001)  # which is laid out in tiles
    assert cell["compiled"]["counted"]["collectives"]["all-gather"][0] > 0
    assert cell["fits"] and cell["tok_s"] is None and report["best"] == []


@pytest.mark.exhaustive
@needs_libtpu
def test_a_plan_for_tpus_has_no_cache_copies_and_the_bytes_of_its_floor(tmp_path):
    flags = {"draft": "ngram", "num_draft": 2, "mesh": "data:2,tensor:2", "slots": 1024}
    report = compiled_plan(tmp_path, 24, **flags)
    assert [cell["k"] for cell in report["cells"]] == [0, 2]
    for cell in report["cells"]:
        compiled = cell["compiled"]
        counted, needs = compiled["counted"], compiled["needs"]
        assert counted["copies"] == [] and counted["in_branches"] == 0
        assert set(counted["collectives"]) == {"all-reduce"}
        assert 2 * 24 < counted["collectives"]["all-reduce"][0] <= 2 * 24 + 6
        assert needs["aliased"] == needs["state"] > needs["cache"]
        assert counted["hbm_bytes"] == pytest.approx(cell["analytic"]["hbm_bytes"], rel=0.15)
        assert cell["fits"]
        assert 0 < cell["prefill"]["temporaries"] < cell["prefill"]["total"]
        assert cell["prefill"]["rows"] == 2 and cell["prefill"]["shortfall"] == 0
    assert report["peak_memory_bytes"] < 2e9


@pytest.mark.exhaustive
@needs_libtpu
def test_a_planned_prefill_needs_temporaries_for_a_chunk_and_copies_no_cache(tmp_path):
    flags = {"program": "prefill", "draft": "eagle3", "mesh": "data:2,tensor:2"}
    flags |= {"slots": 4096, "prefill_chunk": "256,1024", "draft_vocab_size": 4096}
    small, large = compiled_plan(tmp_path, 4, **flags)["cells"]
    for cell, chunk in ((small, 256), (large, 1024)):
        assert cell["compiled"]["counted"]["copies"] == [] and cell["tok_s"] is None
        scores = 4 * (8 // 2) * (8 // 2) * chunk * 4096  # f32, of the rows and heads of a device
        # Two buffers of scores, and what jax 0.10 holds besides: .22 of one.
        assert cell["compiled"]["needs"]["temporaries"] < 2.4 * scores
