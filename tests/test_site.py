"""The documentation site: it has a page for everything, its links lead somewhere, it builds."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import pkgutil
import re
import subprocess
import tomllib
import venv

import pytest
import yaml

import spec_jax
from docs.hooks import links, markup, options, search
from experiments.run import config_help

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
GENERATED = {"tour.md", "changelog.md", "workspace.md", "reference/command_line.md"}
GENERATED |= {f"experiments/{name}.md" for name in ("index", *options.experiments())}


def in_nav(nav):
    """The pages that a navigation names, in order."""
    for entry in nav:
        value = entry if isinstance(entry, str) else next(iter(entry.values()))
        yield from [value] if isinstance(value, str) else in_nav(value)


def documented():
    """What the pages of the reference document: names of modules and of members."""
    texts = [path.read_text("utf-8") for path in (DOCS / "reference").glob("*.md")]
    return [name for text in texts for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)]


def test_the_navigation_names_pages_that_exist_once():
    files = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    written = {str(path.relative_to(DOCS)) for path in files}
    found = list(in_nav(CONFIG["nav"]))
    assert len(found) == len(set(found)) and set(found) == written | GENERATED


def test_every_public_name_is_in_the_reference():
    names = documented()
    assert len(names) == len(set(names))
    for name in set(spec_jax.__all__) - {"__version__"}:
        assert f"spec_jax.{name}" in names
    for module in pkgutil.iter_modules(spec_jax.__path__, "spec_jax."):
        is_there = any(f"{name}.".startswith(f"{module.name}.") for name in names)
        hidden = {"spec_jax.__main__", "spec_jax.version"}  # the command line has a page
        assert is_there or module.name in hidden, f"{module.name} is on no page of docs/reference"


def test_what_the_reference_names_exists():
    for name in documented():
        parent, _, member = name.rpartition(".")
        found = importlib.import_module(parent)
        assert hasattr(found, member) or importlib.import_module(name)


def test_the_page_of_an_experiment_has_its_help_and_its_configs():
    text = "What --it does.\n\n    a command\n\nFlags, with their values by default:\n  --a=1  One."
    page = options.page("decode", text)
    assert "What `--it` does." in page and "```sh\na command\n```" in page
    assert "```text\n  --a=1  One.```" in page
    assert re.findall(r"^::: configs\.(\w+)$", page, re.MULTILINE) == [
        "decode_default",
        "decode_smollm2",
        "decode_specbench",
    ]
    assert options.page("launch", "usage: launch") == "# launch\n\n```text\nusage: launch```\n"


LINKS = [
    ("scale.md#a", "docs/write_a_rule.md", "write_a_rule.md", "scale.md#a"),
    ("../README.md", "docs/decisions.md", "decisions.md", "index.md"),
    ("docs/scale.md", "README.md", "tour.md", "scale.md"),
    ("docs/scale.md", "CHANGELOG.md", "reference/x.md", "../scale.md"),
    ("../mkdocs.yml", "docs/scale.md", "scale.md", "source/mkdocs.yml.md"),
    ("examples/my_rule.py", "docs/scale.md", "scale.md", "source/docs/examples/my_rule.py.md"),
    ("https://host/README.md", "docs/scale.md", "scale.md", "https://host/README.md"),
]


@pytest.mark.parametrize("link, origin, page, expected", LINKS)
def test_a_link_to_a_file_is_a_link_to_its_page(link, origin, page, expected):
    is_file = lambda path: (ROOT / path).is_file()
    assert links.rewrite(f"[a]({link})", origin, page, is_file) == f"[a]({expected})"


def test_links_in_code_stay():
    text = "`[a](b.md)`\n```\n[a](b.md)\n```\n"
    assert links.rewrite(text, "docs/x.md", "x.md", lambda path: True) == text
    assert list(links.found(text, "docs/x.md")) == []


def test_search_reads_no_source_code_and_plots_have_a_text():
    page = '<h2 id="a">Speed<a>¶</a></h2><img alt="No description has been provided"><img alt="x">'
    assert markup.described(page).count('alt="plot: Speed"') == 1
    page = '<details class="mkdocstrings-source"><p></p></details><div class="highlight-ipynb x">'
    assert markup.unsearched(page).count("data-search-exclude class=") == 2


def _words(text):
    """The words of a text as the site's search takes them."""
    (found,) = (p["search"] for p in CONFIG["plugins"] if isinstance(p, dict) and "search" in p)
    return re.split(found["separator"], re.sub(r"<[^>]+>|&[lg]t;", " ", text.lower()))


def test_search_leaves_history_out_and_puts_the_package_first():
    assert set(search.PAGES) <= set(in_nav(CONFIG["nav"]))
    for name, settings in search.PAGES.items():
        is_history = name == "changelog.md" or name.startswith("decisions")
        assert ("exclude" in settings) == is_history
    boosts = {name: settings.get("boost", 1) for name, settings in search.PAGES.items()}
    assert max(boosts, key=boosts.get) == "reference/spec_jax.md"


def _check_search(site):
    """The package's own class is found first, and history is not found at all."""
    place = "reference/spec_jax.html#spec_jax.SpeculativeDecoder"
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    assert not [d for d in index if d["location"].startswith(("changelog", "decisions"))]
    assert (site / "search" / "search_index.json").stat().st_size < 1_500_000, "source code"
    hits = [d for d in index if "speculativedecoder" in _words(d["title"])]
    assert max(hits, key=lambda d: d.get("boost", 1))["location"] == place and len(hits) > 1


def test_versions_of_what_builds_the_site_are_fixed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for requirement in extras["optional-dependencies"]["docs"]:
        assert re.fullmatch(r"[\w-]+==[\w.]+", requirement), requirement


LOADED = r'<(?:script|img|link|iframe|source)\b[^>]*="(?:https?:)?//'


@pytest.mark.measure
def test_the_site_builds_from_a_clean_environment_without_a_warning(tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    bin_, site = tmp_path / "env" / "bin", tmp_path / "site"
    install = [bin_ / "pip", "install", "-q", "-e", ".[docs]"]
    subprocess.run(install, check=True, cwd=ROOT, capture_output=True)
    build = [bin_ / "mkdocs", "build", "--strict", "--site-dir", site]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement of another program
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]

    found = {str(path.relative_to(site)): path.read_text("utf-8") for path in site.rglob("*.html")}
    assert {f"experiments/{name}.html" for name in options.experiments()} <= set(found)
    for name, text in found.items():  # a browser loads nothing from elsewhere by itself
        assert not re.findall(LOADED, text), name
    _check_search(site)
    assert "<math" in (site / "notebooks" / "your_own.html").read_text("utf-8")
    key = config_help.meanings(ROOT / "configs" / "decode_default.py").popitem()[0]
    assert f"--config.{key}" in (site / "experiments" / "decode.html").read_text("utf-8")
