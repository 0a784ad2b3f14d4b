"""The tables of growth: what they count, and what is refused."""

from __future__ import annotations

import pytest
from support.runs import check_run_files

from experiments import growth
from experiments.planning.plan_inputs import find_draft
from spec_jax.errors import ConfigError
from spec_jax.planning.presets import PRESETS
from spec_jax.planning.roofline import Setting

SETTING = Setting(batch=8, context=2048)


def run(workdir, **changes):
    arguments = dict(target_name="llama-3.1-8b", draft_name="eagle3", topology_name="v5e:2x4")
    arguments |= dict(setting=SETTING, num_draft=5, rate=0.75)
    return growth.run(workdir, **arguments | changes)


def test_reports_what_grows_and_where_speculation_stops_paying(tmp_path, capsys):
    record = run(tmp_path)
    for name, points in record["grown"].items():
        rounds = [p["round_ms"] for p in points]
        assert rounds == sorted(rounds) and rounds[0] < rounds[-1], name
    plain = record["grown"]["k"][0]
    assert plain["speedup"] == 1 and plain["round_ms"] == plain["plain_ms"]
    # Of the tokens that a round emits, some part is lost to its drafts.
    assert all(1 < p["speedup"] < p["tokens"] for p in record["grown"]["batch"])
    assert [c["chips"] for c in record["chips"]] == [1, 4, 8, 16, 32, 64, 128, 256]
    # 16 GB of weights beside a cache need more than one chip of 16 GB.
    assert [c["shortfall_gb"] > 0 for c in record["chips"]] == [True] + [False] * 7
    fits = [f["fits_to"] for f in record["frontier"]]
    assert fits == sorted(fits, reverse=True)
    for f in record["frontier"]:
        assert all(stop is None or stop <= f["fits_to"] for stop in f["stops_at"].values())
    assert check_run_files(tmp_path, "growth")["target"] == "llama-3.1-8b"
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    assert "by chips" in capsys.readouterr().out


CHANGES = [
    ({"rate": 1.5}, "rate is 1.5"),
    ({"num_draft": 16}, "k 16; .* 1 to 15"),
    ({"topology_name": "v5e:1x1"}, "lacks 3.1 GB .* v5e:1x1: 16.9 GB of weights"),
    ({"target_name": "llama-9b"}, "'llama-9b'; expected one of"),
    ({"draft_name": "eagle-9"}, "'eagle-9'; expected one of"),
    ({"draft_name": ""}, "draft is empty"),
]


@pytest.mark.parametrize("changes, message", CHANGES)
def test_what_cannot_be_planned_is_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, **changes)


def test_drafts_are_found_by_name():
    target = PRESETS["qwen3-8b"]
    assert find_draft("ngram", target) == "ngram" and find_draft("", target) is None
    assert find_draft("qwen3-0.6b", target) is PRESETS["qwen3-0.6b"]
    assert find_draft("eagle3", target, 16000).layer.vocab_size == 16000
    assert find_draft("mtp", target).target_vocab_size == target.vocab_size
