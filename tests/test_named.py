"""Rules and drafters of your own by name: what is found, and what is said where nothing is."""

import sys

import pytest

from spec_jax import SpeculativeConfig, SpeculativeDecoder, named
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Drafter, Rule
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.errors import ConfigError
from spec_jax.rules import make_rule
from spec_jax.testing import mock_model

SOURCE = """
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.rules import make_rule
from spec_jax import SpeculativeConfig

RULE = make_rule(SpeculativeConfig("standalone", 2, "block"))._replace(name="mine")
def rule(): return RULE
def accept_row(target, proposal, noise): ...
def nothing(): return None
DRAFTER = NO_DRAFT._replace(name="copy")
def make(target): return NO_DRAFT._replace(name="copy", vocab_size=target.model.vocab_size)
def loaded(target): return target
class Parts:
    make = staticmethod(make)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A current directory with a module of the user's, which is not on Python's path."""
    (tmp_path / "own_parts.py").write_text(SOURCE)
    (tmp_path / "own_broken.py").write_text("x = 1\nimport no_such_package\n")
    (tmp_path / "own_typo.py").write_text("def make(target:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    for name in ("own_parts", "own_broken", "own_typo"):
        sys.modules.pop(name, None)


def test_a_module_of_the_current_directory_gives_its_rules_and_drafters():
    target = mock_model(5)
    assert named.to_rule("own_parts:RULE") is named.to_rule("own_parts:rule")
    assert isinstance(named.to_rule("own_parts:RULE"), Rule)
    assert named.to_drafter("own_parts:make", target).vocab_size == 5
    assert isinstance(named.to_drafter("own_parts:Parts.make", target), Drafter)
    assert named.to_drafter("own_parts:DRAFTER", target).name == "copy"
    assert named.to_drafter(NO_DRAFT, target) is NO_DRAFT
    assert named.to_rule("block") is make_rule(SpeculativeConfig("standalone", 2, "block"))


RULES = [
    ("blok", r"rule is 'blok' \(did you mean block\?\); expected module:NAME, or one of greedy"),
    ("own_parts.py:RULE", "expected module:NAME as in an import, such as my_rule:rule"),
    ("no_such:RULE", "there is no module 'no_such' in .*or on Python's path"),
    ("own_broken:RULE", "ModuleNotFoundError: No module named 'no_such.*broken.py:2"),
    ("own_typo:RULE", "importing own_typo failed: SyntaxError"),
    ("own_parts:RULES", r"own_parts.py has no name 'RULES' \(did you mean RULE\?\)"),
    ("own_parts:nothing", "own_parts:nothing returned an object of type NoneType"),
    ("own_parts:accept_row", r"arguments \(target, proposal, noise\).*batched\(function\)"),
    ("own_parts:DRAFTER", "rule own_parts:DRAFTER is of type Drafter; expected a Rule"),
]


DRAFTERS = [
    ("ngram", "expected module:NAME as in an import, such as my_drafter:make"),
    ("own_parts:rule", r"takes other arguments \(\); expected a Drafter, or .*make\(target\)"),
    ("own_parts:loaded", "of type LoadedModel; .*; give models and heads as draft="),
    (lambda target: 3, "lambda.* returned an object of type int; expected a Drafter"),
    (NO_DRAFT._replace(memory=True), "memory of drafter .* is True; expected a .*UpdateCount"),
    (NO_DRAFT._replace(shape=(1,)), r"shape of drafter .* is \(1,\); expected a DraftShape"),
]


REFUSED = [(named.to_rule, *row) for row in RULES]
REFUSED += [
    (lambda part: SpeculativeDecoder(mock_model(5), drafter=part), *row) for row in DRAFTERS
]


@pytest.mark.parametrize("take, part, message", REFUSED)
def test_what_is_no_rule_or_no_drafter_is_refused(take, part, message):
    with pytest.raises(ConfigError, match=message):
        take(part)


def test_the_decoders_config_names_what_really_drafts_and_accepts():
    target, own = mock_model(5), NO_DRAFT._replace(name="copy")
    rule = make_rule(SpeculativeConfig("standalone", 2, "block"))._replace(name="mine")
    config = SpeculativeConfig(num_speculative_tokens=3)
    hot = SamplerConfig(temperature=1.0)
    options = {"drafter": lambda target: own, "target_sampler": hot}
    decoder = SpeculativeDecoder(target, config=config, rule=rule, **options)
    found = decoder.config
    assert (found.speculative_method, found.rejection_sampling_strategy) == ("copy", "mine")
    assert found.num_speculative_tokens == 3 and "'mine'" in repr(found)
    assert config.rejection_sampling_strategy is None  # what was given is what it was
    assert SpeculativeDecoder(target, **options).config.rejection_sampling_strategy == "match"
    again = SpeculativeDecoder(target, config=found, rule=rule, **options)
    assert again.config == found
    with pytest.raises(ConfigError, match="unknown rule 'mine'; pass your own as rule="):
        SpeculativeDecoder(target, config=found, **options)
    with pytest.raises(ConfigError, match="no drafter kind 'copy'"):
        SpeculativeDecoder(target, config=found, rule=rule, target_sampler=hot)
