"""Heads, modules and trees through ``SpeculativeConfig`` and ``SpeculativeDecoder``."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from support.eagle_heads import CONFIGS, head_of
from support.tiny_models import LLAMA, random_weights

from spec_jax import SpeculativeDecoder
from spec_jax.config import SpeculativeConfig
from spec_jax.drafters.mtp.model import MtpConfig, init_mtp
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.loading import LoadedHead, LoadedModel, load_draft
from spec_jax.models import transformer
from spec_jax.tree import DynamicTree, Tree

TARGET_CONFIG = dataclasses.replace(LLAMA, max_position_embeddings=256)


@pytest.fixture(scope="module")
def target():
    model = transformer.model(TARGET_CONFIG)
    return LoadedModel("tiny", model, random_weights(TARGET_CONFIG), config=TARGET_CONFIG)


def eagle_head(name="eagle-3"):
    return LoadedHead(name, CONFIGS[name], head_of(CONFIGS[name]))


def modules(**changes):
    config = MtpConfig.of_target(TARGET_CONFIG, **changes)
    return LoadedHead("modules", config, init_mtp(config, jax.random.key(0)))


def test_the_config_says_which_tree():
    assert SpeculativeConfig(tree=[2, 1]).tree_shape == Tree((0, 0, 1, 2))
    assert SpeculativeConfig(tree=[2, 1]).num_speculative_tokens == 4
    grown = SpeculativeConfig(num_speculative_tokens=59, tree_depth=6)
    assert grown.tree_shape == DynamicTree(59, 6, 10)
    assert SpeculativeConfig().tree_shape is None


INVALID_VALUES = [
    ({"tree": (2, 1), "num_speculative_tokens": 5}, "is 5; the tree has 4 nodes"),
    ({"tree": (2, 1), "tree_depth": 2}, "name one of them"),
    ({"tree": (2, (1,))}, "children by depth, or nodes by their ranks"),
    ({"tree": "22"}, "tree is '22'"),
    ({"tree": ()}, "children by depth"),
    ({"tree_depth": 0}, "tree.depth is 0"),
    ({"tree_top_k": 4}, "tree.top_k is 4 without tree.depth"),
    ({"speculative_method": "ngram", "tree": (2,)}, "'ngram' drafts chains"),
    ({"tree": [[0], ["a"]]}, "children by depth, or nodes by their ranks"),
    ({"tree": ["3", "2"]}, "children by depth, or nodes by their ranks"),
    ({"num_speculative_tokens": "5", "tree_depth": 2}, "num_speculative_tokens is '5'"),
    ({"num_speculative_tokens": 99, "tree_depth": 2, "tree_top_k": 2}, "have 2 to 6"),
]


@pytest.mark.parametrize(("values", "message"), INVALID_VALUES, ids=str)
def test_a_config_whose_tree_cannot_be_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**values)


def test_parts_that_do_not_fit_are_refused(target):
    refuse = lambda match: pytest.raises(ConfigError, match=match)
    with refuse("'eagle' needs a head; load_draft gives one"):
        SpeculativeDecoder(target, None, SpeculativeConfig("eagle"))
    with refuse("is 'eagle'; the draft modules is for 'mtp'"):
        SpeculativeDecoder(target, modules(), SpeculativeConfig("eagle"))
    with refuse("is 'standalone'; the draft eagle-3 is for 'eagle'"):
        SpeculativeDecoder(target, eagle_head(), SpeculativeConfig())
    with refuse("num_draft is 3, but sequential drafting .* there are 2"):
        config = SpeculativeConfig("mtp", num_speculative_tokens=3)
        SpeculativeDecoder(target, modules(protocol="sequential", num_modules=2), config)
    with refuse("sequential modules draft chains"):
        config = SpeculativeConfig("mtp", tree=(2, 2))
        SpeculativeDecoder(target, modules(protocol="sequential", num_modules=6), config)
    with refuse("rule 'block' accepts chains only; trees need 'residual', 'traversal' or 'match'"):
        config = SpeculativeConfig(tree=(2,), rejection_sampling_strategy="block")
        SpeculativeDecoder(target, target, config)
    with refuse("'ngram' copies tokens; leave the draft tiny out"):
        SpeculativeDecoder(target, target, SpeculativeConfig("ngram"))
    for method in ("ngram", "suffix"):
        config = rf"write SpeculativeDecoder\(target, config=SpeculativeConfig\('{method}'\)\)"
        message = f"'{method}' copies tokens and has no weights to load; {config}"
        with refuse(message):
            SpeculativeDecoder(target, method)
        with refuse(message):
            load_draft(method, target)
    with refuse("31 children .*; the draft's vocabulary has 30"):
        few = dataclasses.replace(target, model=transformer.model(TARGET_CONFIG, num_tokens=30))
        SpeculativeDecoder(few, few, SpeculativeConfig(tree=(31,)))
    head = eagle_head()
    with pytest.raises(WeightsError, match=r"head eagle-3: fc has shape \[16, 16\]; .*\[48, 16\]"):
        fc = head.params["fc"][:16]
        SpeculativeDecoder(target, dataclasses.replace(head, params={**head.params, "fc": fc}))
    with pytest.raises(WeightsError, match="head eagle-3: d2t is missing"):
        without = {name: w for name, w in head.params.items() if name != "d2t"}
        SpeculativeDecoder(target, dataclasses.replace(head, params=without))
    wide = dataclasses.replace(CONFIGS["eagle-1"], target_vocab_size=31)
    other = dataclasses.replace(TARGET_CONFIG, hidden_size=32, head_dim=8)
    model = LoadedModel("wide", transformer.model(other), random_weights(other), config=other)
    with refuse("for a target of width 16 and 31 ids; wide is of width 32 and has 31 ids"):
        SpeculativeDecoder(model, LoadedHead("head", wide, {}))
