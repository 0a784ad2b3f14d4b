"""From logits to a distribution to a token, by the sampling parameters of each row."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import rng
from spec_jax.config import GREEDY_BELOW, SamplerConfig, columns
from spec_jax.config.checks import check, is_integer
from spec_jax.config.sampler import options
from spec_jax.errors import ConfigError
from spec_jax.processors import BatchedProcessor, from_configs
from spec_jax.sharding import SAMPLED_ROWS, gather_vocab, shard_map_rows

_FEW = 4  # entries that a TPU finds sooner one by one than by sorting
_NARROW = 128  # logits that top-k and top-p try first; all are sorted only if these do not suffice

Samplers = SamplerConfig | Sequence[SamplerConfig]
"""One config for all rows, or one for each row."""


@flax.struct.dataclass
class Sampler:
    """``SamplerConfig`` as arrays, so that the rows of one batch may differ.

    A feature that no row of the batch uses is absent from the compiled program. The price is a
    compilation for every set of features that is used.
    """

    seed: jax.Array  # u32[B]
    temperature: jax.Array | None = None  # f32[B]; None: every row takes the argmax
    processors: tuple[BatchedProcessor, ...] = ()  # with their states, once the prompts are known
    filters: dict[str, jax.Array] | None = None  # see ``filters_of``
    # Updates that the row's rounds have read, of the drafter's memory and of the choice of K; they
    # enter the row's noise (see ``rng``). None where nothing learns from outputs.
    update_counts: jax.Array | None = None  # u32[B,2]

    def _features(self) -> set[str]:
        """What the compiled program does, in words."""
        columns = {"a temperature": self.temperature, "filters": self.filters}
        names = {f"processor {active.processor.name!r}" for active in self.processors}
        return {name for name, column in columns.items() if column is not None} | names

    @property
    def is_greedy(self) -> jax.Array:
        """bool[B], rows that take the argmax."""
        if self.temperature is None:
            return jnp.ones(self.seed.shape, bool)
        return self.temperature < GREEDY_BELOW

    def keys(
        self, purpose: rng.Purpose, position: jax.Array, node: jax.Array | int | None = None
    ) -> jax.Array:
        """Returns key[B], each row's own, with which noise is drawn.

        Args:
          purpose: what the draw is for.
          position: i32[B], of the token, or where the round starts.
          node: i32[B] or i32[], of a draw that the round makes for each node; None: there is one.
        """
        return rng.keys(self.seed, purpose, position, node, self.update_counts)

    def counting_updates(self) -> Sampler:
        """Returns the sampler with ``update_counts``, of no update yet."""
        counts = jnp.zeros((*self.seed.shape, len(UpdateCounter)), jnp.uint32)
        return self.replace(update_counts=counts)

    def start(self, tokens: jax.Array, lengths: jax.Array, vocab_size: int) -> Sampler:
        """Returns the sampler before the first output token.

        Args:
          tokens: i32[B,T], the prompts, right-padded.
          lengths: i32[B].
          vocab_size: V.
        """

        started = [x.start(tokens, lengths, vocab_size) for x in self.processors]
        return self.replace(processors=tuple(started))

    def advance(self, tokens: jax.Array, n: jax.Array) -> Sampler:
        """Returns the sampler after the first n (i32[B]) of i32[B,P] tokens of each row."""
        return self.replace(processors=tuple(x.advance(tokens, n) for x in self.processors))

    def insert_row(self, row: jax.Array | int, other: Sampler) -> Sampler:
        """Replaces row ``row`` by the only row of ``other``.

        Args:
          row: i32[], which one.
          other: of one row, with the features of this batch: of ``make_sampler`` for all the
            configs that take turns in it, one row.

        Raises:
          ConfigError: only one of the two has a feature.
        """
        for feature in self._features() ^ other._features():
            raise ConfigError(
                f"of the batch and the row to insert, only one has {feature}; make the samplers "
                "of all rows together, and take the row's from them"
            )
        return jax.tree.map(lambda full, one: full.at[row].set(one[0]), self, other)


class UpdateCounter(enum.IntEnum):
    """What learns from outputs: a column of ``Sampler.update_counts``."""

    MEMORY = 0  # of the drafter
    TUNER = 1  # which chooses K


def check_samplers(**samplers: Samplers | None) -> None:
    """Checks that arguments are sampler configs.

    Args:
      **samplers: by name; None is passed over.

    Raises:
      ConfigError: one is neither a ``SamplerConfig`` nor a list of them.
    """
    for name, value in samplers.items():
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        configs = value if is_list else [value]
        is_fit = value is None or all(isinstance(x, SamplerConfig) for x in configs)
        check(is_fit, name, value, "a SamplerConfig(temperature=1.0, ...), or a list of them")


def highest_temperature(configs: Samplers) -> float:
    """Returns the temperature of one config, or the highest of a list.

    Raises:
      ConfigError: the list is empty.
    """
    one = isinstance(configs, SamplerConfig)
    if not one and not configs:
        raise ConfigError("the list of sampler configs is empty; expected one for each row")
    return configs.temperature if one else max(config.temperature for config in configs)


def draft_samplers(
    given: Samplers | None, samplers: Samplers, temperature: float | None
) -> Samplers:
    """Returns how drafts are drawn: as given, or as the target's tokens.

    Args:
      given: by the caller, or None.
      samplers: the target's.
      temperature: the drafter's own, which replaces the target's where that is above 0; None: it
        has none.
    """
    if given or temperature is None:
        return given or samplers
    if isinstance(samplers, SamplerConfig):
        is_greedy = samplers.temperature < GREEDY_BELOW
        return samplers if is_greedy else dataclasses.replace(samplers, temperature=temperature)
    return [draft_samplers(None, sampler, temperature) for sampler in samplers]


def make_samplers(
    samplers: Samplers,
    drafts: Samplers | None,
    batch: int,
    vocab_size: int,
    seeds: Sequence[int] | None = None,
    draft_temperature: float | None = None,
) -> tuple[Sampler, Sampler]:
    """Lays the configs of target and draft out as arrays, see ``make_sampler``.

    Args:
      samplers: the target's.
      drafts: how drafts are drawn; None: as the target's tokens, by ``draft_samplers``. A draft
        sampler's seed is the same in every row: it is folded into the request's (see ``rng``).
      batch: B.
      vocab_size: V.
      seeds: of the requests, one a row; None: the target samplers' own.
      draft_temperature: the drafter's own, see ``draft_samplers``.
    """
    sampler = make_sampler(samplers, batch, vocab_size, seeds)
    if not drafts:
        drafts = draft_samplers(None, samplers, draft_temperature)
        return sampler, make_sampler(drafts, batch, vocab_size, sampler.seed)
    drafts = [drafts] * batch if isinstance(drafts, SamplerConfig) else drafts
    return sampler, make_sampler(drafts, batch, vocab_size)


def make_sampler(
    configs: Samplers, batch: int, vocab_size: int, seeds: Sequence[int] | jax.Array | None = None
) -> Sampler:
    """Lays configs out as arrays.

    Args:
      configs: one for all rows (row i is then seeded ``seed + i``), or one a row.
      batch: B.
      vocab_size: V.
      seeds: of every row, in place of the configs' own; as an array u32[B] also traced.

    Returns:
      The sampler, without the features that no config uses.

    Raises:
      ConfigError: there are not as many configs or seeds as rows, a seed is out of range, or a
        biased id is not in the vocabulary; or two processors have one name.
    """
    if isinstance(configs, SamplerConfig):
        own_seeds = [(configs.seed + i) % 2**32 for i in range(batch)]
        configs = [configs] * batch
    else:
        own_seeds = [c.seed for c in configs]
    if len(configs) != batch:
        raise ConfigError(f"{len(configs)} sampler configs for {batch} rows; expected one each")
    # In float64: float32 rounds some temperatures up to GREEDY_BELOW.
    temperatures = [c.temperature if c.temperature >= GREEDY_BELOW else 0.0 for c in configs]
    return Sampler(
        seed=_seed_column(own_seeds if seeds is None else seeds, batch),
        temperature=jnp.asarray(temperatures, jnp.float32) if any(temperatures) else None,
        processors=from_configs(configs, vocab_size),
        filters=filters_of(configs),
    )


def _seed_column(seeds: Sequence[int] | jax.Array, batch: int) -> jax.Array:
    """Returns seeds as u32[B], checked."""
    if isinstance(seeds, jax.Array) and seeds.dtype == jnp.uint32:  # perhaps traced
        if seeds.shape != (batch,):
            raise ConfigError(f"seeds have shape {seeds.shape}; expected ({batch},)")
        return seeds
    seeds = np.asarray(seeds).tolist()
    are_seeds = isinstance(seeds, list) and all(is_integer(x, 0, 2**32 - 1) for x in seeds)
    is_fit = are_seeds and len(seeds) == batch
    check(is_fit, "seeds", seeds, f"{batch} integers in [0, 2**32), one for each row")
    return jnp.asarray(np.asarray(seeds, np.uint32))


def process(
    logits: jax.Array,
    sampler: Sampler,
    drafted: jax.Array | None = None,
    is_before: jax.Array | None = None,
    *,
    is_argmax: bool = False,
) -> jax.Array:
    """Applies a row's sampling parameters to the logits of T nodes.

    A node sees the row's tokens and the drafts on its way from the root. Source: the logits
    processors of transformers. Top-k and min-p keep all tokens that tie at their threshold, and
    top-p as many as it needs, those of the lowest ids.

    Args:
      logits: f32[B,T,V].
      sampler: parameters by row, with the states of processors after the pending token.
      drafted: i32[B,K], drafted tokens.
      is_before: bool[B|1,T,K], which of them each node sees; None for a chain of T = K + 1
        nodes, of which node i sees the first i.
      is_argmax: only the argmax matters, so temperature and filters are left out.

    Returns:
      f32[B,T,V] unnormalised log-probabilities, -inf where a token is dropped. At
      temperature 0 all but the argmax are.
    """
    run = functools.partial(process_rows, is_argmax=is_argmax)
    if not is_argmax or sampler.processors:
        run, logits = shard_map_rows(run, SAMPLED_ROWS), gather_vocab(logits)
    return run(logits, sampler, drafted, is_before)


def process_rows(
    logits: jax.Array,
    sampler: Sampler,
    drafted: jax.Array | None = None,
    is_before: jax.Array | None = None,
    *,
    is_argmax: bool = False,
) -> jax.Array:
    """Does what ``process`` does for the rows of one device, inside of ``shard_map_rows``.

    Args and Returns are those of ``process``.
    """
    x = logits.astype(jnp.float32)
    if sampler.processors:
        B, T, _ = x.shape
        drafted = jnp.zeros((B, 0), jnp.int32) if drafted is None else drafted
        if is_before is not None:
            is_before = jnp.broadcast_to(is_before, (B, T, drafted.shape[1]))
        for active in sampler.processors:
            with jax.named_scope(active.processor.name):
                x = active.apply(x, drafted, is_before)
    if is_argmax:
        return x

    def point():
        return jnp.where(
            jnp.arange(x.shape[-1]) == argmax(x)[..., None],
            jnp.where(jnp.isfinite(x), 0.0, x),
            -jnp.inf,
        )

    if sampler.temperature is None:
        return point()
    is_greedy = sampler.is_greedy
    x = x / jnp.where(is_greedy, 1.0, sampler.temperature)[:, None, None]
    if sampler.filters is not None:
        with jax.named_scope("filters"):
            x = jnp.where(x == 0, 0.0, x)  # sorting would tell -0.0 from 0.0
            # Without the barrier XLA may compute x twice, rounded otherwise, and drop all tokens.
            x = jax.lax.optimization_barrier(x)
            x = jnp.where(is_dropped(x, sampler.filters), -jnp.inf, x)
    rows = is_greedy[:, None, None]
    return jax.lax.cond(is_greedy.any(), lambda: jnp.where(rows, point(), x), lambda: x)


def filters_of(configs: Sequence[SamplerConfig]) -> dict[str, jax.Array] | None:
    """Returns the filters of each row; None where no row that is sampled has any.

    Args:
      configs: one for each row.
    """
    warm = [config for config in configs if config.temperature >= GREEDY_BELOW]
    if columns(warm, "filters") is None:  # no filter changes an argmax
        return None
    kinds = {name: type(field.default) for name, field in options().items()}
    filters = {n: np.asarray(x, kinds[n]) for n, x in columns(configs, "filters").items()}
    with np.errstate(divide="ignore"):  # in float64: float32 rounds small min_p to 0
        filters["log_min_p"] = np.log(filters.pop("min_p"))
    stored = {"i": jnp.int32, "f": jnp.float32}
    return {name: jnp.asarray(x, stored[x.dtype.kind]) for name, x in filters.items()}


def reference_filters(logits: np.ndarray, config: SamplerConfig) -> np.ndarray:
    """Computes what the filters make of one distribution in float64, as an oracle of them.

    Args:
      logits: f64[V], after penalties and temperature.
      config: the sampling parameters.

    Returns:
      f64[V], a distribution.
    """
    x = np.array(logits)
    if config.top_k:
        x[x < np.sort(x)[::-1][min(config.top_k, len(x)) - 1]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if config.top_p < 1:
        order = np.argsort(-p, kind="stable")
        mass = 0.0
        for rank, token in enumerate(order):
            if mass >= config.top_p:
                p[order[rank:]] = 0.0
                break
            mass += p[token]
        p /= p.sum()
    p[p < config.min_p * p.max()] = 0.0
    return p / p.sum()


def is_dropped(x_BTV: jax.Array, filters: dict[str, jax.Array]) -> jax.Array:
    """Returns bool[B,T,V], the logits that top-k, then top-p, then min-p drop; never a NaN.

    Top-k and min-p keep what reaches a threshold, and top-p the logits up to one of them: of those
    that equal it, the ones that come before it.
    """
    V = x_BTV.shape[-1]
    best = x_BTV.max(axis=-1, keepdims=True)
    kept, is_enough = _of_largest(x_BTV, best, filters, min(V, _NARROW))
    if V > _NARROW:

        def of_all():
            return _of_largest(x_BTV, best, filters, V)[0]

        kept = jax.lax.cond(is_enough, lambda: kept, of_all)
    kth, nucleus, last_id = kept
    floor = jnp.maximum(kth, best + filters["log_min_p"][:, None, None])
    is_later = (x_BTV == nucleus) & (jnp.arange(V) > last_id)
    return (x_BTV < jnp.maximum(floor, nucleus)) | is_later


def _of_largest(x_BTV, best, filters, width: int):
    """Finds what top-k and top-p keep of the ``width`` largest logits.

    Returns:
      The smallest logit that top-k keeps, the last one that top-p keeps and its id (each
      [B,T,1]), and whether the ``width`` largest are enough.
    """
    V = x_BTV.shape[-1]
    top_k = jnp.where(filters["top_k"] == 0, V, jnp.minimum(filters["top_k"], V))[:, None, None]
    top_p = filters["top_p"][:, None, None]
    top, ids = jax.lax.top_k(x_BTV, width)  # equal logits in the order of their ids
    index = jnp.broadcast_to(jnp.minimum(top_k, width) - 1, (*top.shape[:2], 1))
    kth = jnp.where(top_k < V, jnp.take_along_axis(top, index, axis=2), -jnp.inf)
    mass = jnp.where(x_BTV >= kth, jnp.exp(x_BTV - best), 0.0).sum(axis=-1, keepdims=True)
    prob = jnp.where(top >= kth, jnp.exp(top - best) / mass, 0.0)
    is_kept = (top >= kth) & (jnp.cumsum(prob, axis=-1) - prob < top_p)
    last = jnp.where(is_kept, jnp.arange(width), 0).max(axis=-1, keepdims=True)
    nucleus = jnp.where(top_p < 1, jnp.take_along_axis(top, last, axis=-1), -jnp.inf)
    if width < V:
        last_id = jnp.take_along_axis(ids, last, axis=-1)
    else:  # to sort the ids too takes half as long again as to count
        num_ties = last + 1 - (top > nucleus).sum(axis=-1, keepdims=True)
        nth = jnp.cumsum(x_BTV == nucleus, axis=-1)
        last_id = (nth < num_ties).sum(axis=-1, keepdims=True)
    has_k = (top_k <= width) | (top_k == V)
    # Not top[..., -1:]: because of a second slice XLA would sort all V for the narrow width too.
    has_p = (top_p >= 1) | (top.min(axis=-1, keepdims=True) < kth)
    has_p |= prob.sum(axis=-1, keepdims=True) >= top_p
    return (kth, nucleus, last_id), (has_k & has_p).all()


def argmax(x: jax.Array) -> jax.Array:
    """Returns ``jnp.argmax`` over the last axis, i32[...]; as there, the first NaN wins.

    It is written as two plain reductions, since ``jnp.argmax`` compiles to one over pairs of value
    and index, which a CPU runs seven times slower (0.15 ms for 32,000 logits).
    """
    V = x.shape[-1]
    is_best = (x == x.max(axis=-1, keepdims=True)) | (x != x)
    return jnp.where(is_best, jnp.arange(V, dtype=jnp.int32), V - 1).min(axis=-1)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns ``jax.lax.top_k``, for which a TPU sorts whole rows. A few it finds one by one here.

    Args:
      x: f32[...,V].
      k: at most V.

    Returns:
      f32[...,k] and i32[...,k].
    """

    def sort(x):
        return tuple(jax.lax.top_k(x, k))

    search = functools.partial(_one_by_one, k=k)
    return jax.lax.platform_dependent(x, tpu=search if k <= _FEW else sort, default=sort)


def _one_by_one(x, *, k):
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)
    is_taken = jnp.zeros(x.shape, bool)
    largest = []
    for _ in range(k):
        best = jnp.where(is_taken, -jnp.inf, x).max(axis=-1, keepdims=True)
        is_best = ~is_taken & ((x == best) | (x != x))
        first = jnp.where(is_best, index, len(index) - 1).min(axis=-1, keepdims=True)
        is_taken |= index == first
        largest.append((best, first))
    return tuple(jnp.concatenate(parts, axis=-1) for parts in zip(*largest))


def sample(processed: jax.Array, gumbel: jax.Array) -> jax.Array:
    """Draws tokens from ``softmax(processed)``; noise does not move a point mass.

    Source: the Gumbel-max trick.

    Args:
      processed: f32[...,V], unnormalised log-probabilities.
      gumbel: f32[...,V], standard Gumbel noise.

    Returns:
      i32[...].
    """
    return argmax(processed + gumbel)
