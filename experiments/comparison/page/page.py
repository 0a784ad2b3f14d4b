"""Writes report.html, which needs nothing but itself."""

from __future__ import annotations

import functools
import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from experiments.comparison.page import answers as packing
from experiments.comparison.page import view
from experiments.run import report as reports
from experiments.run.plots import CYCLE, TITLE
from spec_jax.evaluation.results import CellResult
from spec_jax.evaluation.summary import MEANINGS, identical_text, interval_text, number
from spec_jax.show.page import COLORS, MEANING

_FOLDER = pathlib.Path(__file__).parent
_INKS = {  # colours of matplotlib's files, and those of the page's theme in their place
    "#000000": "currentColor",
    "fill: #ffffff": "fill: none",
    **dict.fromkeys(("#737373", "#b0b0b0"), "var(--soft)"),
    **{color.lower(): f"var(--m{i})" for i, color in enumerate(CYCLE, 1) if color != "#000000"},
}


def write_page(
    path: pathlib.Path,
    report: Mapping[str, Any],
    results: Sequence[CellResult] = (),
    answers: Iterable[Mapping[str, Any]] = (),
) -> None:
    """Writes the page of a run; a section appears if its data exists.

    Args:
      path: The file, report.html. The plots are SVG files beside it, see ``comparison.plots``. Of
        several processes one writes.
      report: What report.json holds.
      results: What was measured of each cell.
      answers: Lines of answers.jsonl, see ``answers``; some of them are shown token by token.
    """
    plots = {file.stem: file.read_text(encoding="utf-8") for file in path.parent.glob("*.svg")}
    reports.write_text(path, render(report, results, answers, plots))


def render(
    report: Mapping[str, Any],
    results: Sequence[CellResult] = (),
    answers: Iterable[Mapping[str, Any]] = (),
    plots: Mapping[str, str] | None = None,
) -> str:
    """Returns the page of a run as text; see ``write_page``, ``plots`` are texts by name."""
    report = reports.plain(report)
    packed = packing.select(answers)
    text = _template().render(
        version=(report.get("environment") or {}).get("spec_jax", ""),
        about=(report.get("prompts") or {}).get("description"),
        config=report.get("config"),
        title=_title(report),
        command=report.get("command"),
        conclusions=report.get("conclusions") or (),
        notes=report.get("notes") or (),
        headline=view.headline(results),
        methods=view.methods_table(results),
        categories=view.by_category(results),
        stops=view.stops(results),
        predicted=view.predicted(results),
        plots={name: inline(text) for name, text in (plots or {}).items()},
        tokens=packed,
        conditions=_conditions(report),
        colors={kind: _channels(color) for kind, color in COLORS.items()},
        meaning=MEANING,
        meanings=MEANINGS,
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
    env.filters["number"] = lambda x: "" if x is None or math.isnan(x) else f"{x:.6g}"
    env.filters |= {"fixed": number, "interval": interval_text, "identical": identical_text}
    return env.get_template("report.html.jinja")


def inline(svg: str) -> Markup:
    """Returns a file of matplotlib's as an element of the page, in the colours of its theme.

    The points' titles are shown where the pointer is, and are the alternative text together.
    """
    of_file = r"<metadata>.*?</metadata>|<style.*?</style>|font-family: [^;]*; "
    text = re.sub(of_file, "", svg, flags=re.DOTALL)
    for color, ink in _INKS.items():
        text = text.replace(color, ink)
    titles = re.findall(f'<g id="{TITLE}(.*?)">', text)
    text = re.sub(f'<g id="{TITLE}(.*?)">', r"<g><title>\1</title>", text)
    text = re.sub(r'<g id=".*?">', "<g>", text)  # other plots have the same ids
    begin = f'<svg role="img" aria-label="{"; ".join(titles)}"'
    return Markup(begin + text[text.index("<svg") + len("<svg") :])


def _channels(color: str) -> str:
    """Turns #RRGGBB into the channels of CSS's rgb()."""
    return " ".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))


def _title(report: Mapping[str, Any]) -> str:
    target = (report.get("models") or {}).get("target")
    of = f" of {reports.names_of([target['name']])[0]}" if target else ""
    return f"Speculative decoding{of}, compared with plain decoding"


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
