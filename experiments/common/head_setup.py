"""From a config to a head: its shape, its fresh weights, its objective, its export."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from spec_jax.data.batches import Corpus, count_tokens, draft_vocabulary
from spec_jax.drafters.common.warm_start import from_target
from spec_jax.drafters.eagle.model import EagleConfig, draft_ids, init_head
from spec_jax.drafters.eagle.objective import EAGLE1, EAGLE3
from spec_jax.drafters.eagle.write import write_head
from spec_jax.drafters.eagle.write_config import head_json
from spec_jax.drafters.mtp.model import MtpConfig, init_mtp
from spec_jax.drafters.mtp.objective import MTP
from spec_jax.drafters.mtp.write import write_mtp
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead, LoadedModel, load_head, load_mtp

# The layouts that each objective's head can be exported to, the first by default.
LAYOUTS = {
    "eagle1": ("EAGLE-1",),
    "eagle3": ("SpecForge", "EAGLE-3", "speculators"),
    "mtp": (),  # what the module's own layer implies
}
OBJECTIVES = {objective.name: objective for objective in (EAGLE1, EAGLE3, MTP)}


class HeadSpec(NamedTuple):
    """A head to train.

    Attributes:
      name: the objective's.
      config: its shape.
      init: ``(key) -> params``, all of them trained.
      constants: what is the head's and not trained: ``d2t``, or nothing.
      objective: ``(params, batch, target's params) -> (loss, figures)``, to train by.
      measure: the same without noise, to evaluate by.
      num_params: that are trained.
    """

    name: str
    config: EagleConfig | MtpConfig
    init: Callable[[jax.Array], Any]
    constants: dict[str, jax.Array]
    objective: Callable[..., tuple[jax.Array, dict]]
    measure: Callable[..., tuple[jax.Array, dict]]
    num_params: int

    def loaded(self, params) -> LoadedHead:
        """The head as the decoder takes it."""
        return LoadedHead(self.name, self.config, {**params, **self.constants})

    def layout(self, target: LoadedModel, config: ConfigDict) -> str | None:
        """The layout to export to: the config's, else the first that has words for the head.

        Raises:
          ConfigError: none has.
        """
        names = (config.export_layout,) if config.export_layout else LAYOUTS[self.name]
        for name in names:
            try:
                head_json(
                    self.config, name, target.config, verifier=target.name,
                    num_speculative_tokens=config.eval.num_draft,
                )  # fmt: skip
                return name
            except ConfigError as error:
                refusal = error
        if names:
            raise refusal
        return None

    def export(self, folder: pathlib.Path, params, target: LoadedModel, config: ConfigDict):
        """Writes the head in the layout that the config names."""
        params = {**params, **self.constants}
        options = dict(target_config=target.config, dtype=config.export_dtype)
        if isinstance(self.config, MtpConfig):
            write_mtp(folder, self.config, params, **options)
            return
        layout = self.layout(target, config)
        options |= dict(layout=layout, num_speculative_tokens=config.eval.num_draft)
        if layout == "speculators":
            options |= dict(target_embed=target.params["embed"], verifier=target.name)
        write_head(folder, self.config, params, **options)


def _check_given(head: LoadedHead, version: int, draft_vocab_size: int) -> None:
    if head.config.version != version:
        raise ConfigError(
            f"head.init_from is {head.name}, an EAGLE-{head.config.version} head; the objective is "
            f"eagle{version}"
        )
    size = head.config.layer.vocab_size
    if draft_vocab_size not in (0, size):
        raise ConfigError(
            f"head.draft_vocab_size is {draft_vocab_size}; {head.name} drafts {size} ids"
        )


def make_head(
    config: ConfigDict, target: LoadedModel, texts: Sequence[Corpus], used: Sequence[Corpus]
) -> HeadSpec:
    """Reads a config.

    Args:
      config: of ``configs/train_head_default.py``.
      target: what the head drafts for.
      texts: all that are given; their ids must be the target's.
      used: those that are trained on; their most frequent tokens make a reduced vocabulary.

    Raises:
      ConfigError: a head that cannot be, or texts of another vocabulary.
      WeightsError: the head to go on from cannot be read.
    """
    loss, options, model = config.loss, config.head, target.model
    found = [count_tokens(text, target.config.vocab_size) for text in texts]
    counts = sum(x for x, text in zip(found, texts) if any(text is one for one in used))
    size = options.draft_vocab_size or target.config.vocab_size
    taps = {"taps": tuple(options.taps)} if options.taps else {}
    if size != target.config.vocab_size and config.objective != "eagle3":
        raise ConfigError(
            f"head.draft_vocab_size is {size}; {config.objective} drafts all of the target's "
            f"{target.config.vocab_size} ids: set it to 0"
        )
    if config.objective == "eagle1" and taps:
        raise ConfigError(
            f"head.taps are {tuple(options.taps)}; eagle1 reads the state after the final norm"
        )
    norms = {"norm_before_residual": True} if options.norm_before_residual else {}
    if norms and config.objective != "eagle3":
        raise ConfigError(
            f"head.norm_before_residual is set; it is an option of eagle3, not {config.objective}"
        )
    objective, constants, given = OBJECTIVES[config.objective], {}, None
    if config.objective == "mtp":
        changes = {"num_modules": options.num_modules, "protocol": options.protocol} | taps
        if options.init_from:
            given = load_mtp(options.init_from, target, "float32", **changes)
        shape = given.config if given else MtpConfig.of_target(target.config, **changes)
        fresh = functools.partial(init_mtp, shape)
    else:
        version = int(config.objective[-1])
        if options.init_from:
            given = load_head(options.init_from, target, "float32", **taps, **norms)
            _check_given(given, version, options.draft_vocab_size)
        shape = (
            given.config if given
            else EagleConfig.of_target(target.config, version, size, **taps, **norms)
        )  # fmt: skip
        if given is None and size < target.config.vocab_size:
            constants = {"d2t": jnp.asarray(draft_vocabulary(counts, size))}
        fresh = functools.partial(init_head, shape)

    def init(key):
        params, _ = objective.split(fresh(key))
        if not options.is_warm_start:
            return params
        return from_target(params, target.params, target.config, draft_ids(constants))

    if given is not None:
        weights, constants = objective.split(given.params)
        init = lambda key: jax.tree.map(jnp.array, weights)  # copies: a training step donates

    bind = lambda options: objective.bind(shape, model, options, constants)
    sizes = jax.eval_shape(init, jax.random.key(0))
    num_params = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(sizes))
    spec = HeadSpec(
        config.objective, shape, init, constants, bind(loss), bind({**loss, "noise": 0.0}),
        num_params,
    )  # fmt: skip
    spec.layout(target, config)  # what could not be exported is refused before it is trained
    return spec
