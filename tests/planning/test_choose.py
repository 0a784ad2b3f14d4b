"""Meshes of a topology, and the options that the roofline ranks."""

import pytest

from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.engine.adaptive.policy import expected_tokens
from spec_jax.meshes import parse_mesh
from spec_jax.planning.chips import Topology
from spec_jax.planning.choose import meshes, options
from spec_jax.planning.presets import PRESETS
from spec_jax.planning.roofline import Setting, best, memory, round_work

TARGET = PRESETS["llama-3.1-8b"]
HEAD = EagleConfig.of_target(TARGET, draft_vocab_size=32000)
TOKENS = expected_tokens([0.75] * 5)


def test_meshes_use_all_devices_and_divide_heads_and_rows():
    assert meshes(TARGET, Topology.parse("v5e:2x4"), 4) == [
        "data:4,tensor:2",
        "data:2,tensor:4",
        "data:1,tensor:8",
    ]
    # 64 devices are more than the 32 query heads, and one row has to be somewhere.
    found = meshes(TARGET, Topology.parse("v5p:4x4x4"), 1)
    assert [parse_mesh(mesh)["tensor"] for mesh in found] == [1, 2, 4, 8, 16, 32]
    assert meshes(TARGET, Topology.parse("tpu7x:2x2x1"), 1) == ["data:1,tensor:8"]
    # Between hosts GPUs have slower links.
    found = meshes(TARGET, Topology.parse("h100:2x8"), 16)
    assert [parse_mesh(mesh)["tensor"] for mesh in found] == [1, 2, 4, 8]
    # Five rows are divided by no part of eight devices but one.
    assert meshes(TARGET, Topology.parse("v5e:2x4"), 5) == ["data:1,tensor:8"]


def test_options_are_each_meshs_best_and_those_that_fit_come_first():
    topology, setting = Topology.parse("v5e:2x4"), Setting(batch=8, context=2048)
    found = options(TARGET, HEAD, TOKENS, topology, setting)
    assert {o.setting.mesh for o in found} == set(meshes(TARGET, topology, 8))
    for option in found:
        assert option.prediction == best(TARGET, HEAD, TOKENS, topology.chip, option.setting)
        assert option.memory == memory(TARGET, HEAD, option.setting)
    fitting = [o for o in found if not o.shortfall]
    assert found[: len(fitting)] == fitting and 0 < len(fitting) < len(found)
    assert fitting[0].tok_s == max(o.tok_s for o in fitting)
    # 16 GB of weights do not fit one chip of 16 GB beside a cache.
    worst = found[-1]
    assert worst.setting.mesh == "data:8,tensor:1"
    assert worst.shortfall == worst.memory.total - topology.chip.hbm_bytes > 0


def test_speeds_are_shared_among_rows_and_chips():
    (option,) = options(TARGET, None, [1.0], Topology.parse("tpu7x:2x2x1"), Setting(batch=1))
    assert option.row_tok_s == option.tok_s == 4 * option.chip_tok_s
    floor = round_work(TARGET, setting=option.setting).floor_s(option.topology.chip)
    assert option.tok_s == pytest.approx(1 / floor)
    assert option.memory == memory(TARGET, None, option.setting)
