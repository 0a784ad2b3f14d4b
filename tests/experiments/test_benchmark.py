"""The benchmark runs end to end on tiny shapes, and what it reports follows from its times."""

import json
import types

import jax
import numpy as np
import pytest
from support.products import products
from support.runs import check_run_files
from support.tiny_models import TINY

from configs import benchmark as default
from experiments import benchmark
from experiments.benchmarks import llama110m, peers, table, training
from experiments.benchmarks.shapes import random_model
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError
from spec_jax.evaluation import timing
from spec_jax.loading import load_model

SHAPE = TINY | dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256)
SHAPE |= dict(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def config():
    config = default.get_config()
    config.llama110m.update(slots=128, prompt_tokens=5, new_tokens=12, k=2, repeats=2)
    config.llama110m.target.update(SHAPE)
    config.llama110m.draft.update(SHAPE | {"num_hidden_layers": 1})
    config.training.update(
        lm_batch=2, draft_vocab_size=24, num_steps=2, batch=2, length=16, repeats=2
    )
    config.training.target.update(SHAPE)
    return config


BARS = dict(llama110m=("verify", "round", "draft", "memory", "no_draft"))
BARS |= dict(training=("training",))


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", BARS)
def test_leaves_a_record_with_every_bar(config, tmp_path, capsys, part):
    record = benchmark.run(config, tmp_path, (part,))
    assert check_run_files(tmp_path, "benchmark")["is_complete"]
    barred = {line["bar"] for line in record["lines"] if line["bar"] is not None}
    assert barred >= {config.bars[name] for name in BARS[part]}
    for line in record["lines"]:
        low, high = line["quartiles"]
        is_difference = "a drafted token" in line["what"]  # of times that nearly agree here
        assert line["part"] == part and low <= line["value"] <= high
        assert is_difference or low > 0
    text, out = (tmp_path / "report.md").read_text(), capsys.readouterr().out
    assert all(line["what"] in text and line["what"] in out for line in record["lines"])
    with pytest.raises(ConfigError, match="holds the report of another run"):
        benchmark.run(config, tmp_path, ("peers",))


@pytest.mark.representatives("lm_case")
@pytest.mark.parametrize("make", [training.lm_case, training.eagle3_case])
def test_model_flops_are_those_of_the_products_in_a_step(make):
    """Of a width at which what is counted roughly does not matter; Adam has no products."""
    options = default.get_config().training
    options.target.update(num_hidden_layers=2)
    options.optimizer.name = "adamw"
    options.update(batch=1, lm_batch=1, length=64)
    target = random_model("t", options.target, 0)
    case = make(target, options)
    traced = jax.make_jaxpr(case.run)(case.state).jaxpr
    assert 2 * products(traced) == pytest.approx(case.flops, rel=0.05)


def test_prompts_of_peers_are_those_of_decode_and_malformed_rows_are_left_out(tmp_path):
    texts = ["def f(x):\n    return x + 1", "import math", "x = 1"]
    rows = [json.dumps({"prompt": text}) for text in texts]
    (tmp_path / "q.jsonl").write_text("\n".join([*rows[:2], "{no", rows[2]]))
    config = default.get_config().peers
    config.update({"data": str(tmp_path / "q.jsonl"), "num_prompts": 3, "max_prompt_tokens": 7})
    target = load_model("zoo/target")
    ids, notes = peers.load_prompts(config, target)
    encoded = [SpeculativeDecoder(target).encode(text) for text in texts]
    assert ids == [tokens[-7:] for tokens in encoded] and len(encoded[0]) > 7
    assert "left out:" in notes[0] and "q.jsonl:3" in notes[0]
    assert notes[1:] == ["1 of 3 prompts were too long: their last 7 tokens are used"]


def test_a_part_that_fails_is_left_out_and_finished_parts_are_shown(config, tmp_path, monkeypatch):
    found = table.Result([table.Line("what is found", [2.0])], {"a": 1})

    def part(result):
        def measure(config, records):
            if isinstance(result, Exception):
                raise result
            return result

        return types.SimpleNamespace(check=lambda config: None, measure=measure)

    results = dict(
        llama110m=ConfigError("no such head"), training=found, peers=RuntimeError("full")
    )
    monkeypatch.setattr(benchmark, "PARTS", {name: part(x) for name, x in results.items()})
    record = benchmark.run(config, tmp_path / "a", ("llama110m", "training"))
    assert record["is_complete"] and record["parts"] == {"training": {"a": 1}}
    assert record["left_out"] == {"llama110m": "no such head"}
    with pytest.raises(RuntimeError, match="full"):  # any other error ends the run
        benchmark.run(config, tmp_path / "b", ("training", "peers"))
    saved = check_run_files(tmp_path / "b", "benchmark")
    assert saved["lines"][0]["value"] == 2.0 and not saved["is_complete"]
    for parts, words in ((("llama110m",), "no such head"), (("speed",), "parts")):
        with pytest.raises(ConfigError, match=words):
            benchmark.run(config, tmp_path / "c", parts)


@pytest.mark.exhaustive
def test_the_plain_loop_decodes_what_the_decoder_decodes():
    decoder = SpeculativeDecoder(random_model("t", SHAPE, 0))
    begin = lambda *stops: llama110m.start(decoder, [7, 1, 2, 9, 8, 8], 128, 9, stops)
    stop = llama110m.GenerateTimer(decoder, begin()).tokens[4]
    state = begin(stop)
    ours = llama110m.GenerateTimer(decoder, state)
    plain = llama110m.PlainTimer(decoder.target.model, decoder.params(1)["target"], state)
    assert plain.tokens == ours.tokens and plain.tokens[-1] == stop
    plain()  # its state is copied, so it can run again
    assert plain.tokens == ours.tokens


def test_turns_are_interleaved_and_change_direction():
    calls = []
    timers = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    times = timing.interleave(timers, 2)
    assert "".join(calls) == "abccba"
    np.testing.assert_array_equal(times["a"], [1, 6])


def test_a_line_knows_whether_its_bar_is_met():
    values = [1.0, 2.0, 3.0]
    assert timing.spread(values) == (2.0, 1.5, 2.5)
    met = lambda bar, **options: table.Line("w", values, "x", bar, **options).is_met
    assert met(2.0) and not met(1.9)
    assert met(2.0, is_upper=False) and not met(2.1, is_upper=False)
    assert met(None) is None
    assert table.Line("w", [float("nan")], "x", 1.0).is_met is False
