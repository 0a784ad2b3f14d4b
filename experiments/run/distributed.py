"""Flags and glue of the mains for several processes, see docs/scale.md."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

import jax
from absl import flags, logging

import spec_jax
from experiments.run import config_help, inputs
from spec_jax import processes
from spec_jax.errors import ConfigError, SpecJaxError

flags.disclaim_key_flags()
_PACKAGES = ("jax", "jaxlib", "numpy")


def define_flags() -> None:
    """Defines the flags that say which processes run together."""
    if "distributed" in flags.FLAGS:
        return
    flags.DEFINE_bool(
        "distributed",
        False,
        "Run with the other processes of the cluster, which is detected: "
        "Cloud TPU, Slurm, Kubernetes, Open MPI.",
    )
    flags.DEFINE_string("coordinator_address", None, "Elsewhere: HOST:PORT of process 0.")
    flags.DEFINE_integer("num_processes", None, "Elsewhere: the number of processes.", 1)
    flags.DEFINE_integer("process_id", None, "Elsewhere: the number of this one, from 0.", 0)
    flags.DEFINE_string(
        "log_dir_of_processes",
        None,
        "Where processes other than the first write what they print; by default nowhere.",
    )


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Joins the other processes if the flags say so, and ends together with them.

    An error in one process ends all of them, and says what it was; it does not return here.
    """
    values = flags.FLAGS.flag_values_dict()
    names = ("coordinator_address", "num_processes", "process_id")
    given = {name: values.get(name) for name in names}
    if not values.get("distributed") and set(given.values()) == {None}:
        yield
        return
    processes.start(**given)
    if processes.count() == 1:
        yield
        return
    try:
        _silence(values["log_dir_of_processes"])
        processes.check_same(_settings(values))
        yield
        processes.finish()
    except SpecJaxError as error:
        processes.fail(error, 2)
    except KeyboardInterrupt:
        processes.fail("interrupted", 130)
    except BaseException as error:
        processes.fail(error, 1)


def _settings(values: dict) -> dict:
    """Returns what must be the same in every process."""
    config = config_help.flat(values["config"] if "config" in values else {}, "config.")
    return {
        **config,
        **inputs.by_file(inputs.of_config(config, has_weights=False)),
        "workdir": values.get("workdir"),
        "spec_jax": spec_jax.__version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
        "local devices": jax.local_device_count(),
        "kind of device": jax.local_devices()[0].device_kind,
    }


def _silence(folder: str | None) -> None:
    """Lets only the first process print; errors of all of them are shown."""
    if processes.is_writer():
        return
    path = os.devnull
    if folder:
        try:
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder {folder} cannot be made: {error}") from error
        path = pathlib.Path(folder) / f"process_{processes.index()}.log"
    sys.stdout = sys.stderr = open(path, "w", buffering=1, encoding="utf-8")
    logging.get_absl_handler().python_handler.stream = sys.stderr
