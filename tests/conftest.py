"""Shared fixtures, and one compilation cache for every worker and run."""

from __future__ import annotations

import collections
import gc
import importlib.metadata
import json
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

# No test asks the Hugging Face hub: a name that is no directory is refused at once.
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from support import cost, examples  # noqa: E402

from spec_jax import compilation  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"

# Compiled programs are kept between workers and runs. Each jax version keeps its own.
_FOLDER = pathlib.Path(os.environ.get("SPEC_JAX_TEST_CACHE", tempfile.gettempdir()))
_CACHE = _FOLDER / f"spec_jax_test_cache_{jax.__version__}"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_platforms", "cpu")
# Every process has eight devices, for meshes and for overlap. They cost nothing to whom they do not
# concern (measured: the same CPU time), and a test of a mesh is a test as any other.
jax.config.update("jax_num_cpu_devices", 8)


_COSTS = json.loads((ROOT / "tests" / "recorded" / "costs.json").read_text())


_EXAMPLES = pathlib.Path(".hypothesis", "examples")


def _is_searching(config) -> bool:
    """Whether tests by Hypothesis search at random: in the exhaustive tier alone."""
    return config.option.markexpr == "exhaustive"


def pytest_terminal_summary(terminalreporter, config):
    if _is_searching(config):
        terminalreporter.write_line(
            f"Hypothesis searched at random; examples that fail are printed, kept in {_EXAMPLES} "
            "and tried first in the next run."
        )


def pytest_configure(config):
    # A test that is named on the command line runs, whichever tier it belongs to.
    has_default_tier = config.option.markexpr == "not exhaustive and not measure"
    if has_default_tier and any("::" in arg for arg in config.args):
        config.option.markexpr = ""
    name = examples.RANDOM if _is_searching(config) else examples.SAME
    examples.load_profile(name, config.rootpath / _EXAMPLES)
    if os.environ.get("SPEC_JAX_TEST_COSTS"):
        config.pluginmanager.register(cost.Recorder(os.environ["SPEC_JAX_TEST_COSTS"]))


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(config, items):
    named = any("::" in arg for arg in config.args)
    found = collections.defaultdict(set)
    for item in items:
        # They run in both tiers: with the same examples in one, with random ones in the other.
        if _is_searching(config) and hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.exhaustive)
        marker = item.get_closest_marker("representatives")
        if marker is not None:
            name = item.callspec.id
            found[item.nodeid.split("[")[0], marker.args].add(name)
            if name not in marker.args:
                item.add_marker(pytest.mark.exhaustive)
    for (test, ids), names in found.items():
        if not named and not names >= set(ids):
            raise pytest.UsageError(f"{test} has no parameters {sorted(set(ids) - names)}")
    # The most expensive files come first: begun last, one would keep one worker busy alone.
    items.sort(key=lambda item: -_COSTS.get(item.path.name, 0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests run in one worker: what they share is made, and compiled, once."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # by number of tests, which says little
    return LoadFileScheduling(config, log)


@pytest.fixture(scope="module", autouse=True)
def _release_programs_of_the_module():
    """Also those that tests compile themselves, which the package drops last."""
    yield
    compilation.release_programs(12_000)  # the next one may take 30,000 in its default tier


@pytest.fixture(autouse=True)
def _release_programs_of_the_test(request):
    yield
    if request.node.get_closest_marker("exhaustive"):
        compilation.release_programs(30_000)


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
