"""The experiment that evaluates: figures, their intervals and differences, and what it refuses."""

import json

import jax
import numpy as np
import pytest
from support.runs import check_run_files
from support.tiny_models import LLAMA, random_weights

from configs import evaluate_zoo
from experiments import evaluate
from experiments.common.evaluation import Counts, differences
from experiments.common.intervals import bootstrap
from spec_jax.data import python_source, tokens
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.eagle.write import write_head
from spec_jax.errors import ConfigError
from spec_jax.loading import random_head
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The target as its own draft, a head, and pieces of text to continue."""
    folder = tmp_path_factory.mktemp("evaluate")
    text = [text for _, text in python_source.documents("held_out")[:2]]
    tokenizer = Tokenizer(tokens.train_tokenizer(text, 300))
    shape = LLAMA.__class__(**{**LLAMA.__dict__, "vocab_size": 300, "max_position_embeddings": 64})
    save_pretrained(folder / "target", random_weights(shape), shape, tokenizer)
    head = random_head(EagleConfig.of_target(shape, 1), jax.random.key(1))
    write_head(folder / "head", head.config, head.params, layout="EAGLE-1", target_config=shape)
    lines = [json.dumps({"prompt": text[0][i : i + 9]}) for i in (0, 40, 90)]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    config = evaluate_zoo.get_config()
    config.target = str(folder / "target")
    config.drafts = f"{folder / 'head'}, {folder / 'target'}"
    config.prompts = str(folder / "prompts.jsonl")
    config.update({"num_prompts": 3, "max_new_tokens": 8, "num_draft": 2, "batch": 2})
    return config


def test_a_draft_equal_to_the_target_is_always_accepted(config, tmp_path, capsys):
    config = config.copy_and_resolve_references()
    config.drafts = config.target
    (same,) = evaluate.evaluate(config, str(tmp_path / "run"))["rows"]
    assert 2 < same["tau"].low <= same["tau"].value <= same["tau"].high <= 3
    np.testing.assert_allclose([x.value for x in same["accept"]], 1)
    saved = check_run_files(tmp_path / "run", "evaluate")
    assert saved["rows"][0]["rounds"] == same["rounds"] and same["cost"] > 0
    assert "tau" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_reports_what_decoding_did(config, tmp_path, capsys):
    rep = evaluate.evaluate(config, str(tmp_path / "run"))
    head, same = rep["rows"]
    low, high = same["tau"].low, same["tau"].high
    assert 2 < low <= same["tau"].value <= high <= 3  # the last round may be cut
    np.testing.assert_allclose([x.value for x in same["accept"]], 1)
    assert same["difference"][0].value == pytest.approx(same["tau"].value - head["tau"].value)
    assert 1 <= head["tau"].value < same["tau"].value
    gaps = np.subtract(head["teacher_forced"], [x.value for x in head["accept"]])
    assert np.nanmax(np.abs(gaps)) < 0.01
    assert head["cost"] > 0 and same["cost"] > 0
    saved = check_run_files(tmp_path / "run", "evaluate")
    assert [row["rounds"] for row in saved["rows"]] == [head["rounds"], same["rounds"]]
    assert (tmp_path / "run" / "acceptance.png").stat().st_size > 5000
    assert "Differences, prompt by prompt" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("drafts", "", "drafts is ''; expected names"),
        ("num_draft", 0, "num_draft is 0"),
        ("max_new_tokens", 1, "max_new_tokens is 1"),
    ],
)
def test_refuses_what_cannot_be(config, name, value, message):
    wrong = config.copy_and_resolve_references()
    wrong[name] = value
    with pytest.raises(ConfigError, match=message):
        evaluate.evaluate(wrong)


def test_intervals_are_those_of_the_mean_and_of_paired_differences():
    draw = np.random.default_rng(0)
    rounds = draw.integers(5, 9, 400)
    accepted = draw.binomial(rounds[:, None], [0.6, 0.0])
    counts = Counts(rounds + accepted[:, 0], rounds, np.stack([rounds, 0 * rounds], 1), accepted)
    tau, accept, never = bootstrap(counts.rates, 400)
    assert tau.value == pytest.approx(1 + accept.value) and tau.low < 1.6 < tau.high
    error = 1.96 * np.sqrt(0.6 * 0.4 / rounds.sum())
    widths = [accept.high - accept.value, accept.value - accept.low]
    np.testing.assert_allclose(widths, error, rtol=0.15)
    assert np.isnan(never).all() and str(never) == "–"
    assert differences(counts, counts)[0] == (0, 0, 0)  # the same prompts on both sides
