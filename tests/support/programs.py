"""Compiled programs, kept between workers and runs in one folder outside the clone.

jax finds a program by what it is compiled from: its text, the options, XLA's flags, jaxlib and the
devices. A change of any of them misses. What jax leaves out of that key is in the folder's name:
the version of jax and what the processor can do.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import tempfile

import jax
from jax._src import compilation_cache

MOST_BYTES = 2**30  # the default tier's programs are a twentieth


def root() -> pathlib.Path:
    """The folder of programs, costs and passed commits.

    ``SPEC_JAX_TEST_CACHE`` names it; by default it is ``spec_jax/tests`` in the user's cache, or in
    the folder for temporary files where the user has none that can be written.
    """
    if given := os.environ.get("SPEC_JAX_TEST_CACHE"):
        return pathlib.Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for parent in (cache, tempfile.gettempdir()):
        folder = pathlib.Path(parent, "spec_jax", "tests")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise OSError(f"no folder for compiled programs: {folder} cannot be written")


def folder() -> pathlib.Path:
    """The folder of the programs of this version of jax on this processor."""
    about = {platform.machine(), platform.processor()}
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        keys = ("model name", "flags", "Features", "CPU part")
        about |= {line for line in info.read_text().splitlines() if line.startswith(keys)}
    processor = hashlib.sha256("\n".join(sorted(about)).encode()).hexdigest()[:8]
    return root() / f"jax-{jax.__version__}-{processor}"


def tidy(folder: pathlib.Path, most_bytes: int = MOST_BYTES) -> None:
    """Removes programs that a killed process left half written, and those not read for longest.

    jax does not write a program again whose file exists, so a part of one would be compiled in
    every run. Its own limit of the size looks at every file at each write (0.4 s with 10,000 of
    them); this is once a run. Other runs may write, read and tidy meanwhile: to jax a file that
    vanishes is a miss.
    """
    stamp = folder / "tidied"
    last = stamp.stat().st_mtime if stamp.exists() else 0.0
    folder.mkdir(parents=True, exist_ok=True)
    stamp.touch()
    found = []
    for path in folder.parent.rglob("*-cache"):  # of other versions and processors too
        with contextlib.suppress(FileNotFoundError):
            about = path.stat()
            is_new = path.parent == folder and about.st_mtime >= last
            if is_new and not _is_whole(path.read_bytes()):
                path.unlink()
            else:
                found.append((max(about.st_atime, about.st_mtime), about.st_size, path))
    kept_bytes = 0
    for _, size, path in sorted(found, reverse=True):
        kept_bytes += size
        if kept_bytes > most_bytes:
            path.unlink(missing_ok=True)


def _is_whole(entry: bytes) -> bool:
    try:
        compilation_cache.decompress_executable(entry)
    except Exception:  # by what compresses: an error of its own of zlib or of zstandard
        return False
    return True
