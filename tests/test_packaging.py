"""What pyproject.toml and CITATION.cff promise: extras of one jax, and one version everywhere."""

import pathlib
import re
import tomllib
from importlib import metadata

import yaml

from spec_jax import __version__

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_extras_for_accelerators_are_extras_of_the_same_jax():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, readme = project["optional-dependencies"], (ROOT / "README.md").read_text()
    (bounds,) = [d.removeprefix("jax") for d in project["dependencies"] if re.match(r"jax\W", d)]
    known = metadata.metadata("jax").get_all("Provides-Extra")
    for name, of_jax in {"cuda": "cuda13", "cuda12": "cuda12", "tpu": "tpu"}.items():
        assert extras[name] == [f"jax[{of_jax}]{bounds}"] and of_jax in known
        assert f"'.[{name}]'" in readme


def test_the_citation_has_what_the_format_requires():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["cff-version"] == "1.2.0" and cited["version"] == __version__
    assert cited["authors"] == [{"name": "The spec_jax authors"}]
    assert cited["license"] == "Apache-2.0" and "http" not in str(cited)
