"""``python -m spec_jax``: what its commands print, and how they answer bad input."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.pairs import tiny_pair

import spec_jax
from spec_jax.__main__ import main, make_parser
from spec_jax.inspection import inspect
from spec_jax.show.terminal import Terminal
from spec_jax.testing.certificate import certify as certification


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(autouse=True)
def keep_the_tests_cache(monkeypatch):
    monkeypatch.setattr(spec_jax, "enable_compilation_cache", lambda: None)


def test_generate_streams_what_the_library_generates(pair, capsys):
    options = ["--draft", str(pair / "draft"), "--k", "3", "--max-new-tokens", "12"]
    assert main(["generate", str(pair / "target"), "def f(x):", *options]) == 0
    out, err = capsys.readouterr()
    target, draft = spec_jax.load_model(pair / "target"), spec_jax.load_model(pair / "draft")
    config = spec_jax.SpeculativeConfig(num_speculative_tokens=3)
    row = spec_jax.SpeculativeDecoder(target, draft, config).generate("def f(x):", 12)
    assert out == row.text + "\n"
    (line,) = err.splitlines()
    assert line.startswith("12 tokens in ") and "finish reason: length; " in line
    assert "tokens per target pass" in line and "accepted (rule: greedy)" in line


def test_a_terminal_shows_in_colours_where_tokens_came_from(pair, capsys, monkeypatch):
    """Of every character that is not blank."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    options = ["--draft", "ngram", "--k", "3", "--max-new-tokens", "40"]
    line = ["generate", str(pair / "target"), "def f(x):", *options]
    assert main(line) == 0
    out, shown, style = capsys.readouterr().out, [], "0"
    for code, char in re.findall("\033\\[([\\d;]+)m|(\\S)", out):
        style = code or style
        shown += [(char, style)] if char else []
    config = spec_jax.SpeculativeConfig("ngram", 3)
    decoder = spec_jax.SpeculativeDecoder(spec_jax.load_model(pair / "target"), None, config)
    row = decoder.generate("def f(x):", 40)
    styles = {"accepted": "0;32", "corrected": "0;33"}
    tokens = zip(row.trace.pieces(row.tokens), row.trace.kinds)
    parts = [("def f(x):", "0;2"), *((text, styles.get(kind, "0")) for text, kind in tokens)]
    expected = [(char, style) for text, style in parts for char in text if not char.isspace()]
    assert shown[: len(expected)] == expected and {"accepted", "corrected"} <= {*row.trace.kinds}
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(line) == 0 and "\033" not in capsys.readouterr().out


def test_a_terminal_breaks_lines_between_words():
    shown = []
    terminal = Terminal(shown.append, 10, has_colors=False)
    for piece in ("one tw", "o three", " four\n", "日本語日本 日本", " a-word-that-is-too-long"):
        terminal.write(piece)
    terminal.flush()
    lines = ["one two ", "three four", "日本語日本", "日本 a-word-that-is-too-long"]
    assert "".join(shown).split("\n") == lines


def test_a_wrong_flag_gets_the_usage_of_its_command_and_a_suggestion(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "zoo/target", "x", "--drafft", "zoo/draft"])
    err = capsys.readouterr().err
    assert err.startswith("usage: python -m spec_jax generate") and "did you mean --draft?" in err


def test_log_probabilities_have_a_heading(pair, capsys):
    line = ["generate", str(pair / "target"), "x", "--max-new-tokens", "2", "--logprobs"]
    assert main(line) == 0
    heading, *rows, _ = capsys.readouterr().err.splitlines()
    assert [heading[:9].strip(), heading[9:19].strip()] == ["raw", "processed"]
    assert len(rows) == 2 and all(float(row[:9]) < float(row[9:19]) == 0 for row in rows)


def test_a_reader_of_stdout_that_has_gone_ends_a_command_quietly(pair):
    """As in ``| head``: the pipe is closed before the command prints."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "spec_jax", "inspect", str(pair / "target")]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_no_command_prints_help_and_every_option_has_its_default(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("generate", "certify", "inspect"))
    (commands,) = (a for a in make_parser()._actions if a.dest == "COMMAND" or a.choices)
    for command in commands.choices.values():
        for action in command._actions:
            is_stated = "default" in (action.help or "") or action.default in (None, False)
            assert action.help and is_stated or action.dest == "help", action


LINES = [
    (["generate", "no/such/model", "x"], "error: no/such/model is neither a directory nor"),
    (["certify", "--rule", "residul"], "error: rule is 'residul' (did you mean residual?); "),
    (["generate", "zoo/target", "x", "--max-tokens", "5"], "name --max-new-tokens, which"),
    (
        ["generate", "zoo/target", "x", "--draft", "zoo/draft", "--k", "0"],
        "error: --k is 0; expected an integer of 1 or more (for plain decoding, leave out --draft)",
    ),
    (["inspect", "zoo/eagel3"], "(did you mean zoo/eagle3?)"),
]


@pytest.mark.parametrize("line, said", LINES)
def test_bad_input_is_one_line_and_status_2(line, said, capsys):
    assert main(line) == 2
    out, err = capsys.readouterr()
    assert said in err and len(err.splitlines()) == 1 and out == ""


def test_a_certificate_is_printed_and_a_failed_one_is_status_1(monkeypatch, capsys):
    asked = []

    def certify(rule, drafter, **options):
        asked.append((rule, drafter, options))
        if rule == "bad":
            error = certification.CertificateError("a joint probability differs")
            error.certificate = "No certificate: a joint probability differs"
            raise error
        return "Certificate"

    monkeypatch.setattr(certification, "certify", certify)
    assert main(["certify", "--rule", "m:r", "--drafter", "m:make", "--trials", "9"]) == 0
    assert asked == [
        ("m:r", "m:make", {"target": None, "trials": 9, "seed": 0, "has_memory": False})
    ]
    assert main(["certify", "--rule", "bad"]) == 1
    assert capsys.readouterr().out == "Certificate\nNo certificate: a joint probability differs\n"


def test_a_model_is_counted_from_its_headers(pair):
    found, model = inspect(pair / "target"), spec_jax.load_model(pair / "target")
    assert found.kind == "model" and found.num_params == model.num_params
    assert found.facts["layers"] == 2 and found.facts["width"] == 16
    assert found.facts["vocabulary"] == "300 ids" and found.facts["chat template"] == "no"
    tied = "yes" if model.config.tie_word_embeddings else "no"
    assert found.facts["tied embeddings"] == tied and set(found.dtypes) == {"float32"}
    assert found.num_bytes == sum(p.stat().st_size for p in (pair / "target").iterdir())
    assert found.notes == () and f"parameters       {model.num_params:,}" in str(found)


@pytest.mark.parametrize("name, kind", [("eagle1", "eagle"), ("eagle3", "eagle"), ("mtp", "mtp")])
def test_heads_of_the_zoo_are_told_apart(name, kind):
    found = inspect(f"zoo/{name}")
    assert found.kind == kind and "load_draft" in found.notes[0]
    assert found.num_params > 100_000 and "bfloat16" in found.dtypes


def test_what_is_no_model_says_what_it_is(pair, tmp_path):
    (tmp_path / "tokens").mkdir()
    shutil.copy(pair / "target" / "tokenizer.json", tmp_path / "tokens")
    found = inspect(tmp_path / "tokens")
    assert (found.kind, found.num_params) == ("tokenizer", None)
    assert found.notes == ("there are no weights",)
    torch = shutil.copytree(pair / "target", tmp_path / "torch")
    (torch / "model.safetensors").rename(torch / "pytorch_model.bin")
    assert "files of torch (pytorch_model.bin)" in " ".join(inspect(torch).notes)

    other = shutil.copytree(pair / "target", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "rwkv"}))
    found = inspect(other)
    assert found.num_params and "'rwkv' is not supported" in found.refused
    assert f"load_model refuses it: {found.refused}" in str(found).splitlines()[1]


def test_padding_and_tensors_that_do_not_fit_are_noted(pair, tmp_path):
    folder = shutil.copytree(pair / "target", tmp_path / "padded")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 364}))
    assert inspect(folder).facts["vocabulary"] == "364 ids, 64 of them padding"
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file({**weights, "extra.weight": np.ones(3, "f4")}, folder / "model.safetensors")
    missing, others = inspect(folder).notes
    assert missing == "tensors are missing, 1: model.norm.weight" and "extra.weight" in others
