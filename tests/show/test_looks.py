"""Short texts, coloured tokens and plots show what the record says, escaped and bounded."""

import sys

import matplotlib
import numpy as np
import pytest
from IPython.core.formatters import format_display_data
from support.chat_templates import byte_level
from support.html_page import Page

import spec_jax
from spec_jax import testing
from spec_jax.config import TreeConfig
from spec_jax.decoding import Kind
from spec_jax.engine.generation import Trace
from spec_jax.engine.stats import row_stats
from spec_jax.errors import ConfigError
from spec_jax.show import page
from spec_jax.show.summary import count_text

LONGEST = 300
F, A, C, B = Kind.FIRST, Kind.ACCEPTED, Kind.CORRECTED, Kind.BONUS
KINDS, OFFERED = [F, A, C, A, A, B, C], [-1, 2, -1, 2, -1, -1, 1]
EXPECTED = np.asarray([np.nan, 0.25, 0.5, 1, 1, np.nan, 0.125])


@pytest.fixture(autouse=True)
def off_screen():
    matplotlib.use("Agg")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


def generation(tokenizer, ids, kinds, offered, rejected, expected=None):
    stats = row_stats(np.asarray(kinds), np.asarray(offered), 2, expected)
    names = tuple(Kind(kind).name.lower() for kind in kinds)
    expected = () if expected is None else tuple(expected)
    trace = Trace(names, tuple(offered), tuple(rejected), expected, (0,), tokenizer)
    text = None if tokenizer is None else tokenizer.decode(ids)
    return spec_jax.Generation(text, tuple(ids), "length", stats, trace)


def without_tokenizer():
    return generation(None, range(7), KINDS, OFFERED, [-1, -1, 9, -1, -1, -1, 8])


def test_every_repr_is_short_and_names_what_it_is():
    target = spec_jax.load_model("zoo/target")
    head = spec_jax.load_draft("zoo/eagle3", target)
    many = tuple((i, 1.0) for i in range(1000))
    shown = {
        "zoo/target": target,
        "zoo/eagle3": head,
        "rule greedy": spec_jax.SpeculativeDecoder(target, head),
        "mesh data:2,tensor:1": testing.mock_model(4).on_mesh("data:2"),
        "one token a pass": spec_jax.SpeculativeDecoder(target),
        "tree=": spec_jax.SpeculativeConfig("eagle", tree=TreeConfig((3, 2, 1))),
        "logit_bias": spec_jax.SamplerConfig(logit_bias=many),
        "SamplerConfig(temperature=0.0, top_k=3)": spec_jax.SamplerConfig(top_k=3),
        "hidden_size=256": target.config,
        "version=3": head.config,
        "tokens 7": without_tokenizer(),
        "rounds 3": without_tokenizer().stats,
    }
    for name, one in shown.items():
        assert name in repr(one) and len(repr(one)) <= LONGEST, repr(one)
    for one in (target, head, shown["rule greedy"], shown["rounds 3"]):
        assert len(Page(one._repr_html_()).tags) > 6
    texts = ["999", "10.0k", "97.2k", "1.00M", "1.47M", "8.03B"]
    numbers = (999, 9_999, 97_246, 999_999, 1_470_000, 8_030_261_248)
    assert list(map(count_text, numbers)) == texts


def test_pieces_join_to_the_text_also_where_tokens_split_characters(tokenizer):
    text = "a 数🙂 café\n\n  <b>&amp;</b> ñandú ☃"
    ids = [*tokenizer.encode(text)[1:], tokenizer.token_id("</s>")]
    assert len(ids) > len(text) - 8, "some of its characters are several tokens"
    trace = Trace((), (), (), (), (0,), tokenizer)
    pieces = trace.pieces(ids)
    assert "".join(pieces) == text and "" in pieces and not any("\ufffd" in p for p in pieces)


def test_html_has_each_token_in_its_kind_and_rejected_drafts_struck_out(tokenizer):
    of = lambda text: tokenizer.encode(text)[1:]
    ids = [of(c)[0] for c in "<a&\n b"] + [tokenizer.token_id("</s>")]
    rejected = [-1, -1, of("x")[0], -1, -1, -1, of(">")[0]]
    found = generation(tokenizer, ids, KINDS, OFFERED, rejected, EXPECTED)._repr_html_()
    read = Page(found)
    assert not {"script", "style", "link", "img", "b", "s"} & set(read.tags)
    assert read.struck == ["x", ">"]
    assert read.text.endswith("<a&↵\n·b</s>"), "escaped; blanks are visible; special tokens named"
    assert found.startswith('<div class="tex2jax_ignore">'), "dollar signs are no formula"
    for kind, count in {"first": 1, "accepted": 3, "corrected": 2, "bonus": 1}.items():
        assert f"{kind} {count}" in read.text
    assert "round 1, draft 1 of 2, accepted with probability 0.25" in found
    plain = generation(tokenizer, ids[:3], [F, B, B], [-1, 0, 0], [-1] * 3)
    assert "target 2" in Page(plain._repr_html_()).text, "no bonus: nothing was drafted"
    long = [page.Token("ab", "bonus", "")] * (page.MAX_TOKENS + 1234)
    assert "1,234 tokens more" in Page(page.tokens(long, "")).text


def test_plots_show_what_the_record_says():
    found = generation(None, range(7), KINDS, OFFERED, [-1] * 7, EXPECTED)
    (axis,) = found.plot().axes
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axis.containers}
    assert heights["accepted drafts"] == [1, 2, 0] and heights["bonus"] == [0, 1, 0]
    assert heights["corrected"] == heights["drafts that were dropped"] == [1, 0, 1]
    axes = found.stats.plot().axes
    shown = format_display_data(axes[0].figure)
    assert shown[0]["image/png"] and "accepted, if reached" in shown[1]["image/png"]["alt"]
    points, _, (bars,) = axes[0].containers[0]
    np.testing.assert_allclose(points.get_ydata(), found.stats.acceptance_by_position)
    np.testing.assert_allclose(axes[0].lines[-1].get_ydata(), found.stats.expected_by_position)
    assert [bar.get_height() for bar in axes[1].patches] == [1, 1, 1]
    with pytest.raises(ConfigError, match="axes are 1; this plot has 2 panels"):
        found.stats.plot(axes[0])


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        without_tokenizer().plot()


def test_nothing_to_show_is_shown_as_nothing():
    assert "tokens 0" in repr(spec_jax.Stats()) and Page(spec_jax.Stats()._repr_html_())
    empty = spec_jax.Generation("", (), "cancelled", spec_jax.Stats(), None)
    assert "cancelled" in Page(empty._repr_html_()).text
    with pytest.raises(ConfigError, match="no trace"):
        empty.plot()
    nothing = generation(None, [], [], [], [])
    assert Page(nothing._repr_html_()) and len(nothing.plot().axes) == 1
