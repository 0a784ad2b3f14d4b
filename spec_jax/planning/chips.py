"""Published figures of accelerators, and the shapes in which TPUs are rented.

Figures are those of the vendor's page named in ``Chip.source``: dense bfloat16, without sparsity.
They are peaks, which no program reaches.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

from spec_jax.errors import ConfigError
from spec_jax.planning.gpus import GPUS, describe

_GB = 10**9
_GIB = 2**30
_TERA = 10**12
_CLOUD = "https://docs.cloud.google.com/tpu/docs"

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak figures of one chip, or of one device of it (see ``per_device``).

    Attributes:
      name: as topologies begin, such as "v5e".
      hbm_bytes: its memory.
      hbm_bytes_s: bytes a second between the memory and the cores.
      flops_s: floating-point operations a second in bfloat16; a multiply-add counts as two.
      link_bytes_s: bytes a second that leave the chip over all of its links to other chips. Zero
        if no link is published.
      source: where the figures are published.
      shapes: the topologies of up to 256 chips.
      devices: how many devices JAX shows for a chip.
    """

    name: str
    hbm_bytes: float
    hbm_bytes_s: float
    flops_s: float
    link_bytes_s: float
    source: str
    shapes: tuple[str, ...]
    devices: int = 1

    @property
    def per_device(self) -> Chip:
        """The share of one device, where a chip shows several; otherwise the chip itself.

        The path between the two devices of a chip is not counted.
        """

        def share(figure):
            return figure / self.devices

        return dataclasses.replace(
            self,
            devices=1,
            hbm_bytes=share(self.hbm_bytes),
            flops_s=share(self.flops_s),
            hbm_bytes_s=share(self.hbm_bytes_s),
            link_bytes_s=share(self.link_bytes_s),
        )


_HOSTS = ("1", "2", "4", "8", "2x8", "4x8", "8x8")  # GPUs of a host, or hosts of eight


def _gpu(name, gb, gb_s, tflops, link_gb_s, source, shapes=_HOSTS) -> Chip:
    figures = gb * _GB, gb_s * _GB, tflops * _TERA, link_gb_s * _GB
    return Chip(name, *figures, f"NVIDIA {source}", shapes)


# Google publishes inter-chip bandwidth in both directions together (1,200 GB/s for v5p, whose
# older page says 4,800 Gb/s in one), NVIDIA likewise that of NVLink: a half leaves the chip.
_CHIPS = (
    # The page has no inter-chip figure; six links of 50 GB/s are from Jouppi et al., "TPU v4",
    # arXiv 2304.01433. JAX shows one device a chip on a Cloud TPU ("megacore").
    Chip("v4", 32 * _GIB, 1200 * _GB, 275 * _TERA, 300 * _GB, f"{_CLOUD}/v4", _CUBIC),
    Chip("v5e", 16 * _GB, 819 * _GB, 197 * _TERA, 200 * _GB, f"{_CLOUD}/v5e", _FLAT),
    Chip("v5p", 95 * _GIB, 2765 * _GB, 459 * _TERA, 600 * _GB, f"{_CLOUD}/v5p", _CUBIC),
    Chip("v6e", 32 * _GB, 1638 * _GB, 918 * _TERA, 400 * _GB, f"{_CLOUD}/v6e", _FLAT),
    # Two TensorCores, each with its half of the memory, are two devices: same page.
    Chip("tpu7x", 192 * _GIB, 7380 * _GB, 2307 * _TERA, 600 * _GB, f"{_CLOUD}/tpu7x", _CUBIC, 2),
    _gpu("a100", 80, 2039, 312, 300, "A100 datasheet, column A100 80GB SXM"),
    _gpu("a100-40gb", 40, 1555, 312, 300, "A100 datasheet of 2020, column A100 40GB SXM"),
    # Without an NVLink bridge.
    _gpu("a100-pcie", 80, 1935, 312, 32, "A100 datasheet, column A100 80GB PCIe"),
    # Without sparsity, as all below.
    _gpu("h100", 80, 3350, 989.4, 450, "H100 datasheet, column H100 SXM"),
    _gpu("h200", 141, 4800, 989.4, 450, "H200 datasheet, column H200 SXM"),
    _gpu("b200", 180, 8000, 2250, 900, "HGX B200 datasheet, one of eight"),
    # Bfloat16 summed in float32, NVLink bridge.
    _gpu("rtx3090", 24, 936, 71, 56, "GA102 whitepaper, GeForce RTX 3090", ("1", "2")),
)
CHIPS: dict[str, Chip] = {chip.name: chip for chip in _CHIPS}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips that are connected to each other.

    Attributes:
      chip: of which kind.
      shape: chips along each dimension of their network; of GPUs those of a host, or hosts and
        GPUs of each.
    """

    chip: Chip
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> Topology:
        """Reads a name such as ``v5e:2x4`` or, for GPUs, ``h100:8`` and ``h100:2x8``.

        Raises:
          ConfigError: there is no such chip, or it is not offered in this shape.
        """
        kind, _, shape = name.partition(":")
        if kind not in CHIPS:
            raise ConfigError(
                f"topology is {name!r}; expected a chip and a shape, such as v5e:2x4; known "
                f"chips: {', '.join(CHIPS)}"
            )
        chip = CHIPS[kind]
        if shape not in chip.shapes:
            raise ConfigError(f"topology is {name!r}; shapes of {kind}: {', '.join(chip.shapes)}")
        return cls(chip, tuple(int(size) for size in shape.split("x")))

    @property
    def name(self) -> str:
        """The name that ``parse`` reads."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """The devices that JAX shows."""
        return self.num_chips * self.chip.devices

    @property
    def host_devices(self) -> int:
        """The devices that are linked as ``Chip.link_bytes_s`` says: of GPUs those of a host."""
        return self.num_devices if self.platform == "tpu" else self.shape[-1]

    @property
    def platform(self) -> str:
        """As jax names it: "tpu" or "gpu"."""
        return "tpu" if self.chip.source.startswith(_CLOUD) else "gpu"

    @property
    def compilers(self) -> tuple[str, ...]:
        """Modules of which one is needed to compile for it; none if it cannot be compiled for."""
        if self.platform == "tpu":
            return ("libtpu",)
        return ("jax_cuda13_plugin", "jax_cuda12_plugin") if self.chip.name in GPUS else ()

    @property
    def missing_compiler(self) -> str | None:
        """What to install before it can be compiled for; None if nothing is missing."""
        if not self.compilers or any(map(importlib.util.find_spec, self.compilers)):
            return None
        extra = {"tpu": "tpu", "gpu": "plan-gpu"}[self.platform]
        return (
            f"{self.compilers[0]} is not installed, which compiles for {self.name}: "
            f"pip install 'spec_jax[{extra}]'"
        )

    def describe(self) -> Any:
        """Returns JAX's description of the devices, for compiling without them.

        For TPUs it needs libtpu, which the extra ``tpu`` installs, and for GPUs jax's plugin, but
        not CUDA: the extra ``plan-gpu``.

        Raises:
          ConfigError: it cannot be compiled for, or what compiles for it is not installed.
        """
        from jax.experimental import topologies

        if not self.compilers:
            raise ConfigError(
                f"topology is {self.name!r}; only TPUs and {', '.join(GPUS)} can be compiled for"
            )
        if self.missing_compiler is not None:
            raise ConfigError(self.missing_compiler)
        if self.platform == "gpu":
            return describe(self.chip.name, self.num_chips // self.host_devices, self.host_devices)
        options: dict[str, Any] = {}
        if self.chip.name == "v4":
            options = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}
        if self.num_chips == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        return topologies.get_topology_desc(platform="tpu", topology_name=self.name, **options)
