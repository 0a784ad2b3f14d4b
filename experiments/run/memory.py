"""The largest memory that a process has held, on the host and on its devices."""

from __future__ import annotations

import pathlib
import re
import sys

_STATUS = pathlib.Path("/proc/self/status")


def peak_bytes() -> int | None:
    """Returns the largest resident size of the process so far.

    None where the system does not tell.
    """
    try:
        found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    try:
        import resource  # Unix has it
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_peaks() -> dict[str, int]:
    """Returns the most bytes in use so far, by device; a CPU device does not tell."""
    import jax  # here: processes without jax ask for the host's memory

    stats = {str(device): device.memory_stats() or {} for device in jax.local_devices()}
    name = "peak_bytes_in_use"
    return {device: int(found[name]) for device, found in stats.items() if name in found}
