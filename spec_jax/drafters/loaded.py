"""A model, or a head that drafts for one, with its weights: what a decoder is made of."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spec_jax.contracts import Model
from spec_jax.drafters import registry
from spec_jax.drafters.common.head import Head
from spec_jax.drafters.common.vocabulary import resized
from spec_jax.errors import ConfigError
from spec_jax.meshes import mesh_of, mesh_text, to_mesh
from spec_jax.models import layout
from spec_jax.models.families import AnyConfig, family_of
from spec_jax.models.params import (
    Params,
    all_tables,
    head_counts,
    num_params,
    placement,
    table_placement,
)
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.sharding import SHARDED, AxisRules, kept_whole, place
from spec_jax.show.summary import Shown, count_text
from spec_jax.tree import AnyTree


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedModel(Shown):
    """A model's functions, its weights and its tokenizer.

    Attributes:
      name: where it was loaded from.
      model: its functions.
      params: its weights.
      tokenizer: None: prompts are ids.
      config: None for a custom model (see ``spec_jax.testing`` for small ones).
      stop_tokens: ids that end a row.
      method: the ``speculative_method`` that drafts with it.
    """

    name: str
    model: Model
    params: Params
    tokenizer: Tokenizer | None = None
    config: AnyConfig | None = None
    stop_tokens: tuple[int, ...] = ()
    method: str = "standalone"

    @property
    def max_length(self) -> int:
        """Maximum tokens of a row, prompt and output together."""
        return self.model.max_length

    def decoding_params(self, num_rows: int | None = None) -> Params:
        """The weights laid out for passes over ``num_rows`` tokens in total; None: any number.

        On other devices than a CPU they are ``params`` itself, see ``models/layout.py``.
        """
        return self._by_rows(num_rows)

    @functools.cached_property
    def _by_rows(self) -> Callable[[int | None], Params]:
        if self.config is None:
            return lambda num_rows: self.params
        is_tied = self.config.tie_word_embeddings
        has_panels = family_of(self.config).has_panels
        return layout.by_rows(self.params, is_tied=is_tied, has_panels=has_panels)

    def on_mesh(self, mesh: Mesh | str, axis_rules: AxisRules = SHARDED) -> LoadedModel:
        """Returns the model with its weights on a mesh, replicated for a model without a config.

        Args:
          mesh: the devices.
          axis_rules: which dimensions are split.

        Raises:
          ConfigError: the mesh does not divide the heads of the model.
        """
        mesh = to_mesh(mesh)
        sharding = NamedSharding(mesh, PartitionSpec())
        if self.config is not None:
            sharding = placement(self.name, self.config, mesh, axis_rules)
        return dataclasses.replace(self, params=place(self.params, sharding))

    def kept_whole(self, mesh: Mesh, axis_rules: AxisRules = SHARDED) -> list[str]:
        """Returns a sentence for each size that the mesh does not divide, see ``on_mesh``."""
        if self.config is None:
            return []
        counts, table = head_counts(self.config), all_tables(self.config)
        return kept_whole(self.name, table, mesh, axis_rules, counts)

    def draft_params(
        self, target: Params, batch: int | None, num_draft: int, tree: AnyTree | None = None
    ) -> Params:
        """The parameters of the drafter that this model makes.

        Args:
          target: the target's parameters, for drafters that share some of them.
          batch: number of rows that are decoded together; None: any.
          num_draft: K.
          tree: the shape of the drafts; None: a chain.
        """
        del target
        return self.decoding_params(_num_rows(self.method, batch, num_draft, tree))

    def head(self, target: Model) -> None:
        """None: a model is no head."""

    @property
    def num_params(self) -> int | None:
        return None if self.config is None else num_params(self.config)

    def _facts(self) -> dict[str, str]:
        facts = {"": repr(self.name)}
        if self.config is not None:
            facts["family"] = _family(self.config)
            facts["layers"] = f"{self.config.num_hidden_layers} × {self.config.hidden_size}"
        facts["vocabulary"] = f"{self.model.last_id + 1:,}"
        return facts | _weights(self.params, self.num_params)


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedHead(Shown):
    """A head of any kind, or MTP modules, and their weights.

    Attributes:
      name: where it was loaded from.
      config: its shape and meaning, its ``taps`` among them; its type says the kind.
      params: what the drafter takes as ``params["head"]``.
      notes: sentences on how an ambiguous checkpoint was read.
      format: the checkpoint format that it was read from; None: it was not read.
    """

    name: str
    config: registry.HeadConfig
    params: Params
    notes: tuple[str, ...] = ()
    format: str | None = None

    @property
    def kind(self) -> registry.DrafterKind:
        """The record of its kind.

        Raises:
          ConfigError: no such kind is registered.
        """
        return registry.kind_of(self.config)

    @property
    def method(self) -> str:
        """The ``speculative_method`` that drafts with it."""
        return self.kind.name

    def check_params(self) -> None:
        """Checks that the weights are those of the config.

        Raises:
          WeightsError: a weight that is missing or of another shape; it is named.
        """
        self.kind.check_params(self.config, self.params, f"head {self.name}: ")

    @property
    def max_length(self) -> int:
        """Maximum tokens of a row, prompt and output together."""
        return self.config.max_length

    def decoding_params(self, num_rows: int | None = None) -> Params:
        """The weights laid out for passes over ``num_rows`` pairs, see ``LoadedModel``."""
        return self._by_rows(num_rows)

    @functools.cached_property
    def _by_rows(self) -> Callable[[int | None], Params]:
        return layout.by_rows(self.params, has_panels=self.kind.has_panels(self.config))

    def on_mesh(self, mesh: Mesh | str, axis_rules: AxisRules = SHARDED) -> LoadedHead:
        """Returns the head with its weights on a mesh, see ``LoadedModel``."""
        mesh = to_mesh(mesh)
        layer, table = getattr(self.config, "layer", None), self.kind.table(self.config)
        shardings = table_placement(self.name, layer, table, mesh, axis_rules)

        def put(sharding, params):
            if not isinstance(params, dict):
                return place(params, sharding or NamedSharding(mesh, PartitionSpec()))
            return {name: put(sharding and sharding.get(name), x) for name, x in params.items()}

        return dataclasses.replace(self, params=put(shardings, self.params))

    def with_vocab(self, vocab_size: int) -> LoadedHead:
        """Returns the head for a target whose embedding is padded to another size.

        Weights of each of the target's ids are cut, or padded with zeros; further ids never were
        tokens. On a mesh, place the result by ``on_mesh``.

        Args:
          vocab_size: V of the target.
        """
        old, layer = self.config.target_vocab_size, getattr(self.config, "layer", None)
        changes = {"target_vocab_size": vocab_size}
        if layer is not None and layer.vocab_size == old:
            changes["layer"] = dataclasses.replace(layer, vocab_size=vocab_size)

        def put(table, params):
            if isinstance(params, dict):
                return {name: put(table and table.get(name), x) for name, x in params.items()}
            for axis, name in enumerate(table.axes if table is not None else ()):
                if name == "vocab" and params.shape[axis] == old:
                    params = resized(params, axis, vocab_size)
            return params

        params = put(self.kind.table(self.config), self.params)
        config = dataclasses.replace(self.config, **changes)
        return dataclasses.replace(self, config=config, params=params)

    def kept_whole(self, mesh: Mesh, axis_rules: AxisRules = SHARDED) -> list[str]:
        """Returns a sentence for each size that the mesh does not divide, see ``on_mesh``."""
        layer, table = getattr(self.config, "layer", None), self.kind.table(self.config)
        return kept_whole(self.name, table, mesh, axis_rules, head_counts(layer))

    def draft_params(
        self, target: Params, batch: int | None, num_draft: int, tree: AnyTree | None = None
    ) -> Params:
        """The parameters of the drafter that this head makes, see ``LoadedModel``."""
        head = self.decoding_params(_num_rows(self.method, batch, num_draft, tree))
        return {"head": head, "target": target}

    @property
    def num_params(self) -> int:
        """Number of its own parameters, without those that it shares with the target."""
        return sum(w.size for w in jax.tree.leaves(self.params))

    def _facts(self) -> dict[str, str]:
        config, facts = self.config, {"": repr(self.name)}
        with contextlib.suppress(ConfigError):  # its kind is not registered
            facts["method"] = self.method
        if (layer := getattr(config, "layer", None)) is not None:
            facts["layer"] = f"{_family(layer)} × {layer.hidden_size}"
        facts["target"] = f"{config.target_vocab_size:,} ids × {config.target_hidden_size}"
        facts["taps"] = ", ".join(map(str, config.taps))
        return facts | _weights(self.params, self.num_params)

    def head(self, target: Model) -> Head | None:
        """Its functions for a target with its taps; None of modules that draft one step each."""
        return self.kind.head and self.kind.head(self.config, target)

    def save(
        self,
        directory: str | pathlib.Path,
        target: LoadedModel,
        *,
        format: str | None = None,
        dtype: str | None = None,
        num_speculative_tokens: int = 3,
    ) -> None:
        """Writes a directory that ``load_draft`` reads as the same head.

        Args:
          directory: a directory for the head alone, created if absent; its files are overwritten.
          target: the model that it drafts for.
          format: a checkpoint format of the kind, such as "SpecForge" or "speculators"; by default
            the first that can express the whole config.
          dtype: the dtype of the stored tensors; by default the weights' own.
          num_speculative_tokens: tokens drafted a round, for formats that state it.

        Raises:
          ConfigError: the format cannot express the head's config.
          WeightsError: a weight is missing or has another shape.
        """
        options = {"dtype": dtype, "num_speculative_tokens": num_speculative_tokens}
        self.kind.write(self, pathlib.Path(directory), target, format=format, **options)


def _family(config: AnyConfig) -> str:
    name = type(config).__name__.removesuffix("Config").lower()
    return getattr(config, "model_type", name)


def _weights(params: Params, count: int | None) -> dict[str, str]:
    """What is known of a model's weights, in words."""
    if params is None:
        return {"weights": "none"}
    leaves = [x for x in jax.tree.leaves(params) if hasattr(x, "dtype")]
    count = sum(x.size for x in leaves) if count is None else count
    facts = {"parameters": count_text(count)}
    if leaves:
        facts["dtype"] = max(leaves, key=lambda x: x.size).dtype.name
    mesh = mesh_of(params)
    if mesh is not None:
        facts["mesh"] = mesh_text(mesh)
    return facts


def _num_rows(method: str, batch: int | None, num_draft: int, tree) -> int | None:
    width = registry.find(method).pass_width(num_draft, tree)
    return None if batch is None else batch * width
