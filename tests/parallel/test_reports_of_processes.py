"""Evaluating in two processes: one writer, and the report of one device."""

import json

import jax
import pytest
from support.files import held_out, tiny_config, tokenizer_of, write_lines
from support.launched import run
from support.tiny_models import random_weights

from configs import evaluate_zoo
from experiments.evaluate import evaluate
from spec_jax.models.checkpoint import save_pretrained

COUNTS = ("emitted", "first", "accepted", "corrected", "bonus", "drafted", "rounds")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, a draft and prompts."""
    folder = tmp_path_factory.mktemp("files")
    (text,) = held_out(1)
    tokenizer, config = tokenizer_of([text]), tiny_config(max_position_embeddings=64)
    weights = random_weights(config)
    near = jax.tree.map(lambda w, noise: w + 0.2 * noise, weights, random_weights(config, 1))
    for name, values in (("target", weights), ("draft", near)):
        save_pretrained(folder / name, values, config, tokenizer)
    prompts = ({"prompt": text[i : i + 12]} for i in (0, 40, 90, 200))
    write_lines(folder / "prompts.jsonl", prompts)
    return folder


def launch(values, folder):
    """The report that two processes write; a tuple is written with commas."""
    text = lambda value: ",".join(map(str, value)) if isinstance(value, tuple) else value
    options = [f"--config.{name}={text(value)}" for name, value in values.items()]
    code, output = run(
        2,
        2,
        "experiments.evaluate",
        *options,
        "--config.mesh=data:2,tensor:2",
        f"--workdir={folder}",
    )
    assert code == 0, output
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


@pytest.mark.exhaustive
def test_evaluate(files, tmp_path):
    """``experiments.decode`` is the same experiment with other values."""
    values = dict(target=str(files / "target"), drafts=str(files / "draft"))
    values |= dict(data=str(files / "prompts.jsonl"), num_prompts=4, batches=(4,))
    values |= dict(max_new_tokens=8, ks=(2,), repeats=1)
    two = launch(values, tmp_path / "two")["results"]
    config = evaluate_zoo.get_config()
    config.update(values)
    one = evaluate(config, tmp_path / "one")["results"]
    counts = lambda results: [[row[name] for name in COUNTS] for row in results]
    assert counts(two) == counts(one)
    assert [row["identical_to_plain"] for row in two] == [True, True]
    assert two[1]["tau"] == pytest.approx(one[1]["tau"]) and two[1]["accepted"] > 0
    assert two[1]["tau_interval"] == pytest.approx(one[1]["tau_interval"])
