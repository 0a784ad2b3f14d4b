"""Agreement with ``speculators``: a P-EAGLE head that we export has the same logits there."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from speculators_models import load_theirs
from support.parallel_heads import HEADS, TARGET, head_of
from support.tiny_models import LLAMA

from spec_jax import load_draft, load_model
from spec_jax.models.checkpoint import save_pretrained

torch = pytest.importorskip("torch", reason="parity needs torch (extra 'parity')")
pytest.importorskip("speculators", reason="see tests/parity/speculators.txt")

# What the package and those that it imports warn of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    save_pretrained(path, TARGET.params, LLAMA)
    return load_model(path)


@pytest.mark.parametrize("format", ["speculators", "SpecForge"])
@pytest.mark.parametrize("name", HEADS)
def test_what_they_save_again_is_the_same_parallel_head_here(tmp_path, target, name, format):
    """In their own format by their own loader, in SpecForge's by ours."""
    config = HEADS[name]
    if format == "SpecForge":
        norms = {"fc_norm": False, "norm_before_fc": False}
        layer = dataclasses.replace(config.layer, model_type="llama")
        config = dataclasses.replace(config, layer=layer, **norms)
    head = head_of(config)
    head.save(tmp_path / "ours", target, format=format)
    again = tmp_path / "ours"
    if format == "speculators":
        again = tmp_path / "theirs"
        load_theirs(tmp_path / "ours", "peagle").save_pretrained(again)
    read = load_draft(again, target)
    assert read.config == config and read.format == format
    jax.tree.map(np.testing.assert_array_equal, read.params, head.params)
