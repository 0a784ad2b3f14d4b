"""Shared fixtures, and one compilation cache for every worker and run."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import pathlib
import tempfile

# Most of a run is compilation: code that runs for seconds needs no optimising, and pytest's
# workers keep the cores busy without XLA's own. XLA_FLAGS that are given count, empty ones too:
# CI runs a core of the tests with what users have.
_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jax").startswith("0.10."):  # newer ones do not know it
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"  # halves a run
os.environ.setdefault("XLA_FLAGS", _FLAGS)
# Tracing makes many objects and hardly any cycles; looking for them took a tenth of a run.
gc.set_threshold(100_000, 20, 20)

import jax  # noqa: E402
import pytest  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"

# Compiled programs are kept between workers and runs. Each jax version keeps its own.
_CACHE = pathlib.Path(
    os.environ.get("SPEC_JAX_TEST_CACHE", tempfile.gettempdir())
) / f"spec_jax_test_cache_{jax.__version__}"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_platforms", "cpu")


# Files of a minute or more come first: begun last, one would keep one worker busy alone.
_LONG = frozenset(
    f"test_{name}.py"
    for name in (
        "benchmark", "certificate", "decode", "eagle", "equality_real", "decode_experiment",
        "memory", "mtp", "overlap", "queue", "runner", "state_space", "train_head", "train_heads",
        "train_lm", "tree", "zoo",
    )
)  # fmt: skip


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in _LONG)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests run in one worker: what they share is made, and compiled, once."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # by number of tests, which says little
    return LoadFileScheduling(config, log)


_MAPS = pathlib.Path("/proc/self/maps")


@pytest.fixture(scope="module", autouse=True)
def _release_programs():
    """Frees compiled programs where they are many: each holds dozens of memory maps, and a process
    has a limited number of them (65,530 on Linux), beyond which compiling ends in a crash. One
    module takes up to 30,000."""
    yield
    if not _MAPS.exists() or _MAPS.read_bytes().count(b"\n") > 12_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """Real inputs that do not ship with the project."""
    if not DATA.is_dir():
        pytest.skip(f"real inputs are not at {DATA.name} beside the project")
    return DATA


@pytest.fixture(scope="session")
def stories(data_dir):
    """A real trained Llama of 260K parameters."""
    import spec_jax

    return spec_jax.load_model(data_dir / "models" / "stories260K")
