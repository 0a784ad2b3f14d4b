"""Heads that begin with the target's last layer."""

import dataclasses

import jax
import numpy as np
import pytest
from support.tiny_models import LLAMA, QWEN2, random_weights

from spec_jax.drafters.common.warm_start import from_target
from spec_jax.drafters.eagle.model import EagleConfig, init_head
from spec_jax.drafters.mtp.model import MtpConfig, init_mtp

KEY = jax.random.key(0)


@pytest.mark.representatives("own head")
@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["own head", "tied"])
def test_last_layer_norm_and_output_head_are_the_targets(config):
    target = random_weights(config)
    last = target["layers"]["1"]
    ids = np.asarray([1, 4, 30])
    head = init_head(EagleConfig.of_target(config, 3, 3), KEY)
    del head["d2t"]
    warm = from_target(head, target, config, ids)
    output = target["head"] if "head" in target else target["embed"].T
    np.testing.assert_array_equal(warm["head"], output[:, ids])
    np.testing.assert_array_equal(warm["norm"], target["final_norm"])
    D = config.hidden_size
    for name in ("q", "k", "v"):
        np.testing.assert_array_equal(warm[name][D:], last[name])
        np.testing.assert_array_equal(warm[name][:D], head[name][:D])
    for name in ("o", "gate", "up", "down", "mlp_norm"):
        np.testing.assert_array_equal(warm[name], last[name])
    np.testing.assert_array_equal(warm["fc"], head["fc"])
    assert {n: w.shape for n, w in warm.items()} == {n: w.shape for n, w in head.items()}


def test_stacked_layers_give_the_same():
    config = dataclasses.replace(LLAMA, scan_layers=True)
    apart, stacked = random_weights(LLAMA), random_weights(config)
    module = init_mtp(MtpConfig.of_target(LLAMA), KEY)["0"]
    found = [from_target(module, w, c) for w, c in ((apart, LLAMA), (stacked, config))]
    jax.tree.map(np.testing.assert_array_equal, *found)
    norm = apart["layers"]["1"]["attention_norm"]
    np.testing.assert_array_equal(found[0]["attention_norm"], norm)
