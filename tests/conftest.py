"""Shared fixtures, kept programs, what runs in turn, and the order of the work."""

from __future__ import annotations

import collections
import gc
import importlib.metadata
import os
import pathlib

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
from support import cost, examples, programs, turns  # noqa: E402

from spec_jax import compilation  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"

jax.config.update("jax_compilation_cache_dir", str(programs.folder()))
# All of them: most are small, and reading one takes a fifth of the time of compiling it.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_platforms", "cpu")
# Every process has eight devices, for meshes and for overlap. They cost nothing to whom they do not
# concern (measured: the same CPU time), and a test of a mesh is a test as any other.
jax.config.update("jax_num_cpu_devices", 8)


_EXAMPLES = pathlib.Path(".hypothesis", "examples")


def _is_searching(config) -> bool:
    """Whether tests by Hypothesis search at random: in the exhaustive tier alone."""
    return config.option.markexpr == "exhaustive"


def pytest_addoption(parser):
    parser.addoption(
        "--turns",
        type=int,
        metavar="N",
        help="of the exhaustive tests that the commit does not concern run one in N, another share "
        "at each commit, see tests/support/turns.py",
    )


def pytest_terminal_summary(terminalreporter, config):
    if turn := config.stash[_PLAN]["turn"]:
        terminalreporter.write_line(f"In turn: {turn['text']}")
    if _is_searching(config):
        terminalreporter.write_line(
            f"Hypothesis searched at random; examples that fail are printed, kept in {_EXAMPLES} "
            "and tried first in the next run."
        )


_PLAN = pytest.StashKey[dict]()


def pytest_configure(config):
    # A test that is named on the command line runs, whichever tier it belongs to.
    has_default_tier = config.option.markexpr == "not exhaustive and not measure"
    if has_default_tier and any("::" in arg for arg in config.args):
        config.option.markexpr = ""
    name = examples.RANDOM if _is_searching(config) else examples.SAME
    examples.load_profile(name, config.rootpath / _EXAMPLES)
    config.pluginmanager.register(cost.Recorder(programs.root()))
    if hasattr(config, "workerinput"):
        config.stash[_PLAN] = config.workerinput["plan"]
    else:
        programs.tidy(programs.folder())
        number, passed = config.option.turns, programs.root() / "passed"
        turn = turns.of_this_commit(number, passed) if number else None
        config.stash[_PLAN] = {"turn": turn, "costs": cost.read(programs.root())}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Every worker has the same plan, whatever is written to disk meanwhile."""
    node.workerinput["plan"] = node.config.stash[_PLAN]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    _mark_tiers(config, items)
    yield  # pytest deselects by marker
    plan = config.stash[_PLAN]
    if turn := plan["turn"]:
        is_due = {item: _is_always_due(item) or turns.is_due(item.nodeid, turn) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not is_due[item]])
        items[:] = filter(is_due.get, items)
    # The most expensive come first: begun last, one would keep one worker busy alone.
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    unit_of = cost.units([item.nodeid for item in items], plan["costs"], workers)
    order = {unit: i for i, unit in enumerate(dict.fromkeys(unit_of.values()))}
    items.sort(key=lambda item: order[unit_of[item.nodeid]])


def _mark_tiers(config, items):
    named = any("::" in arg for arg in config.args)
    found = collections.defaultdict(set)
    for item in items:
        # They run in both tiers: with the same examples in one, with random ones in the other.
        if _is_searching(config) and hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.exhaustive)
        for kind in ("representatives", "landing"):
            marker = item.get_closest_marker(kind)
            if marker is not None and marker.kwargs:
                raise pytest.UsageError(f"{item.nodeid}: {kind} takes ids, not {marker.kwargs}")
            if marker is not None and marker.args:
                found[item.nodeid.split("[")[0], marker.args].add(item.callspec.id)
        marker = item.get_closest_marker("representatives")
        if marker is not None and item.callspec.id not in marker.args:
            item.add_marker(pytest.mark.exhaustive)
    for (test, ids), names in found.items():
        if not named and not names >= set(ids):
            raise pytest.UsageError(f"{test} has no parameters {sorted(set(ids) - names)}")


def _is_always_due(item) -> bool:
    """Whether every landing runs this test, or this case of it."""
    marker = item.get_closest_marker("landing")
    return marker is not None and (not marker.args or item.callspec.id in marker.args)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class ByCost(LoadFileScheduling):
        """Hands out what ``cost.units`` says, in the order of the collection."""

        def schedule(self):
            if self.collection is None:
                ids = next(iter(self.registered_collections.values()))
                self._units = cost.units(ids, config.stash[_PLAN]["costs"], len(self.nodes))
            super().schedule()

        def _split_scope(self, nodeid):
            return self._units[nodeid]

    config.option.loadscopereorder = False  # by number of tests, which says little
    return ByCost(config, log)


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


@pytest.fixture
def programs_kept():
    """For tests that count compilations: nothing that they compile is dropped while they run."""
    compilation.release_programs(10_000)


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
