"""Custom rules and drafters: as records, as functions that make them, or by name.

A name is ``module:NAME``, of a module in the current directory or on Python's path.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from spec_jax.config import STRATEGIES, SpeculativeConfig
from spec_jax.config.checks import check_name
from spec_jax.contracts import Defaults, Drafter, DraftShape, Host, Rule, Sync, UpdateCount
from spec_jax.errors import ConfigError, did_you_mean
from spec_jax.loading import LoadedModel, load_model
from spec_jax.rules import make_rule

_FORMS = {
    "rule": "a Rule, or a function without arguments that returns one: Rule(name, "
    "batched(function), is_lossless=...)",
    "target": "a LoadedModel, or a function without arguments that returns one",
    "drafter": "a Drafter, or a function of the target, make(target), that returns one",
}

_RECORDS = {
    "shape": DraftShape,
    "memory": UpdateCount | None,
    "sync": Sync,
    "host": Host | None,
    "defaults": Defaults,
}


def to_rule(rule: Rule | Callable[[], Rule] | str) -> Rule:
    """Resolves a rule.

    Args:
      rule: a ``Rule``; a function without arguments that returns one; the name of a rule of the
        package, such as "block"; or ``module:NAME`` of one of the first two.

    Raises:
      ConfigError: there is no such module, name or rule (a close name is suggested), or it is
        something else.
    """
    if isinstance(rule, str) and ":" not in rule:
        check_name("rule", rule, STRATEGIES, "module:NAME, or ")
        return make_rule(SpeculativeConfig(rejection_sampling_strategy=rule))
    return _make("rule", rule, Rule)


def to_drafter(
    drafter: Drafter | Callable[[LoadedModel], Drafter] | str, target: LoadedModel
) -> Drafter:
    """Resolves a drafter.

    Args:
      drafter: a ``Drafter``; a function of the target that returns one; or ``module:NAME`` of
        either.
      target: the model that it drafts for.

    Raises:
      ConfigError: there is no such module or name, it is something else, or one of its records is.
    """
    made = _make("drafter", drafter, Drafter, target)
    for name, kind in _RECORDS.items():
        record = getattr(made, name)
        if not isinstance(record, kind):
            expected = kind.__name__ if isinstance(kind, type) else kind
            raise ConfigError(
                f"{name} of drafter {made.name!r} is {record!r:.80}; expected a {expected}"
            )
    return made


def to_target(target: LoadedModel | Callable[[], LoadedModel] | str) -> LoadedModel:
    """Resolves a target.

    Args:
      target: a ``LoadedModel``; a function without arguments that returns one; ``module:NAME`` of
        either; or what ``load_model`` takes.

    Raises:
      ConfigError: there is no such module or name, or it is something else.
      ModelNotLoaded, WeightsError: see ``load_model``.
    """
    if isinstance(target, str) and ":" not in target:
        return load_model(target)
    return _make("target", target, LoadedModel)


def find(name: str, what: str) -> Any:
    """Returns the object ``module:NAME``, importing the module if necessary.

    Args:
      name: the module with its packages, as in an import, and a name in it.
      what: "rule" or "drafter", for error messages.

    Raises:
      ConfigError: there is no such name, or the module cannot be imported.
    """
    module_name, _, path = name.partition(":")
    parts = [*module_name.split("."), *path.split(".")]
    if not all(part.isidentifier() for part in parts) or module_name.endswith(".py"):
        raise ConfigError(
            f"{what} is {name!r}; expected module:NAME as in an import, such as "
            f"my_{what}:{'make' if what == 'drafter' else 'rule'} for my_{what}.py in this folder"
        )
    module = _import(module_name, f"{what} is {name!r}")
    try:
        return functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        file = getattr(module, "__file__", None) or f"module {module_name!r}"  # none if built in
        raise ConfigError(
            f"{what} is {name!r}; {file} has no name {path!r}{did_you_mean(path, vars(module))}"
        ) from None


def _import(name: str, said: str) -> types.ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # as with `python -m`; last, so that it hides no package
    importlib.invalidate_caches()  # the file may be newer than the folder's listing
    try:
        return importlib.import_module(name)
    except Exception as error:
        lacks = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if lacks and f"{name}.".startswith(f"{lacks}."):
            raise ConfigError(
                f"{said}; there is no module {lacks!r} in {here} or on Python's path"
            ) from None
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
        where = f", at {own[0].filename}:{own[0].lineno}" if own else ""
        raise ConfigError(
            f"{said}; importing {name} failed: {type(error).__name__}: {error}{where}"
        ) from error


def _make(what: str, given: Any, kind: type, *args: Any) -> Any:
    """Returns a record of ``kind``, given as itself, as a function of ``args``, or by name."""
    said = what
    if isinstance(given, str):
        said = f"{what} {given}"
        given = find(given, what)
    elif callable(given):
        said = f"{what} {getattr(given, '__qualname__', given)}"
    if isinstance(given, kind):
        return given
    if not callable(given):
        raise ConfigError(f"{said} is of type {type(given).__name__}; expected {_FORMS[what]}")
    names = "unknown"  # of some builtins
    try:
        signature = inspect.signature(given)
        names = ", ".join(signature.parameters)
        signature.bind(*args)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{said} takes other arguments ({names}); expected {_FORMS[what]}"
        ) from None
    made = given(*args)
    if not isinstance(made, kind):
        hint = "; give models and heads as draft=" * hasattr(made, "method")
        raise ConfigError(
            f"{said} returned an object of type {type(made).__name__}; expected "
            f"{_FORMS[what]}{hint}"
        )
    return made
