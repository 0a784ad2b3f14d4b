"""What the mains share: typed flags, checks of configs, one-line errors, folders of runs."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import operator
import os
import pathlib
import re
import shlex
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from experiments.run import config_help, distributed, inputs
from spec_jax import compilation, processes
from spec_jax.errors import ConfigError, SpecJaxError, did_you_mean
from spec_jax.loading import LoadedModel
from spec_jax.models.files import parse_json
from spec_jax.models.tokenizer import Tokenizer

flags.disclaim_key_flags()  # what is defined here counts as the main module's, for --help
INPUTS = "inputs.json"  # checksums of what a run has read
ROOT = pathlib.Path(__file__).resolve().parents[2]
_config_files: dict[str, str] = {}  # of the main module, for --help


def define_flags(default: types.ModuleType, workdir: str) -> tuple[flags.FlagHolder, ...]:
    """Defines ``--config``, each value of which is a flag too, and ``--workdir``.

    Args:
      default: The module of ``configs/`` that is used unless ``--config`` names another file.
      workdir: The help text of ``--workdir``.

    Returns:
      The two flags.
    """
    text = "Config file; each of its values is a typed flag, --config.KEY=VALUE."
    _config_files["default"] = default.__file__
    distributed.define_flags()
    with _errors_in_one_line():  # looks up the overrides
        config = config_flags.DEFINE_config_file("config", default.__file__, text)
    return config, flags.DEFINE_string("workdir", None, workdir)


def define_profile() -> flags.FlagHolder:
    """Defines ``--profile``."""
    return flags.DEFINE_bool(
        "profile",
        False,
        "Also trace decoding rounds: profile/ of the run's folder, and a table "
        "of the time by stage.",
    )


def run(main: Callable[[], int | None]) -> None:
    """Parses the flags, calls ``main`` and exits; bad input ends in one line and exit code 2.

    ``--help`` prints what the experiment does, its flags, and the keys of its config.
    """
    if {"--help", "-h", "--helpfull", "--helpshort"} & set(sys.argv[1:]):
        with _errors_in_one_line():
            print(config_help.text(sys.modules["__main__"], sys.argv, _config_files.get("default")))
        sys.exit(0)

    def guarded(argv) -> int:
        try:
            if len(argv) > 1:
                raise ConfigError(f"unexpected argument {argv[1]!r}; values are --config.KEY=VALUE")
            if not flags.FLAGS["verbosity"].present:
                logging.set_verbosity(logging.WARNING)  # jax names every back end that is missing
            with distributed.running():
                return main() or 0
        except SpecJaxError as error:
            return _fail(error)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    app.run(guarded, flags_parser=_parse_flags)


def _fail(error) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def _parse_flags(argv: list[str]) -> list[str]:
    with _errors_in_one_line():
        arguments = flags.FLAGS(argv)
        if "config" in flags.FLAGS:
            flags.FLAGS["config"].value.keys()  # a file that cannot be loaded raises only here
        return arguments


@contextlib.contextmanager
def _errors_in_one_line():
    try:
        yield
    except (AttributeError, KeyError) as error:  # how ml_collections reports an unknown key
        key = re.search(r"\w+", str(error))
        close = re.search(r'Did you mean "(\w+)', str(error))
        hint = f" (did you mean {close[1]}?)" if close else ""
        sys.exit(_fail(f"the config has no key {key[0]!r}{hint}; --help lists its keys"))
    except (flags.Error, OSError, SyntaxError, TypeError, ValueError) as error:
        text = re.sub(r"invalid literal for int.*", "expected an integer", str(error))
        sys.exit(_fail(re.sub(r"could not convert string.*", "expected a number", text)))


def listed(text: str) -> list[str]:
    """Returns the names in a text, separated by commas, each once."""
    return [*dict.fromkeys(filter(None, (name.strip() for name in text.split(","))))]


def check_keys(config: ConfigDict, default: ConfigDict) -> None:
    """Raises ConfigError unless a config file has exactly the keys of the default one."""
    have = config_help.flat(config)
    known = config_help.flat(default)
    for key in have:
        if key not in known:
            hint = did_you_mean(key, known)
            raise ConfigError(f"the config has no key {key!r}{hint}; its keys: {', '.join(known)}")
    missing = [key for key in known if key not in have]
    if missing:
        raise ConfigError(f"the config lacks {', '.join(missing)}")


def require(is_ok: bool, config: ConfigDict, name: str, expected: str) -> None:
    """Raises ConfigError, with the name and the value of a key, unless the check has passed.

    Args:
      is_ok: The outcome of the check.
      config: The config that was checked.
      name: The key, with dots for those of nested configs.
      expected: What the value should have been.
    """
    if not is_ok:
        value = functools.reduce(operator.getitem, name.split("."), config)
        raise ConfigError(f"{name} is {value!r}; expected {expected}")


def require_each(config: ConfigDict, *checks: tuple[Any, str, str]) -> None:
    """Raises ConfigError for the first of ``(is_ok, name, expected)`` that has not passed."""
    for is_ok, name, expected in checks:
        require(is_ok, config, name, expected)


def require_positive(config: ConfigDict, names: str, prefix: str = "") -> None:
    """Raises ConfigError unless some keys are integers of 1 or more.

    Args:
      config: The config that is checked.
      names: The keys in one string, separated by blanks.
      prefix: The section that has them.
    """
    for name in names.split():
        section = config[prefix] if prefix else config
        full = f"{prefix}.{name}" if prefix else name
        require(section[name] >= 1, config, full, "a positive integer")


def tokenizer_of(model: LoadedModel) -> Tokenizer:
    """Returns a model's tokenizer; raises ConfigError if it has none."""
    if model.tokenizer is None:
        raise ConfigError(f"{model.name} has no tokenizer; expected tokenizer.json beside it")
    return model.tokenizer


def json_object(config: ConfigDict, name: str) -> dict[str, Any]:
    """Returns the object that a text of a config holds as JSON; an empty one for no text.

    Raises:
      ConfigError: It is not JSON, or no object.
    """
    try:
        value = parse_json(config[name] or "{}")
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON ({error}): {config[name]!r:.80}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {config[name]!r:.80}; expected a JSON object")
    return value


def check_same(saved: Mapping, config: Mapping, free: Sequence[str] = ()) -> None:
    """Raises ConfigError if a run's saved config differs from this one.

    Args:
      saved: The config that the run was begun with.
      config: This one.
      free: Keys that may differ.
    """
    before, now = (
        config_help.flat({key: values.get(key) for key in config if key not in free})
        for values in (saved, config)
    )
    _refuse_changes(before, now)


def _refuse_changes(before: Mapping, now: Mapping) -> None:
    changed = [key for key in {**now, **before} if before.get(key) != now.get(key)]
    if changed:
        name = changed[0]
        more = f" (and {len(changed) - 9} more)" if len(changed) > 9 else ""
        raise ConfigError(
            f"the work directory holds a run with other values of {', '.join(changed[:9])}{more} "
            f"({name} was {before.get(name)!r}, not {now.get(name)!r}); expected the same config "
            "and the same files, or an empty directory"
        )


def inputs_of(
    config: Mapping, free: Sequence[str] = (), known: inputs.Sums | None = None
) -> inputs.Sums:
    """Returns the checksums that inputs.json holds, see ``inputs.of_config``.

    Of several processes the first one reads the files; the others get none.

    Args:
      config: The resolved config, as JSON values.
      free: Keys whose files a run may go on with when they have changed.
      known: Of an earlier call, whose files are not read again.
    """
    if not processes.is_writer():
        return {}
    values = {key: value for key, value in config.items() if key not in free}
    return inputs.of_config(config_help.flat(values), known=known or {})


def check_inputs(folder: pathlib.Path, sums: inputs.Sums, *, is_loaded: bool = True) -> inputs.Sums:
    """Checks that the files of a run that has begun have the contents that it began with.

    Args:
      folder: The run's folder, with its inputs.json.
      sums: Of ``inputs_of``.
      is_loaded: Whether everything has been loaded. If not, what is unknown may be what loading
        downloads, and is not compared.

    Returns:
      What inputs.json is to hold from now on: what the run began with, and ``sums`` of what was
      unknown then.

    Raises:
      ConfigError: A file has changed, came or went; its name is in the message.
    """
    if not processes.is_writer():
        return sums
    begun = read_saved(folder / INPUTS)
    before = {what: files for what, files in begun.items() if is_loaded or what in sums}
    now = {what: sums.get(what, {}) for what in before}
    _refuse_changes(inputs.by_file(before), inputs.by_file(now))
    return {**sums, **begun}


def read_saved(path: pathlib.Path) -> Mapping[str, Any]:
    """Reads an object that a run has saved, such as its config.json.

    Raises:
      ConfigError: The file is missing or damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        fault = "it holds no object"
    except (OSError, ValueError) as error:
        fault = str(error)
    raise ConfigError(
        f"{path} cannot be read ({fault}); the run needs it to go on: put it back, or name another "
        "--workdir"
    )


def enable_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache directory, one folder for each jax version.

    ``JAX_COMPILATION_CACHE_DIR`` sets another directory, ``XDG_CACHE_HOME`` its parent.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    if root and jax.config.jax_compilation_cache_dir is None:
        path = pathlib.Path(root) / "spec_jax" / f"jax-{jax.__version__}"
        compilation.enable_compilation_cache(path)
    else:
        compilation.enable_compilation_cache()


def command(experiment: str) -> str:
    """Returns the command line of this run, for its report.

    Args:
      experiment: The experiment, unless another one that was started runs it.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    is_started = spec is not None and spec.name.startswith("experiments.")
    name = spec.name if is_started else f"experiments.{experiment}"
    return shlex.join(["python", "-m", name, *sys.argv[1:]])


def make_workdir(experiment: str, workdir: str | pathlib.Path | None) -> pathlib.Path:
    """Makes the folder of a run, which may hold a run of this experiment already.

    Args:
      experiment: The experiment's name.
      workdir: The folder; by default runs/EXPERIMENT/TIME.

    Raises:
      ConfigError: The folder cannot be made, or holds a run of another experiment.
    """
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = pathlib.Path(processes.from_writer(str(workdir or f"runs/{experiment}/{stamp}")))
    if not processes.is_writer():
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be made: {error}") from error
    path = folder / "environment.json"
    holder = read_saved(path).get("experiment") if path.exists() else experiment
    if holder != experiment:
        raise ConfigError(f"{folder} holds a run of experiments.{holder}; name another --workdir")
    return folder


def open_workdir(experiment: str, workdir: str | pathlib.Path | None) -> pathlib.Path:
    """Makes the folder of a run that cannot be continued; it must not hold another run.

    One of the same experiment that has reported nothing yet is begun anew.

    Args:
      experiment: The experiment's name.
      workdir: The folder; by default runs/EXPERIMENT/TIME.

    Raises:
      ConfigError: The folder cannot be made, or holds another run.
    """
    folder = make_workdir(experiment, workdir)
    if not processes.is_writer():
        return folder
    if (folder / "report.json").exists():
        raise ConfigError(f"{folder} holds the report of another run; name another --workdir")
    if (folder / "config.json").exists() and not (folder / "environment.json").exists():
        raise ConfigError(f"{folder} holds the config.json of another run; name another --workdir")
    return folder
