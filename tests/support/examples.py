"""How tests that use Hypothesis find their examples: always the same ones, or a random search."""

import pathlib

import hypothesis
from hypothesis.database import DirectoryBasedExampleDatabase

try:  # not part of its interface
    from hypothesis.internal.conjecture import providers
except ImportError:
    providers = None

SAME, RANDOM = "same", "random"
# Both state everything that Hypothesis would choose by itself where it sees a CI service. Its
# check of slow strategies reads a clock, which says more about the machine than about the test.
_COMMON = dict(
    deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)


def load_profile(name: str, folder: pathlib.Path) -> None:
    """Sets how the tests that are imported from now on find their examples.

    Args:
      name: SAME examples in every run, or RANDOM ones, with those that failed kept in the folder
        and tried first in the next run.
      folder: where failed examples are kept.
    """
    register = hypothesis.settings.register_profile
    register(SAME, derandomize=True, database=None, **_COMMON)
    database = DirectoryBasedExampleDatabase(folder)
    register(RANDOM, derandomize=False, database=database, **_COMMON)
    hypothesis.settings.load_profile(name)
    if name == SAME:
        ignore_constants()


def ignore_constants() -> None:
    """Keeps the constants of our source out of the examples.

    Hypothesis mixes constants of the modules that a process has imported into what it draws, also
    where it is derandomised. Which ones are imported depends on the tests that ran before in the
    same worker. There is no setting; versions without this function do not draw such constants.
    """
    if hasattr(providers, "_get_local_constants") and hasattr(providers, "Constants"):
        none = providers.Constants()
        providers._get_local_constants = lambda: none
