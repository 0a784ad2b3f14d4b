"""Layouts are compared as they are named, and what is recommended follows from their times."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_models import LLAMA

from configs import benchmark as default
from experiments import benchmark
from experiments.benchmarks import cpu_layout as part
from experiments.benchmarks.shapes import random_model
from spec_jax.models import cpu_layout
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.models.cpu_layout import InPanels, Panels

SIZES = dict(hidden_size=64, intermediate_size=64, vocab_size=64, num_hidden_layers=1)
SIZES |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32)
LAYER = {  # the shapes of a layer, and an embedding
    "embed": jax.ShapeDtypeStruct((64, 48), jnp.float32),
    "q": jax.ShapeDtypeStruct((64, 64), jnp.float32),
    "k": jax.ShapeDtypeStruct((64, 32), jnp.float32),
    "v": jax.ShapeDtypeStruct((64, 32), jnp.float32),
    "o": jax.ShapeDtypeStruct((64, 96), jnp.float32),
    "down": jax.ShapeDtypeStruct((64, 9 * 1024), jnp.float32),  # a large one
}
ALL = part.names(1)


def shapes(name):
    """The shape of every matrix of ``LAYER`` and its padding, in a layout."""
    laid_out = jax.eval_shape(lambda p: part.lay_out(p, name, "float32"), LAYER)
    inner = {n: getattr(w, "w", w) if n == "q+k+v" else w for n, w in laid_out.items()}
    return {
        n: (w.w.shape, w.min_rows) if isinstance(w, InPanels) else w.shape for n, w in inner.items()
    }


def test_a_layout_is_what_its_name_says():
    assert shapes("whole, apart") == {n: w.shape for n, w in LAYER.items()}
    for rows, end in ((1, ""), (2, ", two rows")):
        assert shapes(f"whole, joined{end}") == {
            "embed": (64, 48),
            "q+k+v": ((1, 64, 128), rows),
            "o": ((1, 64, 96), rows),
            "down": ((1, 64, 9216), rows),
        }
        assert shapes(f"panels of 64, joined{end}") == {  # 64 does not divide 96, 32 does
            "embed": (64, 48),
            "q+k+v": ((2, 64, 64), rows),
            "o": ((3, 64, 32), rows),
            "down": ((144, 64, 64), rows),
        }
        assert shapes(f"panels of 16, joined{end}")["o"] == ((6, 64, 16), rows)
    assert part.sizes(LAYER, "float32") == [False, True]
    assert part.sizes({"o": LAYER["o"]}, "float32") == [False]


def laid_out(params, tokens, table):
    """Shapes in the layout of a table; padding makes no difference to several tokens."""
    return part.pad(jax.eval_shape(lambda p: cpu_layout.in_panels(p, tokens, table), params), 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_lines_of_a_choice_read_back_are_the_table_that_makes_it(dtype):
    params = {n: jax.ShapeDtypeStruct(w.shape, dtype) for n, w in LAYER.items()}
    draw = np.random.default_rng(0)
    for _ in range(8):
        wanted = {1: str(draw.choice(ALL))}
        wanted |= {n: str(draw.choice(ALL[:5])) for n in (2, 6, 16)}
        texts = [
            part.as_text(line)
            for is_large in (False, True)
            for line in part.lines_for(wanted, dtype, is_large)
        ]
        assert max(map(len, texts)) + 4 <= 100
        lines = eval(f"[{' '.join(texts)}]", {"Panels": Panels})  # as if pasted
        table = [*lines, *cpu_layout.TABLE]
        assert {n: part.present(params, dtype, n, table) for n in wanted} == wanted
        for n, before in ((5, 2), (15, 6)):  # numbers that were not measured
            assert part.present(params, dtype, n, table) == wanted[before]
        for n in (17, cpu_layout.MAX_ROWS):
            assert laid_out(params, n, table) == laid_out(params, n, cpu_layout.TABLE)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_table_whose_choices_stay_is_the_same_table(dtype, is_large):
    lines = part.lines_for(dict.fromkeys((1, 4, 9)), dtype, is_large)
    now = jax.__version_info__[:2]
    of_now = [line for line in cpu_layout.TABLE if line.since == now]
    if now == (0, 12):
        assert lines == [x for x in of_now if (x.dtype, x.is_large) == (dtype, is_large)]
    size = cpu_layout.LARGE + is_large
    for n in range(1, cpu_layout.MAX_ROWS + 1):
        found, want = (
            cpu_layout.find(n, size, dtype, table) for table in (lines, cpu_layout.TABLE)
        )
        what = lambda line: line and (line.widths, line.min_rows)
        assert what(found) == what(want)


def test_a_layout_is_recommended_only_beyond_the_noise():
    drift = np.asarray([1.0, 1.3, 0.9, 1.1, 1.6, 1.2, 1.0])  # meets all alike
    jitter = np.asarray([1.02, 0.97, 1.01, 0.99, 1.03, 0.98, 1.0])
    times = {"a": 2.0 * drift, "b": 1.8 * drift * jitter, "c": 1.79 * drift * jitter[::-1]}
    assert part.fastest(times) == "c"
    assert part.recommend(times, "a") == "c"
    assert part.recommend(times, "b") == "b"  # too close to c to call
    assert part.recommend(times, "c") == "c"
    times["d"] = 1.04 * times["c"]  # surely slower, by too little for a line of its own
    assert part.recommend(times, "d") == "d"
    assert part.recommend(times | {"d": 1.06 * times["c"]}, "d") == "c"


def made_up(**ms):
    jitter = np.asarray([1.0, 1.01, 0.99])
    return {name: ms.get(name.split(",")[0].replace(" ", "_"), 3.0) * jitter for name in ALL}


def test_advice_holds_the_lines_of_what_is_faster_alone():
    times = {1: made_up(whole=2.0), 2: made_up(panels_of_16=1.0, whole=1.5)}
    choices = {1: "whole, joined", 2: "whole, joined"}
    say = lambda chosen, sizes=(False,): part.advice(
        "zoo/target in float32", "float32", times, chosen, sizes
    )
    text = say(choices)
    assert "panels of 16, joined for 2 tokens, 1.50 x as fast; otherwise the table's" in text
    since = jax.__version_info__[:2]
    assert f'\n      Panels({since}, "float32", (2, 2), False, (16,)),\n' in f"{text}\n"
    assert "at most 524,288 elements" in text and "more than" not in text
    assert "more than" in say(choices, (False, True))
    kept = say(choices | {2: "panels of 16, joined"})
    assert kept == "recommended on this machine for zoo/target in float32: the table's choice"
    nothing = part.advice("m", "float32", {}, choices, [False])
    assert nothing == "recommended on this machine for m: the table's choice"
    (first, second) = part.case_lines("m", times, choices)
    assert first.value[0] == 1 and second.value[0] == pytest.approx(1.5)
    rows = {name: cells for name, *cells in part.section("m", times, choices).rows}
    assert rows["whole, joined"] == ["*2", "*1.5"] and rows["panels of 16, joined"] == ["3", "1"]


def test_nothing_is_measured_where_the_weights_do_not_lie_on_a_cpu(monkeypatch):
    model = random_model("m", dataclasses.replace(LLAMA, **SIZES), 0)
    elsewhere = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params)
    model = dataclasses.replace(model, params=elsewhere)
    monkeypatch.setattr(part, "load_model", lambda name: model)
    result = part.measure(default.get_config(), {})
    assert not (result.lines or result.record or result.sections)
    (note,) = result.notes
    assert "apply to a CPU only" in note


@pytest.mark.exhaustive
def test_a_run_times_every_layout_and_says_what_to_use(tmp_path):
    model = random_model("m", dataclasses.replace(LLAMA, **SIZES), 0)
    save_pretrained(tmp_path / "m", model.params, model.config)
    config, name = default.get_config(), str(tmp_path / "m")
    config.cpu_layout.update(targets=name, dtypes="bfloat16", tokens=(1, 3), slots=32, repeats=3)
    record = benchmark.run(config, tmp_path / "run", ("cpu_layout",))
    cases = record["parts"]["cpu_layout"][f"{name} in bfloat16"]
    assert {n: [*case["times_ms"]] for n, case in cases.items()} == {"1": ALL, "3": ALL[:5]}
    for line, case in zip(record["lines"], cases.values(), strict=True):
        times = {n: np.asarray(ms) for n, ms in case["times_ms"].items()}
        assert line["value"] == np.median(times[case["choice"]] / times[line_fastest(times)])
        assert {*case["again_ms"]} in (set(), {case["choice"], line_fastest(times)})
    (note,) = record["notes"]
    assert note.startswith(f"recommended on this machine for {name} in bfloat16: ")
    text = (tmp_path / "run" / "report.md").read_text()
    assert note in text and "* is the table's choice" in text


def line_fastest(times):
    return sorted(times, key=lambda name: np.median(times[name]))[0]
