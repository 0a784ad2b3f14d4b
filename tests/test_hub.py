"""Models of the Hugging Face hub: a cache in the hub's own layout, and no network."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys

import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub import constants, errors
from support.gguf_files import write
from support.tiny_models import LLAMA, random_weights
from support.tiny_tokenizers import letters

import spec_jax
from spec_jax import hub
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.loading import random_head
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.planning.presets import find_config

COMMIT, OTHER = "0" * 40, "1" * 40
CONFIG = dataclasses.replace(LLAMA, vocab_size=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_pretrained(directory, random_weights(CONFIG), CONFIG, letters(31), max_shard_bytes=6000)
    return directory


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache that is the hub's own, and empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def put(cache, repo: str, directory, commit=COMMIT, ref="main", without=()):
    """Puts a directory into a cache, in the hub's layout."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    shutil.copytree(directory, snapshot, ignore=shutil.ignore_patterns(*without))
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / ref).write_text(commit)
    return snapshot


def online(monkeypatch, answer):
    """Replaces the download: ``answer(patterns)`` is called with the patterns of each."""
    real, asked = huggingface_hub.snapshot_download, []

    def snapshot_download(repo_id, *, local_files_only=False, **options):
        if local_files_only:
            return real(repo_id, local_files_only=True, **options)
        asked.append(options["allow_patterns"])
        return str(answer(options["allow_patterns"]))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def failing(monkeypatch, kind, text="said by the hub"):
    def answer(patterns):
        raise kind.__new__(kind, text)  # their arguments differ between versions

    return online(monkeypatch, answer)


def test_what_is_in_the_cache_is_loaded_without_a_network(cache, model, monkeypatch):
    asked = failing(monkeypatch, ConnectionError)
    put(cache, "owner/tiny", model)
    loaded, expected = spec_jax.load_model("owner/tiny"), spec_jax.load_model(model)
    assert loaded.name == "owner/tiny" and loaded.tokenizer.has_same_vocab(letters(31))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)
    head = random_head(EagleConfig.of_target(CONFIG), jax.random.key(0))
    head.save(cache / "head", expected)
    put(cache, "owner/head.v2", cache / "head")
    for load in (spec_jax.load_head, spec_jax.load_draft):
        again = load("owner/head.v2", loaded)
        jax.tree.map(np.testing.assert_array_equal, again.params, head.params)
    assert not asked


def test_a_revision_is_a_branch_or_a_commit(cache, model):
    first = put(cache, "owner/tiny", model)
    second = put(cache, "owner/tiny", model, OTHER, "v1.0")
    assert hub.directory_of("owner/tiny") == first
    assert hub.cached_directory("owner/tiny") == first
    assert hub.cached_directory("owner/other") is hub.cached_directory("no id") is None
    assert hub.directory_of("owner/tiny@v1.0") == hub.directory_of(f"owner/tiny@{OTHER}") == second


@pytest.mark.parametrize("lost", ["config.json", "model-00002*", "model*", ""])
def test_a_cut_off_download_is_taken_up_again(cache, model, monkeypatch, caplog, lost):
    snapshot = put(cache, "owner/tiny", model, without=[lost])
    if not lost:
        (snapshot / "model.safetensors.index.json").write_text("[]")
    asked = online(monkeypatch, lambda patterns: model)
    with caplog.at_level(logging.INFO):
        assert hub.directory_of("owner/tiny") == model
    assert len(asked) == 1 and "owner/tiny is not in the cache" in caplog.text


def test_only_what_is_read_is_downloaded(cache, tmp_path_factory, model, monkeypatch):
    """Files of torch are asked for only where there are no safetensors."""
    asked = online(monkeypatch, lambda patterns: model)
    hub.directory_of("owner/tiny")
    chosen = lambda names: {
        name
        for name in names
        if list(huggingface_hub.utils.filter_repo_objects([name], allow_patterns=asked[-1]))
    }
    unread = {"original/consolidated.00.pth", "consolidated.safetensors", "README.md", "a.gguf"}
    unread |= {"pytorch_model.bin", "onnx/model.onnx", "adapter_model.safetensors"}
    read = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    read |= {"model-00001-of-00002.safetensors", "additional_chat_templates/rag.jinja"}
    assert chosen(read | unread) == read

    old = tmp_path_factory.mktemp("old")
    for name in ("config.json", "pytorch_model.bin"):
        (old / name).write_text("{}")
    asked = online(monkeypatch, lambda patterns: old)
    assert hub.directory_of("owner/old") == old
    assert len(asked) == 2 and chosen(read | unread) == (
        {name for name in read if not name.startswith("model")} | {"pytorch_model.bin"}
    )


KINDS = [
    (errors.GatedRepoError, "is gated: accept .*co/o/m, .*`hf download o/m --revision v2`"),
    (errors.RepositoryNotFoundError, "no model o/m, or none that you may read.*hf auth login"),
    (errors.RevisionNotFoundError, "o/m has no revision 'v2'"),
    (errors.LocalEntryNotFoundError, "network, run `hf download o/m --revision v2`"),
    (TimeoutError, r"hf download.*\(TimeoutError: said by the hub\)"),
]


@pytest.mark.parametrize(("kind", "message"), KINDS, ids=lambda x: getattr(x, "__name__", ""))
def test_an_error_of_the_hub_says_which_command_to_run(cache, monkeypatch, kind, message):
    failing(monkeypatch, kind)
    with pytest.raises(WeightsError, match=f"o/m@v2 is neither a directory nor a zoo .*{message}"):
        spec_jax.load_model("o/m@v2")


@pytest.mark.parametrize(
    "name", ["typo", "a/b/c", "/a/b", "./a", "../a", "~/a", "a/", "a/b@", "zoo/other"]
)
def test_a_name_that_is_no_id_does_not_reach_the_hub(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)  # where nothing has these names
    asked = failing(monkeypatch, ConnectionError)
    with pytest.raises(WeightsError, match="nor an id of the Hugging Face hub, such as Qwen/Qw"):
        spec_jax.load_model(name)
    if not hub.is_id(name):
        with pytest.raises(WeightsError, match="is not an id of the Hugging Face hub"):
            hub.directory_of(name)
    assert not asked


def test_a_repository_without_a_model_says_so(cache, tmp_path, monkeypatch):
    online(monkeypatch, lambda patterns: tmp_path)
    with pytest.raises(WeightsError, match="run `hf download o/m`"):
        spec_jax.load_model("o/m")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(WeightsError, match="pip install huggingface_hub"):
        spec_jax.load_model("owner/tiny")


def test_a_plan_needs_the_config_alone(cache, model, monkeypatch):
    asked = failing(monkeypatch, ConnectionError)
    put(cache, "owner/tiny", model, without=["model*", "tokenizer*"])
    assert find_config("owner/tiny", "tpu") == dataclasses.replace(CONFIG, scan_layers=True)
    with pytest.raises(ConfigError, match="expected one of llama.*`hf download owner/other`"):
        find_config("owner/other")
    assert asked == [["config.json", "generation_config.json", "config.json"]]


def test_a_gguf_file_of_a_repository_is_chosen_by_its_name(cache, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("gguf")
    for name in ("q4.gguf", "q8.gguf"):
        write(folder / name, CONFIG, random_weights(CONFIG))
    names = ["README.md", "q4.gguf", "q8.gguf"]
    asked = online(monkeypatch, lambda patterns: folder)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, revision: names)
    several = r"several GGUF files.*o/m/q4\.gguf.*, o/m/q8\.gguf"
    assert hub.directory_of("o/m/q8.gguf@v2") == folder / "q8.gguf"
    with pytest.raises(WeightsError, match=several):
        spec_jax.load_model("o/m")
    with pytest.raises(WeightsError, match="o/m has no file q5.gguf"):
        spec_jax.load_model("o/m/q5.gguf")
    assert asked == [["q8.gguf"], ["q5.gguf"]]
    put(cache, "o/m", folder, without=["q4.gguf"])
    with pytest.raises(WeightsError, match=several):  # though one of them is cached
        spec_jax.load_model("o/m")
    assert spec_jax.load_model("o/m/q8.gguf").source == "Tiny, mit"
    monkeypatch.setattr(huggingface_hub, "list_repo_files", None)  # no network: what is cached
    assert spec_jax.load_model("o/m").config.hidden_size == CONFIG.hidden_size
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, revision: names[:2])
    assert hub.directory_of("o/n") == folder / "q4.gguf"
    names[0] = "model.safetensors"  # which is preferred
    online(monkeypatch, lambda patterns: folder)
    with pytest.raises(WeightsError, match=r"o/n has no config\.json with model\.safetensors"):
        spec_jax.load_model("o/n")
