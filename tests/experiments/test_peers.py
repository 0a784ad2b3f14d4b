"""The part "peers" with workers that decode nothing: ratios, tables, and peers that fail.

The real workers are compared in ``tests/parity/test_transformers_peers.py``.
"""

import json
import pathlib
import sys

import pytest
from support import fake_peer
from support.runs import check_run_files
from support.tiny_models import TINY

from configs import benchmark as default
from experiments import benchmark
from experiments.benchmarks import peers
from experiments.benchmarks.peers import OURS, THEIRS, PeerCell
from experiments.benchmarks.shapes import random_model
from spec_jax.models.checkpoint import save_pretrained

SHAPE = TINY | dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256)
SHAPE |= dict(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    for name, seed in (("target", 0), ("draft", 1)):
        model = random_model(name, SHAPE, seed)
        save_pretrained(folder / name, model.params, model.config)
    return folder


@pytest.fixture
def config(models):
    config = default.get_config()
    options = dict(num_prompts=2, max_prompt_tokens=9, new_tokens=8)
    config.peers.update(target=str(models / "target"), draft=str(models / "draft"), **options)
    config.peers.update({"ks": (2,), "repeats": 1})
    return config


def run(config, folder, monkeypatch, fault=""):
    """The part with workers of which theirs takes five times as long."""
    fake = str(pathlib.Path(fake_peer.__file__))
    environment = {"PYTHONPATH": str(peers.cli.ROOT)}
    command = lambda *words: ([sys.executable, fake, *words], environment)
    made = {OURS: command("0.5"), THEIRS: command("2.5", fault)}
    monkeypatch.setattr(peers, "commands", lambda config: made)
    monkeypatch.setattr(peers, "_REST_S", 0.0)
    return benchmark.run(config, folder, ("peers",))


def test_ratios_and_table_follow_from_the_times(config, tmp_path, monkeypatch, capsys):
    record = run(config, tmp_path, monkeypatch)
    saved = check_run_files(tmp_path, "benchmark")
    assert saved["is_complete"] and saved["parts"] == json.loads(json.dumps(record["parts"]))
    value = {line["what"]: (line["value"], line["bar"], line["is_met"]) for line in record["lines"]}
    for dtype in ("float32", "bfloat16"):
        beside = f"/ transformers assisted generation, K=2, {dtype}"
        assert value[f"spec_jax standalone, K=2 {beside}"] == (5.0, 4.0, True)
        assert value[f"spec_jax zoo/eagle3, K=2 {beside}"] == (10.0, 4.0, True)
        lookup = f"spec_jax ngram, K=2 / transformers prompt lookup, K=2, {dtype}"
        assert value[lookup] == (5.0, None, None)
        assert value[f"spec_jax plain / transformers plain, {dtype}"] == (5.0, None, None)
        # Their fastest is assisted generation with either K.
        assert value[f"fastest of spec_jax / fastest of transformers, {dtype}"][0] == 10.0
        found = record["parts"]["peers"][dtype]
        assert found["rows"] == 2 and 1e6 < found["peak_bytes"][THEIRS] < 1e8
        same = found["identical_rows"]["transformers assisted generation, K=its own"]
        assert same == {"own plain": 1, "peer": None}
    text = (tmp_path / "report.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    (row,) = [r for r in rows if r[:4] == ["bfloat16", OURS, "standalone", "2"]]
    # 16 tokens in a second; half of plain decoding's time, a fifth of the peer's.
    want = ["16", "2.00", "1.50", "5.00", "2 of 2", "2 of 2", "1.0"]
    assert row[4:] == want
    assert "outputs that repeat their prompt" in text
    assert "Peers' processes" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_left_out_with_the_remedy(config, tmp_path, monkeypatch):
    config.transformers.python = str(tmp_path / "no_python")
    record = benchmark.run(config, tmp_path / "a", ("peers",))
    assert record["is_complete"] and not record["lines"] and not record["parts"]["peers"]
    assert "no_python cannot be run: No such file" in record["notes"][0]
    assert "--config.transformers.python=PATH" in record["notes"][0]
    record = run(config, tmp_path / "b", monkeypatch, "no_torch")
    assert len(record["notes"]) == 1 and "No module named 'torch'" in record["notes"][0]
    assert "install the extra parity" in record["notes"][0] and record["is_complete"]


FAULTS = {
    "dies": (1, "in float32 was left out: the process ended with exit code 137: Killed"),
    "late": (1, "in float32 was left out: MemoryError: out of memory"),
    "banner": (0, "wrote 'Welcome to a wrapper of python' to stdout"),
    "no_lookup": (2, "prompt lookup, K=2 in float32 was left out (ValueError: no such method)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_process_that_fails_is_left_out_alone(config, tmp_path, monkeypatch, fault):
    record = run(config, tmp_path, monkeypatch, fault)
    num_dtypes, words = FAULTS[fault]
    assert record["is_complete"] and len(record["parts"]["peers"]) == num_dtypes
    assert words in " ".join(record["notes"])
    if fault == "no_lookup":  # of ngram there is a speed, and nothing to compare with
        assert len(record["lines"]) == 2 * 4
        assert "spec_jax ngram, K=2" in record["parts"]["peers"]["float32"]["times_ms"]


def test_flags_and_cells_name_the_parts_and_the_peers():
    assert benchmark.chosen(None, False) is None
    assert benchmark.chosen(None, True) == ["peers"]
    assert benchmark.chosen(["heads"], True) == ["heads", "peers"]
    assert len(peers.cells((1, 3), has_draft=False, head="")) == 2 + 2 * 2
    cells = peers.cells((1, 3), has_draft=True, head="")
    assert len(cells) == len(set(cells)) == 3 + 2 * 4
    for cell in cells:
        assert cell.side == THEIRS or cell.peer in cells
    assert PeerCell(OURS, "head", 3, "h").peer == PeerCell(THEIRS, "assisted", 3)
