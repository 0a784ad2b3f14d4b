"""What the objectives of all heads share: the record, the batch, and figures by position."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.contracts import Model
from spec_jax.models.checks import require
from spec_jax.train.least_squares import Start
from spec_jax.train.means import Mean
from spec_jax.train.unroll import shifted


@flax.struct.dataclass
class View:
    """The target's states on a batch, as an objective reads them. No gradient flows through."""

    features: jax.Array | None  # dtype[B,W,E], the tapped states
    hidden: jax.Array  # dtype[B,W,D], after the final norm; row t predicts token t + 1


@flax.struct.dataclass
class Batch:
    """Windows of text, and the tokens in them that are to be predicted."""

    tokens: jax.Array  # i32[B,W]
    mask: jax.Array  # bool[B,W], True where the token is to be predicted
    key: jax.Array  # of the step, or key[B] of its rows, see ``row_keys``
    view: View | None = None
    # i32[B,W], the column in which each token's document begins. A document is a text by itself:
    # its tokens see no other, its positions begin at 0, and no draft runs from one into the next.
    # None: a window is one document.
    begins: jax.Array | None = None

    def place(self, shift: int, num_rows: int) -> jax.Array:
        """i32[B|1,T], in its document, the place of the token ``shift`` columns after row t."""
        columns = jnp.arange(shift, shift + num_rows)[None]
        return columns if self.begins is None else columns - shifted(self.begins, shift, num_rows)


def row_keys(key: jax.Array, num_rows: int) -> jax.Array:
    """Returns key[B], one for each row of a step: what a row draws depends on its number alone.

    Args:
      key: of the step, or key[B], which is returned.
      num_rows: B.
    """
    if key.ndim:
        return key
    return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_rows))


class Objective(NamedTuple):
    """How a kind of head is trained. Each is defined in ``drafters/*/objective.py``.

    Attributes:
      name: What configs and reports call it.
      loss: ``(head, batch, target, *, config, model, counts=None, **options) -> (loss f32[],
        figures)``, a pure function: ``head`` is trained, ``target`` holds the target's weights,
        which stay as they are, ``config`` is the head's shape and ``model`` the target's functions.
        Its figures are arrays or ``Mean``s by name. Among them ``terms`` has a ``Mean`` by name,
        and the loss is the sum of all these means; if ``counts`` are given, each term is divided by
        its entry there instead, so that the losses of several batches add up to that of all.
      constants: The names of parameters that belong to the head and are not trained.
      drafts: ``(params, features dtype[B,T+2,E], tokens i32[B,T+2], num_draft, *, config, model)
        -> i32[K,B,T]``, of heads that are not unrolled: the likeliest drafts in the places after
        token t + 1, each given the text's tokens before it. ``params`` are the head's and the
        target's, by these names. None if there is no such function.
      start: ``(config) -> Start | None``, how heads of a config begin with a map of least squares.
        None if none does.
    """

    name: str
    loss: Callable[..., tuple[jax.Array, dict]]
    constants: tuple[str, ...] = ()
    drafts: Callable[..., jax.Array] | None = None
    start: Callable[[Any], Start | None] | None = None

    @property
    def options(self) -> frozenset[str]:
        """The names of the loss's options."""
        known = inspect.signature(self.loss).parameters.values()
        named = {p.name for p in known if p.kind is p.KEYWORD_ONLY or p.default is not p.empty}
        return frozenset(named - {"config", "model", "counts"})

    def known(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of some options that the loss has, such as defaults for all objectives."""
        return {name: value for name, value in options.items() if name in self.options}

    def bind(
        self,
        config: Any,
        model: Model,
        options: Mapping[str, Any],
        constants: Mapping[str, jax.Array],
    ) -> Callable[[dict, Batch, dict], tuple[jax.Array, dict]]:
        """Returns the loss as ``train_step`` takes it.

        Args:
          config: The head's shape.
          model: The target's functions.
          options: Options of the loss.
          constants: The head's parameters that are not trained.

        Returns:
          ``(params, batch, target, counts=None) -> (loss, figures)``, where ``params`` are
          trained.

        Raises:
          ConfigError: The loss has no such option.
        """
        known = ", ".join(sorted(self.options)) or "none"
        for name in options:
            message = f"{name} is not an option of the objective {self.name}; its options: {known}"
            require(name in self.options, message)
        loss = functools.partial(self.loss, config=config, model=model, **options)

        def run(params, batch, target, counts=None):
            given = {} if counts is None else {"counts": counts}
            return loss({**params, **constants}, batch, target, **given)

        return run

    def split(self, params: Mapping[str, Any]) -> tuple[dict, dict]:
        """Splits a head's parameters into those that are trained and the constants."""
        trained = {name: w for name, w in params.items() if name not in self.constants}
        return trained, {name: w for name, w in params.items() if name in self.constants}


def target_view(
    target: dict,
    tokens: jax.Array,
    begins: jax.Array | None = None,
    *,
    model: Model,
    taps: tuple[int, ...],
) -> View:
    """Runs the target over whole windows: without a cache, or with one that nothing is read from.

    Args:
      target: The target's weights.
      tokens: i32[B,W].
      begins: See ``Batch``; custom models take none.
      model: The target's functions.
      taps: The states to keep, see ``Model.embedding``.

    Raises:
      ConfigError: The model has no such states, or a sequence has several documents and the model
        cannot keep them apart.
    """
    forward = model.with_taps(taps).forward if taps else model.forward
    if model.takes("begins"):
        out = forward(target, tokens, None, begins=begins)
    else:
        require(begins is None, "forward of the target takes no `begins`: it mixes documents")
        out = forward(target, tokens, model.init_cache(target, *tokens.shape))
    return jax.lax.stop_gradient(View(out.features, out.hidden))


def with_view(
    loss: Callable[..., tuple[jax.Array, dict]], model: Model, taps: tuple[int, ...]
) -> Callable[..., tuple[jax.Array, dict]]:
    """Returns a loss that computes the target's states of batches that have none.

    Args:
      loss: ``(params, batch, target, counts=None) -> (loss, figures)``, of ``Objective.bind``.
      model: The target's functions.
      taps: The states that the loss reads, see ``Model.embedding``.
    """

    def run(params, batch, target, counts=None):
        if batch.view is None:
            view = target_view(target, batch.tokens, batch.begins, model=model, taps=taps)
            batch = batch.replace(view=view)
        return loss(params, batch, target, counts)

    return run


def chain_figures(drafts: list[jax.Array], batch: Batch, weights: list[jax.Array]) -> dict:
    """Counts by position how often the text's own token was drafted, teacher-forced.

    A position is reached if every draft before it was the text's token. So on text that the
    target wrote greedily, the share is the conditional acceptance of greedy decoding.

    Args:
      drafts: i32[B,T] by step, the likeliest token for the place of token t + 2 + j.
      batch: The windows.
      weights: bool[B,T] by step, the rows that count.

    Returns:
      ``teacher_forced_accept``, the share f32[K] of the drafts reached that were the text's token.
      What real decoding accepts is another figure.
    """
    T = drafts[0].shape[1]
    is_reached = jnp.ones(drafts[0].shape, bool)
    reached = []
    hits = []
    for step, (draft, weight) in enumerate(zip(drafts, weights)):
        is_reached &= weight
        reached.append(is_reached.sum())
        is_reached &= draft == shifted(batch.tokens, 2 + step, T)
        hits.append(is_reached.sum())

    def count(x):
        return jnp.stack(x).astype(jnp.float32)

    return {"teacher_forced_accept": Mean(count(hits), count(reached))}
