"""What is kept on disk is made anew, or refused, once a byte of what it was made of has changed."""

import dataclasses
import json
import pathlib
import re
import shutil
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from support.chat_templates import CHATML, byte_level, talk
from support.files import write_lines
from support.tiny_models import LLAMA
from tokenizers import normalizers

from configs import evaluate_zoo, train_head_default
from experiments.comparison import session
from experiments.planning import plan_cells
from experiments.run import cli, config_help, inputs, report
from experiments.training import lm, run
from experiments.training import text as texts
from experiments.training.choice import EVALUATIONS
from spec_jax import planning
from spec_jax.data.batches import Corpus
from spec_jax.errors import ConfigError
from spec_jax.planning.chips import Topology
from spec_jax.train import view_cache
from spec_jax.train.objective import View

TEXT = "".join(f"line {i}\n" for i in range(200))


EMBED, LAYER = np.zeros((31, 16), np.float32), np.zeros((2, 3, 4), np.float32)
TEMPLATE = CHATML + "{{ mark }}"


def changed(array):
    """A copy with another last value."""
    other = array.copy()
    other.flat[-1] = 1e-30
    return other


def packed(folder, text="x" * 900, template=TEMPLATE, bos="<s>", normalizer=None, **changes):
    """Packed training text; returns how often it was packed."""
    source = folder / "texts"
    source.mkdir(exist_ok=True)
    (source / "a.txt").write_text(TEXT)
    (source / "b.txt").write_text(text)
    write_lines(source / "c.jsonl", [{"messages": talk(f"{i}?", "yes")} for i in range(9)])
    tokenizer = byte_level(template, bos_token=bos)
    tokenizer.backend.normalizer = normalizer
    data = train_head_default.get_config().data
    data.update(text=str(source), **changes)
    write = texts.packed.write_packed
    with mock.patch.object(texts.packed, "write_packed", side_effect=write) as made:
        texts.load(data, tokenizer, folder / "data")
    return made.call_count // 2  # both splits


def views(folder, embed=EMBED, layer=LAYER, tokens=(1, 2, 3), begins=(0, 0, 0), **changes):
    """The target's states; returns how often they were computed."""
    target = {"embed": jnp.asarray(embed), "layers": [jnp.asarray(layer, jnp.bfloat16)]}
    made = mock.Mock(return_value=View(jnp.zeros((1, 3, 2)), jnp.ones((1, 3, 2))))
    values = dict(eps=1e-6, taps=(0, 1), version="1") | changes
    config = dataclasses.replace(LLAMA, rms_norm_eps=values["eps"])
    with mock.patch.object(view_cache, "__version__", values["version"]):
        cache = view_cache.ViewCache(folder, 1 << 20, target, config, values["taps"])
    cache.view(made, np.asarray([tokens]), np.asarray([begins]))
    return made.call_count


def continuations(
    folder, text=(1, 2, 3), version="1", weights="0" * 99, tokenizer="{}", template="a", **changes
):
    """What the teacher writes; returns how often it wrote it."""
    teacher = folder / "teacher"
    teacher.mkdir(exist_ok=True)
    files = {"model.safetensors": weights, "tokenizer.json": tokenizer, "config.json": "{}"}
    for name, content in (files | {"chat_template.jinja": template}).items():
        (teacher / name).write_text(content)
    options = dict(own_share=0.5, seed=0, length=9, own_batches=1, own_batch=1, own_prompt=1)
    config = ConfigDict({"teacher": str(teacher)} | options | changes)
    made = mock.Mock(return_value=np.zeros(3, np.int32))
    with (
        mock.patch.object(lm, "_continue", made),
        mock.patch.object(lm.spec_jax, "__version__", version),
    ):
        lm.continuations(config, made, Corpus("text", np.asarray(text)), folder)
    return made.call_count


def cells(folder, hbm_bytes=1e9, batch=1, eps=1e-6, name="a", **versions):
    """What a plan has found; returns how often it was searched."""
    v5e = Topology.parse("v5e:1x1")
    topology = dataclasses.replace(v5e, chip=dataclasses.replace(v5e.chip, hbm_bytes=hbm_bytes))
    target = dataclasses.replace(LLAMA, rms_norm_eps=eps)
    job = planning.Job(target=target, batch=batch, slots=64)
    config = ConfigDict({"target": name, "draft": ""})
    made = mock.Mock(return_value={"program": "decode"})
    compiled = planning.Compiled(
        needs=planning.Needs(params=0, cache=0), counted=None, refusal="", wall_s=0.0, cpu_s=0.0
    )
    with (
        mock.patch.object(plan_cells, "make_cell", made),
        mock.patch.object(plan_cells.plan, "compile_and_count", return_value=compiled),
        mock.patch.object(plan_cells, "_compiler", return_value=versions.get("compiler", "1")),
        mock.patch.object(plan_cells.jax, "__version__", versions.get("jax", "1")),
        mock.patch.object(plan_cells.spec_jax, "__version__", versions.get("spec_jax", "1")),
    ):
        plan_cells.plan_cell(folder, topology, job, config, lambda _: jax.devices()[:1])
    return made.call_count


# Each input in turn has another value.
STORES = {
    packed: dict(text="x" * 899 + "y", template=CHATML + " {{ mark }}", bos="</s>")
    | dict(normalizer=normalizers.Lowercase(), chat_template_kwargs='{"mark": 1}')
    | dict(held_out_share=0.2, max_length=9000),
    views: dict(embed=changed(EMBED), layer=changed(LAYER), tokens=(1, 2, 4), begins=(0, 0, 2))
    | dict(eps=1e-5, taps=(0, 2), version="2"),
    continuations: dict(weights="0" * 98 + "1", tokenizer="[]", template="b", text=(1, 2, 4))
    | dict(seed=1, length=8, own_batches=2, own_batch=2, own_prompt=2, version="2"),
    cells: dict(hbm_bytes=2e9, batch=2, eps=1e-5, name="b", spec_jax="2", jax="2", compiler="2"),
}


@pytest.mark.parametrize("make", STORES, ids=lambda make: make.__name__)
def test_a_store_is_made_once_of_the_same_inputs_and_anew_of_any_other(tmp_path, make):
    assert [make(tmp_path) for _ in range(2)] == [1, 0]
    values = {}
    for name, value in STORES[make].items():
        values[name] = value
        assert make(tmp_path, **values) == 1, name
    assert make(tmp_path, **values) == 0


def test_more_text_is_taken_once_it_is_given(tmp_path):
    """A message asks for it, and asked again."""
    path, data = tmp_path / "a.txt", train_head_default.get_config().data
    data.update(text=str(path))
    for count in (1, 9):
        path.write_text(TEXT * count)
        _, held_out = texts.load(data, byte_level(CHATML), tmp_path / "data")
        assert (held_out.num_windows(2000) > 0) == (count > 1)


FILES = {
    "model/config.json": "{}",
    "model/generation_config.json": "{}",
    "model/tokenizer.json": "{}",
    "model/tokenizer_config.json": "{}",
    "model/chat_template.jinja": "a",
    "model/additional_chat_templates/tool_use.jinja": "a",
    "model/special_tokens_map.json": "{}",
    "model/model.safetensors": "0" * 999,
    "head/config.json": "{}",
    "head/pytorch_model.bin": "0" * 999,
    "texts/a.txt": "a",
    "texts/config.json": '{"text": "not of a model"}',
    "texts/more/b.txt": "b",
    "prompts.jsonl": "{}",
    "rule_of_a_store.py": "rule = 1",
}


@pytest.fixture
def named(tmp_path, monkeypatch):
    """A folder of files, and a config that names them."""
    folder = tmp_path / "files"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    module = mock.Mock(__file__=str(folder / "rule_of_a_store.py"))
    monkeypatch.setitem(sys.modules, "rule_of_a_store", module)
    return folder, {
        "target": str(folder / "model"),
        "drafts": f"ngram,{folder / 'head'}",
        "data": {"text": f"{folder / 'texts'}, {folder / 'prompts.jsonl'}"},
        "rule": "rule_of_a_store:rule",
        "mesh": "data:2,tensor:4",
        "has_audit": False,
    }


def state_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_whose_inputs_have_changed_is_refused_by_the_name_of_the_file(named, tmp_path):
    files, config = named
    folder = tmp_path / "run"
    report.begin("evaluate", folder, config)
    report.write_json(folder / cli.INPUTS, session.check_folder(folder, config))
    (folder / session.ANSWERS).write_text("{}\n")
    assert len(session.check_folder(folder, config)) == 5
    before = state_of(folder)
    keys = {"model": "target", "head": "drafts", "rule_of_a_store.py": "rule"}
    for name, content in FILES.items():
        (files / name).write_text(content[:-1] + "#")
        top, _, inner = name.partition("/")
        key = keys.get(top, "data.text")
        shown = "rule_of_a_store:rule" if key == "rule" else str(files / top)
        of_file = f": {inner}" if inner else ""
        with pytest.raises(ConfigError, match="and the same files, or an empty") as raised:
            session.check_folder(folder, config)
        assert f"other values of what is in {shown} ({key}){of_file} (" in str(raised.value), name
        (files / name).write_text(content)
        session.check_folder(folder, config)
    (files / "model" / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match=r"\(target\): generation_config.json .* not None"):
        session.check_folder(folder, config)
    assert state_of(folder) == before


UNREAD = ("README.md", "vocab.json", "vision_config.json", "pytorch_model.bin", "x.safetensors")


def test_what_no_loader_reads_may_come_and_go(named, tmp_path, monkeypatch):
    """Also folders that are called as a method, a rule or a choice of the config is."""
    files, config = named
    config |= {"rules": ["residual"], "objective": "eagle3", "copying_rules": ("match",)}
    config |= {"mesh": "data:2", "data": config["data"] | {"name": "humaneval"}}
    monkeypatch.chdir(tmp_path)
    before = inputs.of_config(config_help.flat(config))
    for name in UNREAD:
        (files / "model" / name).write_text("of no account")
    for name in ("ngram", "residual", "match", "eagle3", "humaneval"):
        (tmp_path / name).write_text("of no account")
    monkeypatch.setitem(sys.modules, "data", sys.modules["rule_of_a_store"])
    assert inputs.of_config(config_help.flat(config)) == before
    words = {"data": "humaneval", "data.text": "stdlib", "drafts": "ngram,suffix"}
    for name in ("stdlib", "suffix"):
        (tmp_path / name).write_text("of no account")
    assert not inputs.of_config(words)


# A cache, keys whose comments speak of the file of another one, a choice, and what may be mended.
NO_FILES = {"view_cache", "export_with_target", "max_prompt_tokens", "num_prompts"}
NO_FILES |= {"prompt_source", "reward"}


def test_keys_whose_comments_speak_of_files_are_checked():
    paths = pathlib.Path(evaluate_zoo.__file__).parent.glob("*.py")
    said = [pair for path in paths for pair in config_help.comments(path).items()]
    of_files = re.compile(r"\b(zoo name|director|file\b|files and|folder|module:|hub id)")
    keys = {key.rpartition(".")[2] for key, text in said if of_files.search(text)}
    known = {*inputs.PATHS, *inputs.MODULES}
    assert {"target", "drafts", "drafter", "rule", "text", "responses", "prompts"} <= keys & known
    assert keys - known == NO_FILES


def test_a_large_file_is_known_by_its_last_byte_too(tmp_path):
    path, sums = tmp_path / "a.txt", []
    for last in (b"a", b"b"):
        with open(path, "wb") as file:
            file.seek(64 << 20)
            file.write(last)
        sums.append(inputs.of_config({"data": str(path)}))
    assert sums[0] != sums[1]


def test_a_training_run_is_refused_before_its_text_is_packed_or_its_best_state_read(
    named, tmp_path
):
    """Also one that was stopped before its first checkpoint, but not before an evaluation."""
    files, values = named
    config = train_head_default.get_config()
    config.update(target=values["target"])
    config.data.text = values["data"]["text"]
    folder, made = tmp_path / "run", mock.Mock(side_effect=InterruptedError)
    train = lambda: run.train(made, "train_head", config, folder, ["eval"])
    with pytest.raises(InterruptedError):  # there is no run yet
        train()
    resolved = json.loads(config.to_json())
    report.begin("train_head", folder, resolved | {"data_seen": None})
    report.write_json(folder / cli.INPUTS, cli.inputs_of(resolved, ["eval"]))
    (folder / EVALUATIONS).write_text("{}\n")
    with pytest.raises(InterruptedError):  # it goes on
        train()
    made.reset_mock()
    (files / "texts" / "c.txt").write_text("a text more")
    with pytest.raises(ConfigError, match=r"texts \(data.text\): c.txt was None"):
        train()
    (files / "texts" / "c.txt").unlink()
    (files / "texts" / "a.txt").write_text("b")
    with pytest.raises(
        ConfigError, match=r"other values of what is in \S*texts \(data.text\): a.txt"
    ):
        train()
    (files / "texts" / "a.txt").write_text("a")
    config.optimizer.lr *= 2
    with pytest.raises(ConfigError, match="other values of optimizer.lr"):
        train()
    assert not made.called


@pytest.fixture
def cached(named, tmp_path, monkeypatch):
    """A run of training on a model of the hub; its files in the cache, and how to train."""
    files, values = named
    model = files / "model"
    is_there = lambda name: name == "owner/model" and model.exists()
    monkeypatch.setattr(
        inputs.hub, "cached_directory", lambda name: model if is_there(name) else None
    )
    config = train_head_default.get_config()
    config.update(target="owner/model")
    folder, resolved = tmp_path / "run", json.loads(config.to_json())
    report.begin("train_head", folder, resolved | {"data_seen": {"data": []}})
    report.write_json(folder / cli.INPUTS, cli.inputs_of(resolved))
    (folder / EVALUATIONS).write_text("{}\n")

    def train(download):
        def make(*_):
            download()
            return mock.MagicMock(trained=[], windows=[], title="a title")

        monkeypatch.setattr(run, "Checkpoints", mock.MagicMock())
        run.Checkpoints().__enter__().last_step = None
        monkeypatch.setattr(run, "Log", mock.Mock(side_effect=InterruptedError))
        run.train(make, "train_head", config, folder, ())

    return model, folder / cli.INPUTS, train


def test_a_model_that_is_downloaded_again_is_checked_and_what_a_run_began_with_stays(cached):
    """A preempted machine goes on with a new cache: its files are known once they are loaded."""
    model, path, train = cached
    before, kept = path.read_text(), model.rename(model.parent / "kept")

    def download():
        kept.rename(model)

    for is_partial in (False, True):  # of a download that has only begun
        if is_partial:
            model.rename(kept)
            model.mkdir()
            (model / "config.json").write_text(FILES["model/config.json"])
        restore = download if not is_partial else lambda: (shutil.rmtree(model), download())
        with pytest.raises(InterruptedError):
            train(restore)
        assert path.read_text() == before
    model.rename(kept)
    (kept / "model.safetensors").write_text("of another revision")
    with pytest.raises(ConfigError, match=r"in owner/model \(target\): model.safetensors \("):
        train(download)
    assert path.read_text() == before


def test_what_was_unknown_when_a_run_began_is_added(cached):
    model, path, train = cached
    before = path.read_text()
    path.write_text("{}")
    with pytest.raises(InterruptedError):
        train(lambda: None)
    assert path.read_text() == before
