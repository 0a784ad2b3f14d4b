"""A drafter and a rule of one's own in the experiments, by the lines that the documents show."""

import pathlib
import re

import pytest
from support.pairs import tiny_pair

from configs import decode_default
from experiments.comparison.setup import Setup
from spec_jax import SpeculativeConfig
from spec_jax.contracts import DraftShape
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.errors import ConfigError
from spec_jax.evaluation.cells import make_cells
from spec_jax.rules import make_rule
from spec_jax.testing import mock_model
from spec_jax.tree import Tree

ROOT = pathlib.Path(__file__).resolve().parents[2]


def shown(page, program):
    """The parts of one's own that a document's command lines of a program name."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    lines = re.findall(rf"^python -m {program}\b(.*)$", text, re.MULTILINE)
    return dict(re.findall(r"--(?:config\.)?(drafter|rule)[= ](docs\S+)", " ".join(lines)))


OWN = {"drafter": "docs.examples.my_drafter:make", "rule": "docs.examples.my_rule:rule"}


@pytest.mark.parametrize("program", ["spec_jax", "experiments.decode", "experiments.evaluate"])
def test_the_documents_show_these_lines(program):
    drafter, rule = shown("write_a_drafter.md", program), shown("write_a_rule.md", program)
    assert drafter == {"drafter": OWN["drafter"]} and rule == {"rule": OWN["rule"]}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("own"))


def of(module, pair, **changes):
    config = module.get_config()
    config.update({"target": str(pair / "target"), "num_prompts": 2, "max_new_tokens": 8})
    config.update(changes)
    return config


def test_own_parts_are_rows_at_every_k_and_temperature(pair):
    setup = Setup.of(of(decode_default, pair, ks=(1, 3), drafts="ngram", **OWN))
    cells = [cell for group in setup.cells.values() for cell in group if not cell.is_plain]
    rows = [(c.method, c.k, c.temperature, c.rule) for c in cells]
    assert rows == [
        (method, k, temperature, rule)
        for temperature in (0.0, 1.0)
        for method, usual in (("ngram", "match"), ("bigrams", "residual"))
        for rule in ("greedy" if temperature == 0 else usual, "coin")
        for k in (1, 3)
    ]
    bench = setup.bench([[0]], 1, [[0]])
    for cell in cells:
        config = bench.decoder(cell).config
        named = (config.speculative_method, config.rejection_sampling_strategy)
        assert named == (cell.method, cell.rule)
    given = [facts["given"] for facts in setup.custom.values()]
    assert given == [OWN["drafter"], OWN["rule"]]


def cells_of(rule, drafts, temperatures=(0.0, 1.0), trees=()):
    cells = make_cells(
        drafts, dict.fromkeys(drafts, (3,)), temperatures, trees=trees, custom_rule=rule
    )
    return [(c.method, c.tree, c.temperature) for c in cells if c.rule == rule.name]


def test_a_rule_is_used_where_it_can_serve():
    rule = make_rule(SpeculativeConfig("standalone", 2, "block"))._replace(name="mine")
    both = {"ngram": None, "standalone": mock_model(5)}
    of = lambda *args, **flags: cells_of(rule._replace(**flags), both, *args)
    assert cells_of(rule, both, trees=("2x1",)) == [(m, None, t) for t in (0.0, 1.0) for m in both]
    assert of(needs_logits=True) == [("standalone", None, t) for t in (0.0, 1.0)]
    assert of(is_greedy=True) == [(m, None, 0.0) for m in both]
    trees = of((1.0,), ("2x1",), has_trees=True)
    assert trees == [("ngram", None, 1), ("standalone", None, 1), ("standalone", "2x1", 1)]
    with pytest.raises(ConfigError, match="'mine' can accept no draft .* it needs temperature 0"):
        of((1.0,), is_greedy=True)
    shape = DraftShape(tree=Tree.branching((2, 1)))
    branched = NO_DRAFT._replace(name="own", shape=shape)
    found = cells_of(rule._replace(has_trees=True), {"own": branched}, (1.0,))
    assert found == [("own", "of 4 nodes", 1.0)]
