"""What pyproject.toml and CITATION.cff promise: extras of one jax, and one version everywhere."""

import pathlib
import re
import tomllib
from importlib import metadata

import yaml
from packaging.specifiers import SpecifierSet

import spec_jax
from spec_jax import __version__

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_extras_for_accelerators_are_extras_of_the_same_jax():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pages = "".join((ROOT / name).read_text() for name in ("README.md", "docs/scale.md"))
    (bounds,) = [d.removeprefix("jax") for d in project["dependencies"] if re.match(r"jax\W", d)]
    known = metadata.metadata("jax").get_all("Provides-Extra")
    named = {"cuda": "cuda13", "cuda12": "cuda12", "tpu": "tpu", "plan-gpu": "cuda13-local"}
    for name, of_jax in named.items():
        assert extras[name] == [f"jax[{of_jax}]{bounds}"] and of_jax in known
        assert f"'.[{name}]'" in pages


def test_releases_of_jax_that_rewrite_caches_are_excluded():
    """See `tests/support/writes.py`, which says it of the installed one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bounds,) = [d.removeprefix("jax") for d in project["dependencies"] if re.match(r"jax\W", d)]
    taken = ["0.10.0", "0.10.2", "0.11.0", "0.11.2", "0.12.0.1", metadata.version("jax")]
    left_out = ["0.9.2", "0.11.1", "0.13.0"]
    assert list(SpecifierSet(bounds).filter([*taken, *left_out])) == taken


def test_the_citation_has_what_the_format_requires():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["cff-version"] == "1.2.0" and cited["version"] == __version__


def test_the_package_lists_its_own_names_and_none_that_it_imports():
    listed = {name for name in dir(spec_jax) if not name.startswith("__")}
    modules = {
        name
        for name in listed
        if hasattr(getattr(spec_jax, name), "__path__")
        or (ROOT / "spec_jax" / f"{name}.py").is_file()
    }
    assert listed - modules == {*spec_jax.__all__} - {"__version__"} and "testing" in modules
