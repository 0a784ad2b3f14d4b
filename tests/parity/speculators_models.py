"""Models of the ``speculators`` package, read by its own loader from what we export."""

import importlib

import pytest
from needs import torch  # noqa: F401

pytest.importorskip("speculators", reason="see tests/parity/speculators.txt")

_NAMES = {"eagle3": "Eagle3", "peagle": "PEagle", "dflash": "DFlash", "dflash2": "DFlash2"}
_NAMES |= {"dspark": "DSpark"}


def load_theirs(directory, kind):
    """Only the attention, made for a GPU, is chosen."""
    room = importlib.import_module(f"speculators.models.{kind}")
    config = getattr(room, f"{_NAMES[kind]}SpeculatorConfig").from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    model = getattr(room, f"{_NAMES[kind]}DraftModel").from_pretrained(directory, config=config)
    assert str(model.dtype) == "torch.float32"
    return model.eval()
