"""The audit: rounding is called rounding, and a planted defect a bug, also at a near tie."""

import collections
import dataclasses
import functools
import gzip
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from support.defects import DEFECTS, perturbed_layer
from support.tiny_models import LLAMA, large_weights

from docs.examples import my_model
from spec_jax import SamplerConfig, SpeculativeConfig, SpeculativeDecoder, load_draft, load_model
from spec_jax.errors import ConfigError
from spec_jax.testing import Audit, RowAudit, audit, audit_outputs, mock_model
from spec_jax.testing.auditing.audit import Trail, judge
from spec_jax.testing.auditing.replay import Passes
from spec_jax.testing.oracles import toy_logits

PROMPTS = pathlib.Path(__file__).resolve().parents[3] / "shared/data/prompts/HumanEval.jsonl.gz"
# The other text has few places where decoding parts, and few tokens before them.
needs_prompts = pytest.mark.skipif(not PROMPTS.exists(), reason=f"{PROMPTS.name} is not there")
NOISE = np.asarray([1.0, 0.9, 1.2, 1.0, 0.8, 1.1, 1.0, 1.0, 0.9, 1.7])


def trail(ratio=NOISE, pooled=1.02, own_gap=0.0, **options):
    return Trail("the decoder", ratio, pooled, np.full(len(ratio), own_gap), 1e-3, **options)


def judged(at=10, gap=0.01, **options):
    gaps = np.zeros(11)
    gaps[-1] = gap
    return judge(at, gaps, np.full(11, 0.02), [trail(), trail(**options)])[0]


def test_a_near_tie_is_rounding_only_if_the_logits_are_right_as_well():
    assert judged() == "rounding"
    assert judged(at=None, gap=0.0) == "identical"
    assert judged(gap=0.05) == "bug"  # no near tie
    assert judged(ratio=np.where(np.arange(10) == 9, 3.5, NOISE)) == "bug"  # the last pass is off
    assert judged(ratio=np.where(np.arange(10) == 2, 3.5, NOISE)) == "bug"  # an earlier one
    assert judged(pooled=1.5) == "bug"  # each a little
    assert judged(own_gap=0.1) == "bug"  # another token than its own logits'
    assert judged(ratio=np.full(10, np.nan)) == "bug"
    assert judged(at=None, gap=0.0, pooled=1.5) == "bug"  # no token differs yet


def test_the_average_of_few_positions_may_be_farther_from_float32():
    few = lambda n, pooled: judge(n, np.zeros(9), np.ones(9), [trail(NOISE[:n], pooled=pooled)])[0]
    assert few(3, 1.5) == few(7, 1.29) == "rounding" and few(3, 1.7) == few(7, 1.4) == "bug"
    assert judge(0, np.zeros(1), np.ones(1), [trail(NOISE[:0], pooled=0.0)])[0] == "rounding"


def test_outputs_that_were_not_decoded_again_are_told_apart_by_the_tie_alone():
    target = mock_model()
    differing = audit_outputs(target, [0, 1], [1, 2], [1, 3])
    ended = audit_outputs(target, [0, 1], [1], [1, 3])
    assert (ended.at, ended.gap, ended.tokens) == (1, None, (None, 3))
    logits = np.asarray(toy_logits(target.params, (0, 1, 1)))
    assert differing.at == 1
    assert differing.gap == pytest.approx(logits.max() - min(logits[2], logits[3]), rel=1e-3)
    same = audit_outputs(target, [0, 1], [1, 2], [1, 2])
    assert "were not examined" in same.evidence[-1]


def test_rows_that_were_not_examined_are_said_to_be_so_and_never_counted_as_clean():
    some = Audit(9, (RowAudit(1, "bug", ("off",), 4), RowAudit(2, "rounding", ("a tie",), 7)), 6)
    assert "2 examined" in str(some) and "7 not examined" in str(some)
    counts = {"identical": 0, "rounding": 1, "bug": 1, "not_examined": 7}
    assert counts.items() <= some.to_dict().items()


def test_the_wider_pass_of_float32_has_more_digits():
    found = Passes(large_weights("target", LLAMA, 0)).logits([3, 1, 4, 1, 5], 2)
    gaps = np.abs(found.exact - found.rounded)
    assert 0 < gaps.max() < 1e-4 * np.abs(found.exact).max()


def custom_rows(forward):
    """The rows of an audit of ``my_model``, all of them examined."""
    own = my_model.make()
    target = dataclasses.replace(own, model=own.model._replace(forward=forward))
    decoder = SpeculativeDecoder(target, my_model.make(1), SpeculativeConfig("standalone", 2))
    return audit(decoder, [[3, 1, 4], [7, 2]], 24, has_all_rows=True).rows


@pytest.mark.exhaustive
def test_float32_models_without_a_config_are_measured_in_float64():
    assert [row.verdict for row in custom_rows(my_model.forward)] == ["identical"] * 2


@pytest.mark.exhaustive
def test_a_defect_of_a_model_without_a_config_is_a_bug_and_no_rounding():
    def rounded(params, tokens, cache, **options):
        output = my_model.forward(params, tokens, cache, **options)
        noise = 1e-4 * jnp.sin(1e4 * output.hidden) * (tokens.shape[1] == 3)  # of a verify pass
        return output._replace(hidden=output.hidden + noise)

    assert "bug" in [row.verdict for row in custom_rows(rounded)]


def test_where_rounding_cannot_be_measured_the_audit_says_so():
    def narrow(params, tokens, cache, **options):
        output = my_model.forward(params, tokens, cache, **options)
        return output._replace(hidden=output.hidden.astype(jnp.float32))

    own = my_model.make()
    target = dataclasses.replace(own, model=own.model._replace(forward=narrow))
    differing = audit_outputs(target, [3, 1, 4], [1, 2], [1, 3])
    assert differing.verdict == "unknown"
    assert "computes in float32 although its weights are in float64" in str(differing)
    found = Audit(1, (differing,), 2)
    assert not found.is_explained and "1 of unknown cause" in str(found)


def test_sampled_outputs_and_missing_rows_are_refused():
    decoder = SpeculativeDecoder(mock_model(), mock_model(seed=1))
    with pytest.raises(ConfigError, match="temperature is 1; an audit compares greedy"):
        audit(decoder, [0, 1], sampler=SamplerConfig(temperature=1.0))
    with pytest.raises(ConfigError, match="outputs have 1 and 2 rows; expected two lists of 1"):
        audit(decoder, [0, 1], outputs=([[1]], [[1], [2]]))
    with pytest.raises(ConfigError, match="output 0 holds id 99; .* has ids 0 to"):
        audit(decoder, [0, 1], outputs=([[99]], [[1]]))
    with pytest.raises(ConfigError, match="output 1 holds id -1"):
        audit_outputs(decoder.target, [0, 1], [1], [-1])


def human_eval(target, num):
    """Endings and beginnings of the prompts; of this file's own text where there are none."""
    lines = gzip.open(PROMPTS, "rt") if PROMPTS.exists() else []
    texts = [json.loads(line)["prompt"] for line in lines]
    ids = [target.tokenizer.encode(text) for text in texts]
    if not ids:
        own = target.tokenizer.encode(pathlib.Path(__file__).read_text())
        ids = [own[i : i + 120] for i in range(0, len(own) - 120, 20)]
    windows = [row[-120:] for row in ids] + [row[:100] for row in ids if len(row) > 120]
    return [row for row in windows if len(row) >= 24][:num]


class Zoo:
    """The zoo in bfloat16: EAGLE-3, K = 5, and what plain decoding answers.

    Args:
      num_prompts: number of prompts.
      num_tokens: of each output.
      batch: prompts that are decoded together. A batch of two seldom parts: the products of two
        rows round like those of twelve, the product of one row does not.
    """

    def __init__(self, num_prompts, num_tokens, batch):
        target = load_model("zoo/target", "bfloat16")
        head = load_draft("zoo/eagle3", target)
        self.plain = SpeculativeDecoder(target)
        self.decoder = SpeculativeDecoder(target, head, SpeculativeConfig("eagle", 5))
        prompts = human_eval(target, num_prompts)
        assert len(prompts) == num_prompts
        self.batches = [prompts[i : i + batch] for i in range(0, num_prompts, batch)]
        self.num_tokens, self.options = num_tokens, {"stop_tokens": [], "pad_to": 120}
        self.outputs = [self.decode(self.plain, rows) for rows in self.batches]

    def decode(self, decoder, prompts):
        rows = decoder.generate(prompts, self.num_tokens, **self.options)
        return [row.tokens for row in rows]

    def audit(self, decoder, **options):
        """Returns the rows that were examined."""
        found = []
        for prompts, plain in zip(self.batches, self.outputs):
            outputs = (plain, self.decode(decoder, prompts))
            found += audit(
                decoder,
                prompts,
                self.num_tokens,
                plain=self.plain,
                outputs=outputs,
                **self.options,
                **options,
            ).rows
        return found


@functools.cache
def zoo(num_prompts, num_tokens, batch=1):
    return Zoo(num_prompts, num_tokens, batch)


@pytest.mark.exhaustive
def test_honest_decoding_is_explained_and_a_planted_defect_is_a_bug():
    run = zoo(4, 24, batch=2)
    honest = run.audit(run.decoder, has_all_rows=True)
    assert len(honest) == 4 and all(row.verdict in ("identical", "rounding") for row in honest)
    assert max(max(row.pooled) for row in honest) < 1.2
    rows = run.audit(DEFECTS["low_precision_cache"](run.decoder))
    assert rows and all(row.verdict == "bug" for row in rows)


@pytest.mark.exhaustive
def test_decoding_on_a_mesh_is_explained_and_a_planted_defect_is_a_bug():
    target = load_model("zoo/target")
    prompts, options = human_eval(target, 2), {"stop_tokens": [], "pad_to": 120}
    parts = (target, load_draft("zoo/eagle3", target), SpeculativeConfig("eagle", 5))
    alone = [row.tokens for row in SpeculativeDecoder(target).generate(prompts, 24, **options)]
    decoder = SpeculativeDecoder(*parts, mesh="data:2,tensor:2")
    honest = audit(decoder, prompts, 24, has_all_rows=True, **options)
    assert [row.verdict for row in honest.rows] == ["identical"] * 2
    assert [row.tokens for row in decoder.generate(prompts, 24, **options)] == alone
    wrong = DEFECTS["position_off_by_one"](decoder)
    found = audit(wrong, prompts, 24, has_all_rows=True, **options)
    assert [row.verdict for row in found.rows] == ["bug"] * 2


def told(rows):
    """The verdicts, and how far the farthest logits of each row are from float32."""
    far = sorted(max(row.deviations, default=0.0) for row in rows) or [0.0]
    pooled = max((max(row.pooled, default=0.0) for row in rows), default=0.0)
    counts = dict(collections.Counter(row.verdict for row in rows))
    return f"{counts}, {far[0]:.2f} to {far[-1]:.2f} times rounding at a token, {pooled:.3f} pooled"


@needs_prompts
@pytest.mark.measure
def test_every_divergence_of_two_hundred_prompts_is_rounding():
    run = zoo(200, 48)
    rows = run.audit(run.decoder)
    print(f"200 prompts: {told(rows)}", *rows, sep="\n")
    assert len(rows) >= 3 and all(row.verdict == "rounding" for row in rows)


@pytest.mark.measure
def test_no_row_of_correct_decoding_is_far_from_float32():
    run = zoo(40, 48)
    rows = run.audit(run.decoder, has_all_rows=True)
    print(f"40 prompts, all rows: {told(rows)}")
    assert len(rows) == 40 and all(row.verdict != "bug" for row in rows)


@needs_prompts
@pytest.mark.measure
@pytest.mark.parametrize("name", DEFECTS)
def test_no_row_of_a_defective_decoder_is_called_rounding(name):
    run = zoo(10, 48, batch=2 if name == "cache_of_another_row" else 1)
    rows = run.audit(DEFECTS[name](run.decoder))
    print(f"{name}: {told(rows)}", rows[0], sep="\n  ")
    assert len(rows) >= 3 and all(row.verdict == "bug" for row in rows)


@pytest.mark.measure
def test_the_smallest_perturbation_that_is_seen():
    run = zoo(10, 48)
    for size in (0.05, 0.02, 0.01, 0.005):
        rows = run.audit(perturbed_layer(run.decoder, size), has_all_rows=True)
        print(f"one layer's weights off by {size:.1%}: {told(rows)}")
