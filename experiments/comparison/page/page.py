"""Writes report.html, which needs nothing but itself."""

from __future__ import annotations

import base64
import functools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from experiments.comparison.page import answers as packing
from experiments.comparison.page import charts, details, view
from experiments.run import report as reports
from spec_jax.show.page import COLORS, MEANING

_FOLDER = pathlib.Path(__file__).parent
_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


def write_page(
    path: pathlib.Path,
    report: Mapping[str, Any],
    answers: Iterable[Mapping[str, Any]] = (),
    plots: Sequence[pathlib.Path] = (),
) -> None:
    """Writes the page of a run; a section appears if its data exists.

    Args:
      path: The file, report.html. Of several processes one writes.
      report: What report.json holds, with "results" as ``experiments.decode`` makes them, and in
        each of them, if they were measured, "batch", "accept_intervals", "categories"
        (by name: "tau", "speedup", "speedup_interval", "questions"), "round_ms", "round_parts_ms"
        (by stage) and "difference_ms" (by name, what the prediction does not explain).
      answers: Lines of answers.jsonl, see ``answers``; some of them are shown token by token.
      plots: SVG or PNG files that are shown too.
    """
    reports.write_text(path, render(report, answers, plots))


def render(
    report: Mapping[str, Any],
    answers: Iterable[Mapping[str, Any]] = (),
    plots: Sequence[pathlib.Path] = (),
) -> str:
    """Returns the page of a run as text; see ``write_page``."""
    report = reports.plain(report)
    results = report.get("results") or []
    looks = charts.looks([r["method"] for r in results])
    packed = packing.select(answers)
    text = _template().render(
        version=(report.get("environment") or {}).get("spec_jax", ""),
        about=(report.get("prompts") or {}).get("description"),
        config=report.get("config"),
        title=_title(report),
        command=report.get("command"),
        conclusions=report.get("conclusions") or (),
        notes=report.get("notes") or (),
        looks={name: look for name, look in looks.items() if name != "plain"},
        headline=view.headline(results),
        methods=view.methods_table(results, looks),
        over_k=view.over_k(results, looks),
        categories=details.by_category(results, looks),
        acceptance=view.acceptance(results, looks),
        batches=view.over_batch(results, looks),
        predicted=details.predicted(results, looks),
        tokens=packed,
        conditions=_conditions(report),
        images=[_image(plot) for plot in plots],
        colors={kind: _channels(color) for kind, color in COLORS.items()},
        meaning=MEANING,
        css=Markup(_read("report.css")),
        js=Markup(_read("report.js") + (_read("tokens.js") if packed else "")),
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # a text may hold half a character


@functools.cache
def _template() -> jinja2.Template:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    env.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    env.filters["number"] = lambda value: "" if view.text(value) == "–" else f"{value:.6g}"
    env.filters["fixed"] = view.text
    env.tests["a_number"] = lambda value: view.text(value) != "–"
    return env.get_template("report.html.jinja")


def _channels(color: str) -> str:
    """Turns #RRGGBB into the channels of CSS's rgb()."""
    return " ".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))


def _title(report: Mapping[str, Any]) -> str:
    target = (report.get("models") or {}).get("target")
    of = f" of {reports.names_of([target['name']])[0]}" if target else ""
    return f"Speculative decoding{of}, compared with plain decoding"


def _image(plot: pathlib.Path) -> dict[str, str]:
    data = base64.b64encode(plot.read_bytes()).decode("ascii")
    return {"title": plot.stem, "source": f"data:{_TYPES[plot.suffix]};base64,{data}"}


def _conditions(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of what the run was made of, and where."""
    rows = [(r, reports.describe_model(m)) for r, m in (report.get("models") or {}).items()]
    prompts = (report.get("prompts") or {}).get("description")
    rows += [("prompts", prompts)] if prompts else []
    env = report.get("environment")
    if env:
        rows.append(("machine", reports.describe_machine(env)))
        if report.get("process_peak_bytes"):
            rows.append(("process peak", f"{report['process_peak_bytes'] / 2**20:,.0f} MiB"))
        names = [name for name in ("spec_jax", "python", *reports.PACKAGES) if name in env]
        rows.append(("versions", ", ".join(f"{name} {env[name]}" for name in names)))
        rows.append(("time", env["time"]))
    return rows


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
