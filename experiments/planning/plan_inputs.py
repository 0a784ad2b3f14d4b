"""What a plan is given: acceptance (rates, or those of a report's row), and drafts by name."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from spec_jax.drafters import registry
from spec_jax.engine.adaptive.policy import expected_tokens
from spec_jax.errors import ConfigError
from spec_jax.evaluation.cells import copying_methods
from spec_jax.models.families import AnyConfig
from spec_jax.planning.presets import find_config


class Acceptance(NamedTuple):
    """Rates by position, each given that all drafts before it were accepted.

    Attributes:
      rates: The last one holds for all positions after it.
      tree: The tree whose levels the rates are of, as ``grid.tree_options`` reads it; "" of chains.
      source: What they are, for the report.
    """

    rates: tuple[float, ...]
    tree: str
    source: str

    @classmethod
    def of(cls, text: str) -> Acceptance:
        """Reads rates with commas, or ``PATH`` or ``PATH:ROW`` of a report.

        Args:
          text: The path is that of the report.json of ``experiments.decode`` or of
            ``experiments.evaluate``; ROW counts its rows with drafts from 1, and may be left out
            where there is one.

        Raises:
          ConfigError: Neither rates above 0, at most 1, nor a row of a report that has rates.
        """
        try:
            rates = tuple(map(float, text.split(",")))
        except ValueError:
            return _measured(text)
        if not all(0 < rate <= 1 for rate in rates):
            raise ConfigError(
                f"acceptance is {text!r}; expected rates above 0, at most 1, with commas between "
                "them, or a report's PATH or PATH:ROW"
            )
        return cls(rates, "", text)

    def tokens(self, num_draft: int) -> tuple[float, ...]:
        """Returns the expected tokens of a round for K, or levels of a tree, = 0 .. ``num_draft``.

        Args:
          num_draft: The largest K.
        """
        return expected_tokens([*self.rates, *[self.rates[-1]] * num_draft][:num_draft])


def _measured(text: str) -> Acceptance:
    path, _, number = text.rpartition(":")
    if not (path and number.isdecimal()):
        path = text
        number = ""
    if not pathlib.Path(path).is_file():
        raise ConfigError(
            f"acceptance is {text!r}: no rates with commas between them, and there is no file "
            f"{path}; expected such as 0.8,0.7 or the path of a report.json"
        )
    try:
        report = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        rows = report.get("results", report.get("rows", []))
    except (ValueError, AttributeError):  # no text, no JSON, or no object
        rows = []
    found = [one for row in rows if (one := _row(row))]
    if not found:
        raise ConfigError(
            f"{path} has no row with accepted drafts; expected the report.json of "
            "experiments.decode or of experiments.evaluate"
        )
    names = "; ".join(f"{i}: {one.source}" for i, one in enumerate(found, 1))
    if not number and len(found) > 1:
        raise ConfigError(f"{path} has {len(found)} rows; name one as {path}:ROW, of {names}")
    at = int(number or 1)
    if not 1 <= at <= len(found):
        raise ConfigError(f"{path} has no row {at}; expected one of {names}")
    one = found[at - 1]
    rates = ", ".join(f"{rate:.3f}" for rate in one.rates)
    return one._replace(source=f"{rates}, measured: {path}, row {at}, {one.source}")


def _row(row: dict[str, Any]) -> Acceptance | None:
    """Returns the rates of a row of either report; None where no draft was verified."""
    if "accept" in row:
        values = [value for value, *_ in row["accept"]]
        rates = _known(values)
        tree = ""
        name = row["draft"]
    elif row.get("accepted_at") and row.get("rounds"):
        # A round without a draft at a position, as of drafters that copy tokens, counts too.
        before = [row["rounds"], *row["accepted_at"]]
        rates = _known([a / b if b else None for a, b in zip(row["accepted_at"], before)])
        tree = row.get("tree") or ""
        shape = f"tree {tree}" if tree else f"K={row['k']}"
        name = f"{row['method']} {shape} T={row['temperature']:g} {row['rule']}"
    else:
        return None
    return Acceptance(rates, tree, name) if rates else None


def _known(values: Sequence[float | None]) -> tuple[float, ...]:
    """Returns the rates up to the first position that no round has reached."""
    end = next((i for i, value in enumerate(values) if value is None), len(values))
    return tuple(values[:end])


def find_draft(
    name: str, target: AnyConfig, draft_vocab_size: int = 32000, platform: str = ""
) -> Any:
    """Returns what ``plan.Job`` and ``roofline.round_work`` take as a draft.

    Args:
      name: an objective such as "eagle3" or "mtp", for a new head of the target; a method that
        copies tokens, such as "ngram"; empty, for plain decoding; or a model, see
        ``presets.find_config``.
      target: the target's config.
      draft_vocab_size: U, of a head that can have a vocabulary of its own.
      platform: whose layout of the layers a model has, see ``presets.find_config``.

    Raises:
      ConfigError: there is none of this name.
    """
    if not name:
        return None
    if name in copying_methods():
        return name
    if (made := registry.config_of_target(name, target)) is not None:
        return made
    ways = registry.objectives()
    if name in ways:
        _, training = ways[name]
        options = {"draft_vocab_size": draft_vocab_size}
        return training.new(target, **{n: x for n, x in options.items() if n in training.options})
    try:
        return find_config(name, platform)
    except ConfigError as error:
        known = ", ".join([*ways, *copying_methods()])
        raise ConfigError(f"draft is none of {known}: {error}") from error
