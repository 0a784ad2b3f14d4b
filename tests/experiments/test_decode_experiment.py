"""The decode experiment: a whole run on tiny models, its report, and its refusals."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import pytest
from support.pairs import tiny_pair
from support.runs import check_run_files

from configs import decode_default
from experiments.comparison import report as reports
from experiments.comparison.setup import Setup, resolve
from experiments.decode import decode
from spec_jax import load_model
from spec_jax.data.questions import Question
from spec_jax.errors import ConfigError
from spec_jax.evaluation.prompts import PromptEncoder, fit

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Directories of a target and a draft that share a tokenizer of 300 entries."""
    return tiny_pair(tmp_path_factory.mktemp("pair"))


def small(pair, **changes):
    config = decode_default.get_config()
    config.update(target=str(pair / "target"), drafts=f"ngram,{pair / 'draft'}", num_prompts=2)
    config.update(max_new_tokens=8, has_stream=False)
    config.update(changes)
    return config


@pytest.fixture(scope="module")
def run(pair, tmp_path_factory):
    """Folder and report of one run of every method."""
    folder = tmp_path_factory.mktemp("run")
    return folder, decode(small(pair, has_audit=True), folder)


def test_a_run_leaves_its_folder(run):
    folder, _ = run
    assert check_run_files(folder, "decode")["config"]["ks"] == []
    plots = {path.stem for path in folder.glob("*.png") if path.read_bytes()[1:4] == b"PNG"}
    assert plots == {"acceptance", "predicted", "speedup"}
    assert all((folder / f"{plot}.{kind}").exists() for plot in plots for kind in ("pdf", "svg"))
    text = (folder / "report.md").read_text()
    assert re.search(r"\| draft +\| +3 +\| +1 +\| residual +\|", text) and "speedup.png" in text
    written = {path.suffix: path.stat().st_mtime_ns for path in folder.glob("[rs][ep]*")}
    assert written[".md"] <= min(written[".png"], written[".html"])  # a plot that fails costs none


def test_the_report_holds_every_cell_and_only_valid_json(run):
    refuse = lambda name: pytest.fail(f"{name} in report.json")
    report_json = json.loads((run[0] / "report.json").read_text(), parse_constant=refuse)
    assert report_json["is_complete"]
    audits = [(a["method"], a["identical"], a["bug"]) for a in report_json["audit"]]
    assert audits == [("ngram", 2, 0), ("draft", 2, 0)]
    cells = [(r["method"], r["k"], r["temperature"], r["rule"]) for r in report_json["results"]]
    of = lambda T, *rules: [*zip(("plain", "ngram", "draft"), (0, 3, 3), (T,) * 3, rules)]
    assert cells == of(0, *["greedy"] * 3) + of(1, "match", "match", "residual")
    for r in report_json["results"]:
        assert r["emitted"] == r["first"] + r["accepted"] + r["corrected"] + r["bonus"] == 16
        assert len(r["acceptance_by_position"]) == r["k"]
        assert r["identical_to_plain"] is (None if r["rule"] == "residual" else True)
        assert r["speedup"] > 0 and r["predicted_speedup"] > 0 and r["tokens_per_s"] > 0
        has_expected = r["temperature"] > 0 and r["k"] > 0
        assert len(r["expected_by_position"]) == (r["k"] if has_expected else 0)


def test_each_draft_has_a_k_of_its_own_unless_ks_says_otherwise(pair):
    path = str(pair / "draft")
    ks = lambda **changes: {
        c.method: c.k for c in Setup.of(small(pair, temperatures=(0,), **changes)).cells[0.0]
    }
    assert ks() == {"plain": 0, "ngram": 3, "draft": 3}
    assert ks(best_k=f"ngram=5,{path}=2") == {"plain": 0, "ngram": 5, "draft": 2}
    assert ks(best_k=f"ngram=5,{path}=2", ks=(4,)) == {"plain": 0, "ngram": 4, "draft": 4}


def test_what_cannot_be_used_is_left_out_with_a_note(pair, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "x = 1"}\n{\n{"prompt": 5}\n"import os"\n', encoding="utf-8")
    options = dict(data=str(data), temperatures=(0,), num_prompts=16, batches=(4,), ks=(1, 2))
    setup = Setup.of(small(pair, drafts="ngram,no/such,zoo/draft", **options))
    assert [*dict.fromkeys(cell.method for cell in setup.cells[0.0])] == ["plain", "ngram"]
    assert [*setup.drafts] == ["ngram"] and setup.config.batches == (2,)
    assert [prompt.text for prompt in setup.questions.chosen] == ["x = 1", "import os"]
    notes = reports.start(setup)["notes"]
    expected = (
        "no/such is left out",
        "zoo/draft is left out: the vocabularies differ",
        ":2: not JSON",
        "prompt is 5",
        "has 2 questions, not 16",
        "batches of 4 are of 2",
    )
    assert len(notes) == 6 and all(said in note for note, said in zip(notes, expected))


def test_a_folder_of_another_run_is_refused_and_a_finished_one_goes_on(run, pair, capsys):
    with pytest.raises(ConfigError, match="other values of max_new_tokens"):
        decode(small(pair, max_new_tokens=9), run[0])
    again = decode(small(pair, has_audit=True), run[0])
    assert "12 answers are there" in capsys.readouterr().out
    assert [r["rounds"] for r in again["results"]] == [r["rounds"] for r in run[1]["results"]]


def test_a_config_file_without_a_key_is_refused(pair):
    config = small(pair)
    with config.unlocked():
        del config["seed"]
    with pytest.raises(ConfigError, match="lacks seed"):
        resolve(config)


def command(*args):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
    }
    options = dict(cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    return subprocess.run([sys.executable, "-m", "experiments.decode", *map(str, args)], **options)


def test_the_command_answers_bad_input_in_one_line():
    done = command("--config.num_prompt=3")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ")
    assert "no key 'num_prompt' (did you mean num_prompts?)" in line


@pytest.mark.exhaustive
def test_the_command_takes_typed_overrides(pair, tmp_path):
    assert "num_prompts=many: expected an integer" in command("--config.num_prompts=many").stderr
    overrides = f"target={pair / 'target'} drafts=ngram ks=1,2 temperatures=0.5 num_prompts=2"
    overrides += " sampler.top_k=5 draft_temperature=0.7 batches=2 max_new_tokens=4"
    overrides += " has_expected=false max_prompt_tokens=16"
    flags = [f"--config.{override}" for override in overrides.split()]
    done = command(*flags, f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [(r["method"], r["k"]) for r in result["results"]][1:] == [("ngram", 1), ("ngram", 2)]
    assert result["config"]["sampler"]["top_k"] == 5
    assert "truncated to the maximum of 16 tokens" in "".join(result["notes"])
    assert "Traceback" not in done.stderr and "measuring 2/2" in done.stderr


def test_long_prompts_lose_their_beginning_but_not_bos(pair):
    target = load_model(pair / "target")
    text = "<|endoftext|>" + "x = 1\n" * 200
    whole = target.tokenizer.encode(text)
    assert whole[0] == target.config.bos_token_id
    asked = [Question("", text=text), Question("", text="x")]
    (ids, short), num_cut = fit(asked, target, 28, None)
    assert num_cut == 1 and len(ids) == 100 and ids == whole[:1] + whole[-99:]
    assert short == target.tokenizer.encode("x")
    assert len(fit([Question("", text=text)], target, 28, 10)[0][0]) == 10


def test_variables_of_a_chat_template_are_the_configs(pair, tmp_path):
    shutil.copytree(pair / "target", tmp_path / "target")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}a:{{ mark }}"
    (tmp_path / "target" / "chat_template.jinja").write_text(template)
    (tmp_path / "turns.jsonl").write_text(json.dumps({"turns": ["x = 1", "more"]}) + "\n")
    config = decode_default.get_config()
    config.update(target=str(tmp_path / "target"), drafts="ngram", num_prompts=1)
    config.update(data=str(tmp_path / "turns.jsonl"), chat_template_kwargs='{"mark": "!"}')
    setup = Setup.of(config)
    ids = PromptEncoder(setup.target)(setup.questions.chosen[0])
    assert setup.target.tokenizer.decode(ids) == "user: x = 1\na:!"
    for data in ("pieces", "functions"):
        config.data = data
        with pytest.raises(ConfigError, match="'mark': '!'}, and there is no conversation"):
            Setup.of(config)
