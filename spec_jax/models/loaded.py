"""A model with its weights and its tokenizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spec_jax.config import SamplerConfig
from spec_jax.contracts import Model
from spec_jax.meshes import mesh_of, mesh_text, to_mesh
from spec_jax.models.checks import naming, require
from spec_jax.models.cpu_layout import CpuLayout
from spec_jax.models.families import AnyConfig, family_of
from spec_jax.models.params import Params, head_counts, num_params, param_table, placement
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

    @property
    def max_length(self) -> int:
        """Maximum tokens of a row, prompt and output together."""
        return self.model.max_length

    @functools.cached_property
    def cpu_layout(self) -> CpuLayout:
        """The weights as passes read them on a CPU: ``cpu_layout.prepare(rows)``."""
        if self.config is None:
            return CpuLayout(self.params)
        is_tied = self.config.tie_word_embeddings
        has_panels = family_of(self.config).has_panels
        return CpuLayout(self.params, is_tied=is_tied, has_panels=has_panels)

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
