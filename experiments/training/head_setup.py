"""From a config to a head: its shape, its initial weights, its objective, its export."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from configs import train_head_default
from spec_jax.data.batches import Corpus, count_tokens, draft_vocabulary
from spec_jax.drafters import registry
from spec_jax.errors import ConfigError
from spec_jax.fitting import initializer
from spec_jax.loading import LoadedHead, LoadedModel, load_draft
from spec_jax.models.params import table_placement
from spec_jax.models.tensors import on_host
from spec_jax.sharding import Rules
from spec_jax.train.placement import Placement


class HeadSpec(NamedTuple):
    """A head to train.

    Attributes:
      name: The name of the objective.
      config: The shape of the head.
      init: ``(key, target's params, given) -> params``, the trained parameters.
      given: The parameters to continue from, on the devices that train them; None for a new head.
      constants: The parameters that are not trained: ``d2t``, or none.
      objective: ``(params, batch, target's params) -> (loss, figures)``, the training loss.
      measure: The same without noise, for evaluation.
      num_params: The number of trained parameters.
    """

    name: str
    config: registry.HeadConfig
    init: Callable[[jax.Array, Any, Any], Any]
    given: Any | None
    constants: dict[str, jax.Array]
    objective: Callable[..., tuple[jax.Array, dict]]
    measure: Callable[..., tuple[jax.Array, dict]]
    num_params: int

    def shardings(self, mesh: Mesh, rules: Rules) -> Any:
        """Returns where the trained parameters lie on a mesh, nested as they are.

        Args:
          mesh: The devices.
          rules: Which dimensions are split.

        Raises:
          ConfigError: The mesh does not divide the heads of the layer.
        """
        table = registry.kind_of(self.config).table(self.config)
        return table_placement(
            self.name, getattr(self.config, "layer", None), table, mesh, rules
        )

    def loaded(self, params) -> LoadedHead:
        """Returns the head as the decoder takes it."""
        return LoadedHead(self.name, self.config, {**params, **self.constants})

    def layout(self, target: LoadedModel, config: ConfigDict) -> str | None:
        """Returns the layout of the export: the config's, or the first that can describe the head.

        Raises:
          ConfigError: No layout can.
        """
        kind = registry.kind_of(self.config)
        asked, num_draft = config.export_layout or None, config.eval.num_draft
        return kind.pick_layout(self.config, target, asked, num_draft)

    def export(self, folder: pathlib.Path, params, target: LoadedModel, config: ConfigDict):
        """Writes the head in the layout that the config names."""
        self.loaded(params).save(
            folder, target, layout=config.export_layout or None, dtype=config.export_dtype,
            num_speculative_tokens=config.eval.num_draft,
        )  # fmt: skip


def _options(config: ConfigDict, target: LoadedModel) -> dict[str, Any]:
    """Returns the options of ``config.head`` that the objective takes and that are set.

    Raises:
      ConfigError: An option of other objectives is set.
    """
    known = registry.objectives()
    usual = train_head_default.get_config().head
    if config.head.draft_vocab_size == target.config.vocab_size:
        config.head.draft_vocab_size = 0
    for name, value in config.head.items():
        takers = [objective for objective, (_, way) in known.items() if name in way.options]
        if takers and config.objective not in takers and value != usual[name]:
            raise ConfigError(
                f"head.{name} is {value!r}; it is an option of {' and '.join(takers)}, not of "
                f"{config.objective}: leave it {usual[name]!r}"
            )
    _, training = known[config.objective]
    return {name: config.head[name] for name in training.options if config.head[name]}


def _load_given(
    config: ConfigDict, target: LoadedModel, options: dict, size: int, placement: Placement
) -> LoadedHead:
    """Loads the head to continue from; each process reads what its own devices hold."""
    kind, training = registry.objectives()[config.objective]
    given = load_draft(
        config.head.init_from, target, "float32", method=kind.name, mesh=placement.mesh,
        rules=placement.rules, **options,
    )  # fmt: skip
    if not training.trains(given.config):
        others = [name for name, way in kind.training.items() if way.trains(given.config)]
        raise ConfigError(
            f"head.init_from is {given.name}, a head of {' or '.join(others)}; the objective is "
            f"{config.objective}"
        )
    found = len(given.params["d2t"]) if "d2t" in given.params else target.config.vocab_size
    if size not in (0, found):
        raise ConfigError(f"head.draft_vocab_size is {size}; {given.name} drafts {found} ids")
    return given


def make_head(
    config: ConfigDict, target: LoadedModel, texts: Sequence[Corpus], used: Sequence[Corpus],
    placement: Placement = Placement(),
) -> HeadSpec:
    """Returns the head that a config describes.

    Args:
      config: See ``configs/train_head_default.py``.
      target: The model that the head drafts for.
      texts: All texts, whose ids must be in the target's vocabulary.
      used: The texts that are trained on; a reduced vocabulary has their most frequent tokens.
      placement: Where the head to continue from is read to.

    Raises:
      ConfigError: Options that do not fit, or texts of another vocabulary.
      WeightsError: The head to continue from cannot be read.
    """  # fmt: skip
    found = [count_tokens(text, target.config.vocab_size) for text in texts]
    counts = sum(x for x, text in zip(found, texts) if any(text is one for one in used))
    kind, training = registry.objectives()[config.objective]
    objective, options = training.load_objective(), _options(config, target)
    size, given, constants = options.pop("draft_vocab_size", 0), None, {}
    if config.head.init_from:
        head = _load_given(config, target, options, size, placement)
        shape = head.config
        given, constants = objective.split(head.params)
        constants = jax.tree.map(lambda x: jnp.asarray(on_host(x)), constants)
        # copies: a training step donates
        init = lambda key, target_params, given: jax.tree.map(jnp.array, given)
    else:
        reduced = {"draft_vocab_size": size} if size else {}
        shape = training.new(target.config, **reduced, **options)
        if reduced:
            constants = {"d2t": jnp.asarray(draft_vocabulary(counts, size))}
        fresh = initializer(kind, objective, shape, target, constants, config.head.is_warm_start)
        init = lambda key, target_params, given: fresh(key, target_params)

    bind = lambda options: objective.bind(shape, target.model, options, constants)
    sizes = jax.eval_shape(init, jax.random.key(0), target.params, given)
    num_params = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(sizes))
    spec = HeadSpec(
        config.objective, shape, init, given, constants, bind(config.loss),
        bind({**config.loss, "noise": 0.0}), num_params,
    )  # fmt: skip
    spec.layout(target, config)  # what could not be exported is refused before it is trained
    return spec
