"""How observers are called, and the observers of the package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.compilation import bounded_jit
from spec_jax.contracts import FirstToken, Observer, Round, Rule, TargetScores
from spec_jax.decoding.calls import blame, check_rows, check_state
from spec_jax.decoding.state import BatchCarry, DecodeState, System
from spec_jax.errors import ConfigError
from spec_jax.sampling import process
from spec_jax.sharding import SAMPLED_ROWS, constrain, constrain_state, shard_map_rows


def watch(
    system: System, seen: dict[str, Any], look: Callable[[Observer, Any], Any]
) -> dict[str, Any]:
    """Calls every observer once; returns what they have seen by then.

    Args:
      system: has the observers.
      seen: what they have seen before, by their names.
      look: ``(observer, seen) -> seen`` for one observer.

    Raises:
      ShapeError: while tracing, an observer changes the structure, a shape or a dtype of its carry.
    """
    after = {}
    for observer in system.observers:
        owner = f"observer {observer.name!r}"
        own = seen[observer.name]
        before = own if observer.is_by_row else own.value
        with blame(owner, seen=before), jax.named_scope(f"observe_{observer.name}"):
            new = look(observer, before)
        check_state(owner, before, new)
        after[observer.name] = new if observer.is_by_row else BatchCarry(new)
    return after


def see_round(system: System, seen: dict[str, Any], of: Round) -> dict[str, Any]:
    """Returns what the observers have seen after a round.

    Args:
      system: has the observers.
      seen: what they had seen before the round, by their names.
      of: the round.
    """
    absent = {"proposal.probs": of.proposal.probs, "scores.features": of.scores.features}
    absent = [name for name, array in absent.items() if array is None]

    def look(observer, own):
        try:
            return observer.update(own, of)
        except (AttributeError, TypeError) as error:
            if absent and "NoneType" in str(error):
                error.add_note(f"None in this round: {', '.join(absent)}; see Observer")
            raise

    return watch(system, seen, look)


@functools.partial(bounded_jit, static_argnames=("system", "slots"))
def see_first(
    tokens: jax.Array,
    lengths: jax.Array,
    logits: jax.Array,
    state: DecodeState,
    *,
    system: System,
    slots: int,
) -> dict[str, Any]:
    """Returns what the observers have seen after prefill: each row's first token.

    Args:
      tokens: i32[B,T], the prompts.
      lengths: i32[B], their lengths.
      logits: f32[B,1,V], the target's raw logits after the prompts.
      state: the state with the first tokens.
      system: has the observers.
      slots: M.
    """
    B = len(lengths)
    V = logits.shape[-1]
    scores = TargetScores(logits, process(logits, state.sampler.start(tokens, lengths, V)))
    tokens = jnp.take_along_axis(state.tokens, lengths[:, None], axis=1)
    first = FirstToken(scores, tokens, lengths, state.total - lengths)
    seen = {x.name: _init(x, B, slots) for x in system.observers}

    def look(observer, own):
        return own if observer.first is None else observer.first(own, first)

    return constrain_state(watch(system, seen, look))


def _init(observer: Observer, batch: int, slots: int) -> Any:
    """Returns the carry of an observer before it has seen anything.

    Raises:
      ShapeError: the first axis of its arrays is not the rows.
    """
    owner = f"init of observer {observer.name!r}"
    with blame(owner, batch=batch, slots=slots):
        seen = observer.init(batch, slots)
    if not observer.is_by_row:
        return BatchCarry(seen)
    check_rows(owner, seen, batch)
    return seen


def put(seen: jax.Array, columns: jax.Array, values: jax.Array) -> jax.Array:
    """Writes values into each row, at columns that differ by row.

    Args:
      seen: dtype[B,M].
      columns: i32[B,P]; values at negative columns, or at M and above, are dropped.
      values: dtype[B,P].
    """
    M = seen.shape[1]
    columns = jnp.where(columns < 0, M, columns)
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(seen, columns, values)


@flax.struct.dataclass
class Logprobs:
    """Log-probabilities of each token of a row under the target, in nats; 0 in the prompt."""

    raw: jax.Array  # f32[B,M], of the model
    processed: jax.Array  # f32[B,M], after all sampling parameters: the distribution of the output


def _see_tokens(seen: Logprobs, columns, scores: TargetScores, nodes, tokens) -> Logprobs:
    """Writes those of the tokens i32[B,P] after the nodes i32[B,P] at columns i32[B,P]."""

    def run(logits, processed, nodes, tokens):
        def of(x):
            rows = jnp.arange(len(x))[:, None]
            return x[rows, nodes, tokens] - jax.nn.logsumexp(x, axis=-1)[rows, nodes]

        return [of(logits.astype(jnp.float32)), of(processed)]

    values = shard_map_rows(run, SAMPLED_ROWS)(scores.logits, scores.processed, nodes, tokens)
    raw, processed = (constrain(x, "batch") for x in values)
    return Logprobs(put(seen.raw, columns, raw), put(seen.processed, columns, processed))


def _see_round(seen: Logprobs, of: Round) -> Logprobs:
    return _see_tokens(seen, of.columns, of.scores, of.nodes, of.verdict.tokens)


def _see_first(seen: Logprobs, of: FirstToken) -> Logprobs:
    return _see_tokens(seen, of.columns, of.scores, jnp.zeros_like(of.tokens), of.tokens)


LOGPROBS = Observer(
    name="logprobs",
    init=lambda batch, slots: Logprobs(jnp.zeros((batch, slots)), jnp.zeros((batch, slots))),
    update=_see_round,
    first=_see_first,
    needs_processed=True,
)
"""Log-probabilities of all output tokens: ``state.seen["logprobs"]`` is a ``Logprobs``."""


@functools.cache
def expected_acceptance(rule: Rule) -> Observer:
    """Returns the observer of the rule's closed form: f32[B,M], NaN where no draft was reached.

    Args:
      rule: a rule of chains that has ``expected_acceptance``.
    """

    def update(seen: jax.Array, of: Round) -> jax.Array:
        K = of.proposal.tokens.shape[1]
        if K == 0:
            return seen
        if of.proposal.parents is not None:
            raise ConfigError("has_expected is set; expected acceptance is known of chains alone")

        def run(scores, proposal, n_accept):
            value = jax.vmap(jax.vmap(rule.expected_acceptance))(
                scores.probs[:, :-1], proposal.probs, proposal.tokens
            )
            reached = jnp.minimum(n_accept + 1, proposal.n_draft)[:, None]
            return jnp.where(jnp.arange(K) < reached, value, jnp.nan)

        scores = of.scores.replace(features=None)
        value = shard_map_rows(run, SAMPLED_ROWS)(scores, of.proposal, of.verdict.n_accept)
        return put(seen, of.columns[:, :K], constrain(value, "batch"))

    def init(batch, slots):
        return jnp.full((batch, slots), jnp.nan)

    return Observer("expected", init, update, needs_probs=True)


_MAX_KINDS = 1024  # each has counts in every row


def acceptance_by_kind(kinds: Any) -> Observer:
    """Returns the observer that counts drafts by kind of token: i32[B,C,2], reached and accepted.

    ``state.seen["acceptance_by_kind"]`` counts as ``Stats.reached_at`` and ``accepted_at`` do, but
    does not know stop strings: they are found on the host, so drafts after one are counted here.

    Args:
      kinds: i32[V], the kind of each token, 0 to C - 1, see ``evaluation.token_kinds``.

    Raises:
      ConfigError: ``kinds`` are not such numbers; while tracing, there are fewer of them than ids
        of the target.
    """
    table = np.asarray(kinds)
    is_table = table.ndim == 1 and table.dtype.kind in "iu" and table.size > 0
    if not is_table or table.min() < 0 or table.max() >= _MAX_KINDS:
        raise ConfigError(
            f"kinds are {kinds!r:.80}; expected an integer from 0 to {_MAX_KINDS - 1} for each id"
        )
    return _acceptance_by_kind(table.astype(np.int32).tobytes())


@functools.cache
def _acceptance_by_kind(kinds: bytes) -> Observer:
    table = np.frombuffer(kinds, np.int32)
    num_kinds = int(table.max()) + 1

    def update(seen: jax.Array, of: Round) -> jax.Array:
        V = of.scores.logits.shape[-1]
        if len(table) < V:
            raise ConfigError(f"kinds has {len(table)} entries; the target has {V} ids")
        drafts = of.reached
        kind = jnp.where(drafts < 0, -1, jnp.asarray(table)[drafts])
        counted = jax.nn.one_hot(kind, num_kinds, dtype=jnp.int32)
        accepted = jnp.where(of.is_accepted[:, :, None], counted, 0)
        return seen + jnp.stack([counted.sum(axis=1), accepted.sum(axis=1)], axis=2)

    def init(batch, slots):
        return jnp.zeros((batch, num_kinds, 2), jnp.int32)

    return Observer("acceptance_by_kind", init, update)
