"""The largest memory that a process has held, on the host and on its devices."""

from __future__ import annotations

import pathlib
import re

_STATUS = pathlib.Path("/proc/self/status")
_REFERENCES = pathlib.Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # what Linux takes there for "begin the largest resident size anew"


def reset_peak() -> None:
    """Begins the host's peak anew; does nothing where the system cannot."""
    try:
        _REFERENCES.write_text(_RESET_PEAK)
    except OSError:
        pass


def peak_bytes() -> int | None:
    """Returns the largest resident size of the process since ``reset_peak``.

    None where the system does not tell.
    """
    try:
        found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def device_peaks() -> dict[str, int]:
    """Returns the most bytes in use so far, by device; a CPU device does not tell."""
    import jax  # here: processes without jax ask for the host's memory

    stats = {str(device): device.memory_stats() or {} for device in jax.local_devices()}
    name = "peak_bytes_in_use"
    return {device: int(found[name]) for device, found in stats.items() if name in found}
