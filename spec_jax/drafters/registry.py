"""The kinds of drafters, one record each.

Whatever differs between drafters stands in their records, so loading, decoding, evaluation,
training and export are the same code for all of them. A kind of your own is registered by the
same function as those of the package; ``tests/drafters/test_own_kind.py`` holds a whole one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Protocol

import jax

from spec_jax.config import METHODS
from spec_jax.config.checks import check_name
from spec_jax.contracts import Drafter, Head, Model
from spec_jax.drafters.common.head import head_drafter
from spec_jax.errors import ConfigError, did_you_mean
from spec_jax.models.checks import require, shown
from spec_jax.models.families import family_of
from spec_jax.models.files import read_json
from spec_jax.models.params import Params, check_weights, init_table
from spec_jax.models.tensors import open_tensors
from spec_jax.tree import AnyTree, DynamicTree


class HeadConfig(Protocol):
    """What the config of every head has: a frozen dataclass that is a static argument of jit.

    Attributes:
      taps: the target's states that the head reads, see ``transformer.forward``.
      target_hidden_size: D of the target.
      target_vocab_size: V.
      max_length: maximum tokens of a row, prompt and output together.

    A config may also have ``layer``, the ``ModelConfig`` of its layers (see ``layer_of``), and
    ``name``, for reports.
    """

    taps: tuple[int, ...]
    target_hidden_size: int
    target_vocab_size: int
    max_length: int


def layer_of(config: HeadConfig) -> Any:
    """The config of a head's layers, as many as share a cache; None if they have no cache."""
    return getattr(config, "layer", None)


class DraftPass(NamedTuple):
    """A pass of the drafter, ``count`` times a round; read by the planner and the profiler.

    Attributes:
      name: "refresh", where a head reads the target's new states, or "draft".
      width: tokens that it feeds in each row.
      scored: how many of them are given logits.
      count: how many there are.
      part: the key of ``HeadSpec.parts`` whose weights and cache it goes through; None: the
        first.
      skipped_weights: patterns, as of ``fnmatch``, of the names of that part's weights that it
        does not read. Names of nested tables are joined by dots, as in "layers.0.q".
      attends: it reads the cache; a pass that only writes keys and values does not.
      num_layers: how many of the target's layers it goes through, in place of the draft's own.
    """

    name: str
    width: int
    scored: int
    count: int = 1
    part: str | None = None
    skipped_weights: tuple[str, ...] = ()
    attends: bool = True
    num_layers: int | None = None


def level_passes(
    num_draft: int, tree: AnyTree | None, skipped_weights: tuple[str, ...] = ()
) -> tuple[DraftPass, ...]:
    """Returns the passes of a round after the one that scores the first level.

    Args:
      num_draft: K; of a tree, the number of its nodes.
      tree: the shape of the drafts; None: a chain.
      skipped_weights: see ``DraftPass``.
    """
    if tree is None:
        widths = [1] * (num_draft - 1)
    elif isinstance(tree, DynamicTree):
        widths = [tree.top_k] * (tree.depth - 1)
    else:
        inner = [tree.depths[node] for node in set(tree.parents) - {0}]
        widths = [inner.count(depth) for depth in range(1, tree.depth)]
    groups = itertools.groupby(widths)
    return tuple(
        DraftPass("draft", n, n, len([*same]), skipped_weights=skipped_weights)
        for n, same in groups
    )


def recycled_passes(
    config: Any, num_draft: int, tree: AnyTree | None, skipped_weights: tuple[str, ...] = ()
) -> tuple[DraftPass, ...]:
    """Returns the passes of a head that drafts from its own states: a refresh, then the levels."""
    del config
    width = 1 + (num_draft if tree is None else tree.depth)
    return (DraftPass("refresh", width, 1), *level_passes(num_draft, tree, skipped_weights))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """One way to train the heads of a kind.

    Attributes:
      objective: returns the ``train.objective.Objective``; a function, since drafters do not import
        ``train`` before a head is trained.
      new: ``(target_config, **options) -> HeadConfig`` of a new head.
      options: the options of ``experiments.train_head``'s ``head`` that ``new`` takes.
      sizes: those of them that the weights of a head that exists have settled: attributes of its
        config, which are compared with them.
      formats: names of the checkpoint formats that an export may ask for.
      trains: ``(config) -> bool``, whether heads of this config are trained by this objective.
    """

    objective: Callable[[], Any]
    new: Callable[..., HeadConfig]
    options: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    trains: Callable[[Any], bool] = lambda config: True


@functools.cache
def _recycled(functions, config, target: Model, tree) -> Drafter:
    head = functions(config, target)
    if head is None:
        raise ConfigError(
            f"drafter kind {kind_of(config).name!r} has no `functions` for heads of this config, "
            "and no `drafter` of its own in their place"
        )
    return head_drafter(head, tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """How a kind drafts.

    Attributes:
      draft: what a decoder needs beside the target: "head", "model" or "none".
      drafter: ``(draft, target, config) -> Drafter`` from a ``LoadedHead``, ``LoadedModel`` or
        None, the target's ``Model`` with the head's taps and the ``SpeculativeConfig``. None: the
        usual drafter of ``HeadSpec.functions``, see ``drafters/common/head.py``.
      passes: ``(config, num_draft, tree) -> [DraftPass]``, what a round runs beside the verify
        pass, of the config of a draft model or a head; read it by ``round_passes``. None: none for
        a kind that needs no draft, and ``recycled_passes`` for one whose head has ``functions``;
        others have to say them.
      history: ``(config) -> suffix.History``, what keeps the past outputs that are the drafter's
        parameters; None: it reads none.
    """

    draft: str = "head"
    drafter: Callable[..., Drafter] | None = None
    passes: Callable[..., Sequence[DraftPass]] | None = None
    history: Callable[[Any], Any] | None = None

    def round_passes(
        self, config: Any, num_draft: int, tree: AnyTree | None = None
    ) -> Sequence[DraftPass]:
        """Returns what a round runs beside the verify pass, see ``passes``."""
        if self.passes is not None:
            return self.passes(config, num_draft, tree)
        return () if self.draft == "none" else recycled_passes(config, num_draft, tree)

    def width(self, config: Any, num_draft: int, tree: AnyTree | None) -> int:
        """Returns the tokens a row that weights are laid out for: those of the widest pass."""
        return max((one.width for one in self.round_passes(config, num_draft, tree)), default=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """What the heads of a kind are; ``config`` stands for an object of ``config_class``.

    Attributes:
      config_class: the type of their configs, see ``HeadConfig``.
      table: ``(config) -> {name: ParamSpec}``, nested as the parameters are.
      functions: ``(config, target) -> Head``, or None where one such head does not draft every
        token; None: no config of the kind has one.
      parts: ``(config) -> {key: table}``, parts of the head that each have a cache; None: the
        whole ``table`` under the key "".
      init: ``(config, key, dtype) -> params``; None: all parameters of ``table``. A parameter
        ``d2t`` is a reduced vocabulary, filled from the data and not trained.
      check: ``(config, params, owner)``, raises WeightsError where the parameters are not those of
        the config; None: by ``table``.
      has_panels: ``(config) -> bool``, whether every matrix but embeddings is applied by
        ``cpu_layout.matmul``.
    """

    config_class: type
    table: Callable[[Any], Mapping[str, Any]]
    functions: Callable[[Any, Model], Head | None] | None = None
    parts: Callable[[Any], Mapping[str, Mapping[str, Any]]] | None = None
    init: Callable[..., Params] | None = None
    check: Callable[..., None] | None = None
    has_panels: Callable[[Any], bool] = lambda config: False

    def parts_of(self, config: HeadConfig) -> Mapping[str, Mapping[str, Any]]:
        """The tables of the parts of a head, see ``parts``."""
        return {"": self.table(config)} if self.parts is None else self.parts(config)

    def init_params(self, config: HeadConfig, key: jax.Array, dtype: Any) -> Params:
        """Random parameters of a head, see ``init``. The key is consumed."""
        if self.init is not None:
            return self.init(config, key, dtype)
        return init_table(self.table(config), key, dtype)

    def check_params(self, config: HeadConfig, params: Params, owner: str) -> None:
        """Checks the parameters of a head, see ``check``; ``owner`` begins the message."""
        if self.check is not None:
            return self.check(config, params, owner)
        return check_weights(params, self.table(config), owner)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftFormat:
    """How the directories of a kind are recognised, read and written.

    Attributes:
      detect: ``(hf, names) -> bool``, whether a directory with this config.json and tensors of
        these names holds such a draft.
      read: ``(directory, target, dtype, **overrides) -> LoadedHead``, ``target`` being the
        ``LoadedModel`` that it drafts for; None: heads of the kind are made, not loaded.
      reads_sharded: ``read`` also takes the keywords ``mesh`` and ``axis_rules`` and places the
        weights there; heads of other kinds are read whole before they are placed.
      write: ``(head, directory, target, *, format, dtype, num_speculative_tokens)``, the opposite;
        ``format`` may be None.
      of_target: ``(target_config, option) -> config`` of a head without weights, which is made of
        the target where a draft is named METHOD or METHOD:OPTION. Raises ConfigError.
      pick: ``(config, target, format, num_speculative_tokens) -> format`` that is written. Raises
        ConfigError if no format can express the config.
    """

    detect: Callable[[Mapping[str, Any], AbstractSet[str]], bool] = lambda hf, names: False
    read: Callable[..., Any] | None = None
    reads_sharded: bool = False
    write: Callable[..., None] | None = None
    of_target: Callable[[Any, str], HeadConfig] | None = None
    pick: Callable[..., str | None] = lambda config, target, format, num_tokens: format


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterKind:
    """A kind of drafter.

    Attributes:
      name: the ``speculative_method`` that drafts with it.
      drafting: how it drafts.
      head: what its heads are; None: it has none.
      format: how its directories are read and written.
      training: how its heads are trained, by the objective's name.
    """

    name: str
    drafting: Drafting = Drafting()
    head: HeadSpec | None = None
    format: DraftFormat = DraftFormat()
    training: Mapping[str, Training] = dataclasses.field(default_factory=dict)

    def make_drafter(self, draft: Any, target: Model, config: Any) -> Drafter:
        """The drafter, see ``Drafting.drafter``."""
        if self.drafting.drafter is not None:
            return self.drafting.drafter(draft, target, config)
        return _recycled(self.head.functions, draft.config, target, config.tree_shape)


_KINDS: dict[str, DrafterKind] = {}
_SOURCES = ("head", "model", "none")


def register(kind: DrafterKind) -> DrafterKind:
    """Makes a kind known to the whole package, under its name; returns it.

    A kind of the same name is replaced.

    Example:
      ```python
      from spec_jax.drafters import DrafterKind, Drafting, register
      from spec_jax.testing import scripted_drafter

      last = scripted_drafter(lambda tokens, length, k: tokens[:, :1].repeat(k, axis=1))
      kind = DrafterKind(
          name="first-token",
          drafting=Drafting(draft="none", drafter=lambda draft, target, config: last),
      )
      register(kind)  # now SpeculativeConfig("first-token", 4) drafts with it
      ```

    Args:
      kind: its record.

    Raises:
      ConfigError: the record lacks what a drafter is made of, or another kind has the same config
        class or an objective of the same name.
    """
    drafting = kind.drafting
    head = kind.head
    this = f"drafter kind {kind.name!r}"
    check_name("draft", drafting.draft, _SOURCES)
    lacks = "a `head`, and drafts without one" if head else "no `head`, and drafts with one"
    is_agreed = (head is not None) == (drafting.draft == "head")
    require(is_agreed, f"{this} has {lacks}: draft is {drafting.draft!r}")
    has_functions = head is not None and head.functions is not None
    has_drafter = drafting.drafter is not None or has_functions
    require(has_drafter, f"{this} has no `drafter`, and no `functions` of a head to make one")
    require(
        drafting.passes is not None or drafting.draft == "none" or has_functions,
        f"{this} has no `passes`, which plans, timers and predicted speed-ups read; only those of "
        "a head with `functions` are known",
    )
    for other in _KINDS.values():
        if other.name == kind.name:
            continue
        if head and other.head and other.head.config_class is head.config_class:
            name = head.config_class.__name__
            message = f"{this} has the config class of {other.name!r}, {name}"
            raise ConfigError(f"{message}; expected one of its own")
        taken = sorted(set(kind.training) & set(other.training))
        require(not taken, f"{this} has objectives of {other.name!r}: {', '.join(taken)}")
    METHODS[kind.name] = drafting.draft == "none"
    _KINDS[kind.name] = kind
    return kind


def unregister(name: str) -> None:
    """Forgets the kind of this name, as after a test."""
    METHODS.pop(name, None)
    _KINDS.pop(name, None)


def find(method: str) -> DrafterKind:
    """The kind of a ``speculative_method``.

    Raises:
      ConfigError: there is none.
    """
    if method not in _KINDS:
        raise ConfigError(
            f"no drafter kind {method!r}{did_you_mean(method, _KINDS)}; known: {', '.join(_KINDS)}"
        )
    return _KINDS[method]


def kind_of(config: HeadConfig) -> DrafterKind:
    """The kind that a head's config belongs to.

    Raises:
      ConfigError: there is none.
    """
    heads = {kind.head.config_class: kind for kind in _KINDS.values() if kind.head}
    known = ", ".join(cls.__name__ for cls in heads)
    message = f"no drafter kind has heads of a {type(config).__name__}; known: {known}"
    require(type(config) in heads, message)
    return heads[type(config)]


def kind_of_draft(draft: Any) -> DrafterKind:
    """The kind that drafts with something that needs no weights yet.

    Args:
      draft: the name of a method, the config of a head, or the config of a draft model.

    Raises:
      ConfigError: there is none.
    """
    if isinstance(draft, str):
        return find(draft)
    if not any(kind.head and kind.head.config_class is type(draft) for kind in _KINDS.values()):
        with contextlib.suppress(ConfigError):
            family_of(draft)
            return next(kind for kind in _KINDS.values() if kind.drafting.draft == "model")
    return kind_of(draft)


def config_of_target(name: str, target: Any) -> HeadConfig | None:
    """The config of a head that is made of its target, see ``DraftFormat.of_target``.

    Args:
      name: of the draft, such as "self:8".
      target: the target's config.

    Returns:
      None for drafts that are loaded.
    """
    method, _, option = name.partition(":")
    make = method in _KINDS and _KINDS[method].format.of_target
    return make(target, option) if make else None


def detect(directory: pathlib.Path) -> DrafterKind:
    """The kind of draft that a directory holds, by its config.json and its tensors.

    Of several that claim it, the one registered last.

    Raises:
      WeightsError: it has no config.json or no tensors that can be read.
      ConfigError: no kind knows it.
    """
    hf = read_json(directory / "config.json")
    with contextlib.ExitStack() as stack:
        names = frozenset(open_tensors(directory, stack))
    for kind in reversed(_KINDS.values()):
        if kind.format.detect(hf, names):
            return kind
    keys = ("architectures", "model_type", "speculators_model_type")
    stated = ", ".join(f"{key} {shown(hf[key])}" for key in keys if key in hf)
    some = ", ".join(f"{name:.80}" for name in sorted(names)[:4])
    read = [k for k in _KINDS.values() if k.drafting.draft != "none" and not k.format.of_target]
    known = ", ".join(kind.name for kind in read)
    raise ConfigError(
        f"{directory} holds no known kind of draft: config.json says "
        f"{stated or 'no model_type'}, and its {len(names)} tensors are {some}, ...; known "
        f"kinds: {known}. Name one with method=..., or register yours with "
        "spec_jax.drafters.register"
    )


def objective_of(config: HeadConfig, name: str | None = None) -> Any:
    """The ``Objective`` that trains heads of a config.

    Args:
      config: of the head.
      name: of the objective; None: the first that trains such heads.

    Raises:
      ConfigError: it does not train them, or there is none.
    """
    kind = kind_of(config)
    ways = {known: way for known, way in kind.training.items() if way.trains(config)}
    name = name or next(iter(ways), None)
    expected = f"expected one that trains {kind.name} heads of this config"
    known = ", ".join(ways) or "there is none"
    require(name in ways, f"objective is {name!r}; {expected}: {known}")
    return ways[name].objective()


def objectives() -> dict[str, tuple[DrafterKind, Training]]:
    """Every way of training by its objective's name, with the kind whose heads it trains."""
    return {
        name: (kind, training)
        for kind in _KINDS.values()
        for name, training in kind.training.items()
    }
