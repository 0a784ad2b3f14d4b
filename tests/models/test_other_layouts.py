"""Directories that hold no model that is read: each is told what it is, and what to do."""

from __future__ import annotations

import jax
import pytest
from support.tiny_models import LLAMA, random_weights

import spec_jax
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import WeightsError
from spec_jax.loading import random_head
from spec_jax.models.checkpoint import save_pretrained

SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_pretrained(directory, random_weights(LLAMA), LLAMA)
    return directory


@pytest.fixture(scope="module")
def target(model):
    return spec_jax.load_model(model)


def head_of(target, directory, kind):
    config = {"eagle": EagleConfig, "mtp": MtpConfig}[kind].of_target(target.config)
    random_head(config, jax.random.key(0)).save(directory, target)
    return directory


FILES = [
    ("tiny-Q4_K_M.gguf", "GGUF, which is not read.*gguf_file='tiny-Q4_K_M.gguf'"),
    ("adapter_model.safetensors", "LoRA adapter.*merge_and_unload"),
    ("consolidated.00.pth", "its publisher's own layout"),
    ("weights.bin", "weights.bin is not a name that is read; expected pytorch_model.bin"),
]


@pytest.mark.parametrize(("file", "message"), FILES)
def test_files_of_other_layouts_are_told_apart(tmp_path, model, file, message):
    (tmp_path / file).write_bytes(b"")
    for _ in range(2):  # without config.json, and with one
        with pytest.raises(WeightsError, match=message):
            spec_jax.load_model(tmp_path)
        (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())


def test_a_file_in_place_of_a_directory_is_refused(tmp_path, model):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match=r"tiny\.gguf is a file; expected the directory.*GGUF"):
        spec_jax.load_model(tmp_path / "tiny.gguf")
    with pytest.raises(WeightsError, match="is a file; expected the directory of config.json and"):
        spec_jax.load_model(model / SINGLE)


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_a_draft_that_is_loaded_as_a_model_says_what_it_is(tmp_path, target, kind):
    head_of(target, tmp_path, kind)
    message = f"is a draft of the kind '{kind}', not a model.*load_draft\\('.*', target\\)"
    with pytest.raises(WeightsError, match=message):
        spec_jax.load_model(tmp_path)
    assert spec_jax.load_draft(tmp_path, target).method == kind


def test_a_model_that_is_loaded_as_a_head_says_what_it_is(tmp_path, model, target):
    with pytest.raises(WeightsError, match="which every EAGLE head has; load_model reads"):
        spec_jax.load_head(model, target)
    with pytest.raises(WeightsError, match="no MTP module.*Use load_model for a model, load_h"):
        spec_jax.load_mtp(model, target)
    with pytest.raises(WeightsError, match="fc.weight is missing.*load_draft detects"):
        spec_jax.load_head(head_of(target, tmp_path, "mtp"), target)
