"""A head that drafts for a model, with its weights; and what a decoder takes of a draft."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spec_jax.contracts import Head, Model
from spec_jax.drafters import registry
from spec_jax.drafters.common.vocabulary import resized
from spec_jax.errors import ConfigError
from spec_jax.meshes import on_automatic_axes, to_mesh
from spec_jax.models.checks import require
from spec_jax.models.cpu_layout import CpuLayout
from spec_jax.models.loaded import LoadedModel, family_name, weight_facts
from spec_jax.models.params import Params, flat_table, head_counts, table_placement
from spec_jax.sharding import SHARDED, AxisRules, place, unsplit_weights
from spec_jax.show.summary import ReprMixin
from spec_jax.tree import AnyTree


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedHead(ReprMixin):
    """A head of any kind, or MTP modules, and their weights.

    Attributes:
      name: where it was loaded from.
      config: its shape and meaning, its ``taps`` among them; its type says the kind.
      params: what the drafter takes as ``params["head"]``.
      notes: sentences on how an ambiguous checkpoint was read.
      format: the checkpoint format that it was read from; None: it was not read.
      stated_length: maximum tokens of a row, in place of the config's; None: the config's.
    """

    name: str
    config: registry.HeadConfig
    params: Params
    notes: tuple[str, ...] = ()
    format: str | None = None
    stated_length: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "params", on_automatic_axes(self.params))

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
        self.kind.head.check_params(self.config, self.params, f"head {self.name}: ")

    @property
    def max_length(self) -> int:
        """Maximum tokens of a row, prompt and output together."""
        return self.config.max_length if self.stated_length is None else self.stated_length

    @functools.cached_property
    def cpu_layout(self) -> CpuLayout:
        """The weights as passes read them on a CPU, see ``LoadedModel``."""
        spec = self.kind.head
        named = flat_table(spec.table(self.config)).items()
        embeddings = {name.rpartition(".")[2] for name, one in named if one.axes[:1] == ("vocab",)}
        has_panels = spec.has_panels(self.config)
        return CpuLayout(self.params, has_panels=has_panels, embeddings=embeddings)

    def on_mesh(self, mesh: Mesh | str, axis_rules: AxisRules = SHARDED) -> LoadedHead:
        """Returns the head with its weights on a mesh, see ``LoadedModel``."""
        mesh = to_mesh(mesh)
        layer = registry.layer_of(self.config)
        table = self.kind.head.table(self.config)
        shardings = table_placement(self.name, layer, table, mesh, axis_rules)
        whole = NamedSharding(mesh, PartitionSpec())  # of what is in no table
        where = {name: shardings.get(name, whole) for name in self.params}
        return dataclasses.replace(self, params=place(self.params, where))

    def with_vocab(self, vocab_size: int) -> LoadedHead:
        """Returns the head for a target whose embedding is padded to another size.

        Weights of each of the target's ids are cut, or padded with zeros; further ids never were
        tokens. On a mesh, place the result by ``on_mesh``.

        Args:
          vocab_size: V of the target.
        """
        old = self.config.target_vocab_size
        layer = registry.layer_of(self.config)
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

        params = put(self.kind.head.table(self.config), self.params)
        config = dataclasses.replace(self.config, **changes)
        return dataclasses.replace(self, config=config, params=params)

    def unsplit_weights(self, mesh: Mesh, axis_rules: AxisRules = SHARDED) -> list[str]:
        """Returns a sentence for each size that the mesh does not divide, see ``on_mesh``."""
        layer = registry.layer_of(self.config)
        table = self.kind.head.table(self.config)
        return unsplit_weights(self.name, table, mesh, axis_rules, head_counts(layer))

    @property
    def num_params(self) -> int:
        """Number of its own parameters, without those that it shares with the target."""
        return sum(w.size for w in jax.tree.leaves(self.params))

    def _repr_fields(self) -> dict[str, str]:
        config = self.config
        facts = {"": repr(self.name)}
        with contextlib.suppress(ConfigError):  # its kind is not registered
            facts["method"] = self.method
        if (layer := registry.layer_of(config)) is not None:
            facts["layer"] = f"{family_name(layer)} × {layer.hidden_size}"
        facts["target"] = f"{config.target_vocab_size:,} ids × {config.target_hidden_size}"
        facts["taps"] = ", ".join(map(str, config.taps))
        return facts | weight_facts(self.params, self.num_params)

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

        Example:
          ```python
          import tempfile

          import spec_jax

          target = spec_jax.load_model("zoo/target")
          head = spec_jax.load_draft("zoo/eagle3", target)
          with tempfile.TemporaryDirectory() as directory:
              head.save(directory, target, format="speculators", dtype="bfloat16")
              print(spec_jax.load_draft(directory, target).format)
          ```

        Args:
          directory: a directory for the head alone, created if absent; its files are overwritten.
          target: the model that it drafts for.
          format: a checkpoint format of the kind, such as "SpecForge" or "speculators"; by default
            the first that can express the whole config.
          dtype: the dtype of the stored tensors; by default the weights' own.
          num_speculative_tokens: tokens drafted a round, for formats that state it.

        Raises:
          ConfigError: the format cannot express the head's config, the kind has none, or a file is
            in the way.
          WeightsError: a weight is missing or has another shape.
        """
        write = self.kind.format.write
        message = f"{self.name} cannot be saved: its kind {self.method!r} has no `write`"
        require(write is not None, message)
        options = {"dtype": dtype, "num_speculative_tokens": num_speculative_tokens}
        write(self, pathlib.Path(directory), target.for_heads, format=format, **options)


def of_target(name: str, target: LoadedModel) -> LoadedHead | None:
    """Returns the head that a name such as "self:8" makes of a target; None for other names.

    Args:
      name: of the draft.
      target: what it drafts for.

    Raises:
      ConfigError: it cannot be made of this target.
    """
    config = registry.config_of_target(name, target.config)
    return None if config is None else LoadedHead(name, config, {})


def tapped_model(target: LoadedModel, draft: LoadedModel | LoadedHead | None) -> Model:
    """Returns the target's functions, with the states that the draft reads.

    Args:
      target: the target.
      draft: the model or head that drafts for it, or None.

    Raises:
      ConfigError: the head is for another target, or the target cannot be tapped.
      WeightsError: the head's weights are not those of its config.
    """
    if draft is None or registry.find(draft.method).head is None:
        return target.model
    sizes = (target.sizes.hidden_size, target.sizes.vocab_size)
    theirs = (draft.config.target_hidden_size, draft.config.target_vocab_size)
    if sizes != theirs:
        raise ConfigError(
            f"head {draft.name} is for a target of width {theirs[0]} and {theirs[1]} ids; "
            f"{target.name} is of width {sizes[0]} and has {sizes[1]} ids"
        )
    draft.check_params()
    return target.model.with_taps(draft.config.taps)


def head_of(draft: LoadedModel | LoadedHead, target: Model) -> Head | None:
    """Returns the functions of a head that drafts every token, for a target with its taps.

    Args:
      draft: a draft of any kind.
      target: the model that it drafts for.

    Returns:
      None for models, and for heads whose drafter is not made of a ``Head``.
    """
    spec = registry.find(draft.method).head
    return spec and spec.functions and spec.functions(draft.config, target)


def draft_params(
    draft: LoadedModel | LoadedHead,
    target: Params,
    batch: int | None,
    num_draft: int,
    tree: AnyTree | None = None,
) -> Any:
    """Returns the parameters of the drafter that a draft makes, laid out for its passes.

    Args:
      draft: a draft of any kind.
      target: the target's parameters, which heads share.
      batch: number of rows that are decoded together; None: any.
      num_draft: K.
      tree: the shape of the drafts; None: a chain.
    """
    drafting = registry.find(draft.method).drafting
    rows = None if batch is None else batch * drafting.width(draft.config, num_draft, tree)
    return beside_target(draft, draft.cpu_layout.prepare(rows), target)


def beside_target(draft: LoadedModel | LoadedHead, params: Params, target: Params) -> Any:
    """Returns a draft's parameters as its drafter takes them: a head's beside the target's."""
    has_head = registry.find(draft.method).head is not None
    return {"head": params, "target": target} if has_head else params
