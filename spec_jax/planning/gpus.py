"""NVIDIA GPUs as XLA describes them, to compile for one that is not there.

Source: ``xla/backends/gpu/target_config/specs`` of openxla/xla (``a100_sxm_80``, ``h100_sxm``,
``h200`` and ``b200``), of which these fields are what compiling needs.
"""

from __future__ import annotations

from typing import Any

_ALIKE = """
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
"""
_HOPPER = {
    "fpus_per_core": 128,
    "shared_memory_per_core": 233472,
    "shared_memory_per_block_optin": 232448,
}
_DEVICES = {  # by the names of ``chips.CHIPS``: jax's name, compute capability, fields
    "a100": (
        "NVIDIA A100-SXM4-80GB",
        "major: 8",
        {
            "core_count": 108,
            "fpus_per_core": 64,
            "clock_rate_ghz": 1.41,
            "memory_bandwidth": 2039040000000,
            "device_memory_size": 85100068864,
            "l2_cache_size": 41943040,
            "shared_memory_per_core": 167936,
            "shared_memory_per_block_optin": 166912,
        },
    ),
    "h100": (
        "NVIDIA H100 80GB HBM3",
        "major: 9 feature_extension: ACCELERATED_FEATURES",
        _HOPPER
        | {
            "core_count": 132,
            "clock_rate_ghz": 1.98,
            "memory_bandwidth": 3352320000000,
            "device_memory_size": 84942979072,
            "l2_cache_size": 52428800,
        },
    ),
    "h200": (
        "NVIDIA H200 141GB HBM3e",
        "major: 9 feature_extension: ACCELERATED_FEATURES",
        _HOPPER
        | {
            "core_count": 132,
            "clock_rate_ghz": 1.98,
            "memory_bandwidth": 4800000000000,
            "device_memory_size": 151397597184,
            "l2_cache_size": 52428800,
        },
    ),
    "b200": (
        "NVIDIA B200",
        "major: 10 feature_extension: ACCELERATED_FEATURES",
        _HOPPER
        | {
            "core_count": 148,
            "clock_rate_ghz": 1.965,
            "memory_bandwidth": 7672320000000,
            "device_memory_size": 191514411008,
            "l2_cache_size": 132644864,
        },
    ),
}
GPUS = tuple(_DEVICES)
"""The GPUs that can be compiled for, by the names of ``chips.CHIPS``."""


def target_config(name: str) -> str:
    """Returns a GPU's ``GpuTargetConfigProto`` as text; ``name`` is one of ``GPUS``."""
    device, capability, fields = _DEVICES[name]
    lines = "\n".join(f"  {field}: {value}" for field, value in fields.items())
    return f"""gpu_device_info {{{_ALIKE}{lines}
  cuda_compute_capability {{ {capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{device}"
"""


def describe(name: str, num_hosts: int, host_devices: int) -> Any:
    """Returns JAX's description of the devices of some hosts.

    Args:
      name: one of ``GPUS``.
      num_hosts: how many hosts there are.
      host_devices: GPUs of each.
    """
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=target_config(name),
        topology=f"1x{num_hosts}x{host_devices}",
    )
