"""Chips and topologies: sizes, one device of a chip, and refusals."""

import dataclasses

import pytest

from spec_jax.planning.chips import CHIPS, Topology

SHAPES = [
    ("v5e:2x4", 8, 8),
    ("v5p:4x4x4", 64, 64),
    ("v6e:16x16", 256, 256),
    ("tpu7x:2x2x2", 8, 16),
    ("v4:2x2x1", 4, 4),
    ("h100:8", 8, 8),
]


@pytest.mark.parametrize("name, chips, devices", SHAPES)
def test_topology_has_its_chips_and_devices(name, chips, devices):
    topology = Topology.parse(name)
    assert (topology.num_chips, topology.num_devices, topology.name) == (chips, devices, name)


def test_devices_of_a_chip_share_its_figures():
    chip = CHIPS["tpu7x"]
    device = chip.per_device
    assert device.devices == 1
    for field in ("hbm_bytes", "hbm_bytes_s", "flops_s", "link_bytes_s"):
        assert chip.devices * getattr(device, field) == getattr(chip, field)
    assert CHIPS["v5p"].per_device == CHIPS["v5p"]


def test_pods_agree_with_the_published_sums():
    # Google also publishes pods: 256 chips of v6e reach 234.9 PFLOP/s, of v5e 50.63.
    for name, pflops in (("v6e", 234.9), ("v5e", 50.63)):
        pod = 256 * CHIPS[name].flops_s / 1e15
        assert pod == pytest.approx(pflops, rel=5e-3)
    for chip in CHIPS.values():
        assert all(value for value in dataclasses.asdict(chip).values()), chip.name
