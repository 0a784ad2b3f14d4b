"""Chips and topologies: sizes, one device of a chip, and refusals."""

import dataclasses
import re

import pytest

from spec_jax.planning.chips import CHIPS, Topology
from spec_jax.planning.gpus import GPUS, target_config

SHAPES = [
    ("v5e:2x4", 8, 8),
    ("v5p:4x4x4", 64, 64),
    ("v6e:16x16", 256, 256),
    ("tpu7x:2x2x2", 8, 16),
    ("v4:2x2x1", 4, 4),
    ("h100:8", 8, 8),
    ("h100:2x8", 16, 16),
]


@pytest.mark.parametrize("name, chips, devices", SHAPES)
def test_topology_has_its_chips_and_devices(name, chips, devices):
    topology = Topology.parse(name)
    assert (topology.num_chips, topology.num_devices, topology.name) == (chips, devices, name)


def test_gpus_of_a_host_are_linked_and_those_that_xla_describes_can_be_compiled_for():
    hosts = Topology.parse("h100:2x8")
    assert (hosts.platform, hosts.host_devices) == ("gpu", 8)
    assert "jax_cuda13_plugin" in hosts.compilers
    tpu = Topology.parse("v5e:2x4")
    assert (tpu.platform, tpu.host_devices, tpu.compilers) == ("tpu", 8, ("libtpu",))
    assert not Topology.parse("rtx3090:1").compilers
    for name in GPUS:  # what the vendor publishes and what XLA is told agree
        stated = dict(re.findall(r"(\w+): (\d+)\n", target_config(name)))
        assert int(stated["memory_bandwidth"]) == pytest.approx(CHIPS[name].hbm_bytes_s, rel=0.05)
        assert 1 < int(stated["device_memory_size"]) / CHIPS[name].hbm_bytes < 1.08


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
