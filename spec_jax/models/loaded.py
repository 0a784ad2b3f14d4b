"""A model with its weights and its tokenizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from spec_jax.config import SamplerConfig
from spec_jax.contracts import Model
from spec_jax.meshes import mesh_of, mesh_text, on_automatic_axes, to_mesh
from spec_jax.models import transformer
from spec_jax.models.checks import naming, require
from spec_jax.models.config import ModelConfig
from spec_jax.models.cpu_layout import CpuLayout
from spec_jax.models.families import AnyConfig, family_of
from spec_jax.models.params import (
    Params,
    assemble_named,
    head_counts,
    num_params,
    param_table,
    placement,
)
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.sharding import SHARDED, AxisRules, place, unsplit_weights
from spec_jax.show.summary import ReprMixin, count_text


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedModel(ReprMixin):
    """A model's functions, its weights and its tokenizer.

    Attributes:
      name: where it was loaded from.
      model: its functions.
      params: its weights.
      tokenizer: None: prompts are ids.
      config: None for a custom model (see ``spec_jax.testing`` for small ones).
      stop_tokens: ids that end a row.
      method: the name of the drafter kind that drafts with it, where it is a draft.
      notes: sentences on how an ambiguous checkpoint was read.
      generation_config: the object of generation_config.json; None: there is none.
      source: name, maker and licence, where the file of the weights says so.
      stated_length: maximum tokens of a row that it drafts for, in place of its own; None: its own.
    """

    name: str
    model: Model
    params: Params
    tokenizer: Tokenizer | None = None
    config: AnyConfig | None = None
    stop_tokens: tuple[int, ...] = ()
    method: str = "standalone"
    notes: tuple[str, ...] = ()
    generation_config: Mapping[str, Any] | None = None
    source: str | None = None
    stated_length: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "params", on_automatic_axes(self.params))

    @property
    def max_length(self) -> int:
        """Maximum tokens of a row, prompt and output together."""
        return self.model.max_length if self.stated_length is None else self.stated_length

    @functools.cached_property
    def cpu_layout(self) -> CpuLayout:
        """The weights as passes read them on a CPU: ``cpu_layout.prepare(rows)``."""
        if self.config is None:
            return CpuLayout(self.params)
        is_tied = self.config.tie_word_embeddings
        has_panels = family_of(self.config).has_panels
        return CpuLayout(self.params, is_tied=is_tied, has_panels=has_panels)

    @functools.cached_property
    def sizes(self) -> AnyConfig:
        """The config that heads take their sizes from.

        Of a custom model it is a Llama's of the same width, ids, layers and length, with attention
        heads of 64 dimensions or as near above that as divides the width.

        Raises:
          ConfigError: heads cannot draft for the model.
        """
        if self.config is not None:
            return self.config
        model = self.model.with_taps(())  # refuses one that cannot be tapped
        V, D = jax.eval_shape(lambda params: model.embedding(params), self.params).shape
        most = max(1, D // 64)
        return ModelConfig(
            vocab_size=V,
            hidden_size=D,
            intermediate_size=3 * D,
            num_hidden_layers=model.num_layers,
            num_attention_heads=max(n for n in range(1, most + 1) if D % n == 0),
            max_position_embeddings=self.max_length,
        )

    @property
    def for_heads(self) -> LoadedModel:
        """The model as files of heads know it: a custom one has ``sizes`` and its two ends alone.

        Raises:
          ConfigError: heads cannot draft for the model.
        """
        if self.config is not None:
            return self
        return dataclasses.replace(self, config=self.sizes, params=self.model.ends(self.params))

    @classmethod
    def from_params(
        cls,
        config: AnyConfig,
        leaf: Callable[[str, int | None], Any],
        *,
        dtype: DTypeLike = "float32",
        tokenizer: Tokenizer | None = None,
        stop_tokens: Sequence[int] = (),
        name: str = "from_params",
    ) -> LoadedModel:
        """Makes a model of one of the package's families from weights of any origin.

        Example:
          ```python
          import jax
          import spec_jax
          from spec_jax.models.config import ModelConfig
          from spec_jax.models.params import declared

          config = ModelConfig(
              vocab_size=64,
              hidden_size=32,
              intermediate_size=48,
              num_hidden_layers=2,
              num_attention_heads=4,
              num_key_value_heads=2,
          )
          key = jax.random.key(0)
          shapes = {(name, layer): spec.shape for name, spec, layer in declared(config)}
          theirs = {at: 0.1 * jax.random.normal(key, shape) for at, shape in shapes.items()}

          target = spec_jax.LoadedModel.from_params(config, lambda *at: theirs[at])
          print(target)
          ```

        Args:
          config: the model's shape. With ``scan_layers`` layers that repeat are stacked.
          leaf: ``(name, layer) -> array``: one weight, by our name and the number of its layer,
            None outside of the layers. ``models.params.declared(config)`` yields all names and
            shapes: linear maps are ``[in, out]``, and rotary dimensions come in halves, as in
            transformers.
          dtype: of the weights, and of the cache.
          tokenizer: to decode text; None: prompts are ids.
          stop_tokens: ids that end a row.
          name: the model's name in messages and reports.

        Raises:
          WeightsError: ``leaf`` raises a KeyError or returns None, an array of another shape or one
            that is not finite; the message lists all such weights. ``leaf`` raises another error.
        """
        params = assemble_named(config, leaf, dtype, name)
        num_tokens = tokenizer and min(tokenizer.num_ids, config.vocab_size)
        model = transformer.model(config, num_tokens=num_tokens)
        return cls(name, model, params, tokenizer, config, tuple(stop_tokens))

    def with_chat_template_kwargs(self, variables: Mapping[str, Any] | None) -> LoadedModel:
        """Returns the model whose chat template reads these variables in every conversation.

        Args:
          variables: see ``Tokenizer.with_chat_template_kwargs``.

        Raises:
          ConfigError: there is no tokenizer, or it is no mapping.
        """
        if not variables:
            return self
        require(
            self.tokenizer is not None, f"{self.name} has no tokenizer, so it has no chat template"
        )
        tokenizer = self.tokenizer.with_chat_template_kwargs(variables)
        return dataclasses.replace(self, tokenizer=tokenizer)

    def stated_sampler(self) -> SamplerConfig:
        """Returns how generation_config.json says that tokens are drawn.

        Raises:
          ConfigError: there is no such file, or it states an option that is not supported.
        """
        why = "which sampler='model' reads; give a SamplerConfig"
        has_file = self.generation_config is not None
        require(has_file, f"{self.name} has no generation_config.json, {why}")
        with naming(f"generation_config.json of {self.name}"):
            return SamplerConfig.from_generation_config(self.generation_config)

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

    def unsplit_weights(self, mesh: Mesh, axis_rules: AxisRules = SHARDED) -> list[str]:
        """Returns a sentence for each size that the mesh does not divide, see ``on_mesh``."""
        if self.config is None:
            return []
        counts = head_counts(self.config)
        table = param_table(self.config)
        return unsplit_weights(self.name, table, mesh, axis_rules, counts)

    @property
    def num_params(self) -> int | None:
        return None if self.config is None else num_params(self.config)

    def _repr_fields(self) -> dict[str, str]:
        facts = {"": repr(self.name)}
        if self.config is not None:
            facts["family"] = family_name(self.config)
            facts["layers"] = f"{self.config.num_hidden_layers} × {self.config.hidden_size}"
        facts["vocabulary"] = f"{self.model.last_id + 1:,}"
        return facts | weight_facts(self.params, self.num_params)


def family_name(config: AnyConfig) -> str:
    """Returns the name of a config's family, for tables."""
    name = type(config).__name__.removesuffix("Config").lower()
    return getattr(config, "model_type", name)


def weight_facts(params: Params, count: int | None) -> dict[str, str]:
    """Returns what is known of weights, in words.

    Args:
      params: the weights, or None.
      count: the number of parameters; None: of the weights' elements.
    """
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
