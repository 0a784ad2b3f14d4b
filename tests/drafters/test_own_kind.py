"""A drafter kind that is registered from outside of the package is a kind like any other."""

import jax
import numpy as np
import pytest
from support import block_heads, block_kind, gate_kind
from support.files import experiment_files
from support.tiny_models import LLAMA

from spec_jax import SpeculativeConfig, load_draft, load_model
from spec_jax.drafters import register, registry
from spec_jax.errors import ConfigError
from spec_jax.evaluation import costs
from spec_jax.loading import random_head


@pytest.fixture(scope="module", autouse=True)
def registered():
    register(block_kind.KIND)
    yield register(gate_kind.KIND)
    registry.unregister("gate")
    registry.unregister("block")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, a head of random weights, texts to train on and prompts."""
    folder = tmp_path_factory.mktemp("files")
    head = random_head(gate_kind.new(experiment_files(folder, LLAMA)), jax.random.key(1))
    head.save(folder / "head", load_model(folder / "target"))
    return folder


@pytest.fixture(scope="module")
def target(files):
    return load_model(files / "target")


def test_it_is_found_read_and_written(files, target, tmp_path):
    head = load_draft(files / "head", target)
    assert head.method == "gate" and head.config == gate_kind.new(target.config)
    assert head.name == str(files / "head") and head.num_params == 2 * 32 * 16
    head.check_params()
    head.save(tmp_path, target)
    again = load_draft(tmp_path, target, method="gate")
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)
    registry.unregister("gate")
    with pytest.raises(ConfigError, match="known kinds: standalone, eagle, peagle, mtp"):
        load_draft(files / "head", target)
    with pytest.raises(ConfigError, match="speculative_method is 'gate'; expected one of stand"):
        SpeculativeConfig("gate")
    register(gate_kind.KIND)


def test_all_passes_of_a_block_in_one_are_timed_together(target):
    head = block_heads.make_head(block_heads.new(LLAMA.hidden_size, LLAMA.vocab_size, (1, 3)))
    wanted = costs.timer_makers(target, {"block": head}, {"block": {2, 5}}, 64, 1)
    passes = [costs.TimedLoop("target", k) for k in (0, 2, 5)]
    assert [*wanted] == [*passes, costs.TimedLoop("block", 2, 2), costs.TimedLoop("block", 5, 2)]
    times = {what: np.full(4, 2.0 + what.num_passes * what.num_draft) for what in wanted}
    found = costs.Costs.of_times(times, slots=64, batch=1)
    assert found.first_ms == {"block": {2: 4.0, 5: 10.0}}
    assert found.draft_cost("block", 5) == 10 / 5 / 2 and found.is_significant("block")
