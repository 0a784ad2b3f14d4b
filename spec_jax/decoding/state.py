"""The state that the loop carries, what it is compiled for, and how tokens are appended."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spec_jax.contracts import Context, Drafter, Model, Observer, Rule, TargetView
from spec_jax.models.chunks import CHUNK
from spec_jax.sampling import Sampler, UpdateCounter


class Kind(enum.IntEnum):
    """Where an output token came from."""

    NONE = 0  # prompt, or not written
    FIRST = 1  # sampled by prefill
    ACCEPTED = 2  # drafted, and kept
    CORRECTED = 3  # the target's, in place of a rejected draft
    BONUS = 4  # the target's, after drafts of which none was rejected


class Finish(enum.IntEnum):
    """Why a row stopped."""

    RUNNING = 0
    STOP_TOKEN = 1
    LENGTH = 2
    STOP_STRING = 3
    CANCELLED = 4
    NAN_TARGET = 5  # the target's logits were not finite, or every token was forbidden
    INVALID_DRAFT = 7  # an id outside of the vocabulary, a number not in 0..K, or no tree
    INVALID_DRAFT_PROBS = 8  # Proposal.probs are not distributions, or exclude the drawn token
    INVALID_VERDICT = 9  # the rule accepts what was not offered, emits no token, or is not finite


class System(NamedTuple):
    """What is fixed for a compiled program: target, drafter, rule and K."""

    target: Model
    drafter: Drafter
    rule: Rule
    num_draft: int
    observers: tuple[Observer, ...] = ()  # what watches the rounds, see ``DecodeState.seen``
    is_adaptive: bool = False  # K is chosen while decoding, from what was accepted before
    prefill_chunk: int = CHUNK  # maximum tokens of a prompt in a pass

    @property
    def depth(self) -> int:
        """Maximum number of drafts that a round accepts: K, or the depth of a tree."""
        tree = self.drafter.shape.tree
        return self.num_draft if tree is None or self.num_draft == 0 else tree.depth

    @property
    def drafted_until(self) -> int | None:
        """Maximum tokens of a row, prompt and output so far, after which it is offered drafts.

        With more of them, K drafts would pass the drafter's maximum length. None means unbounded.
        """
        longest = self.drafter.max_length
        return None if longest is None or self.num_draft == 0 else longest - self.depth

    @property
    def lookahead_slots(self) -> int:
        """Slots that a round may write after the committed ones."""
        return max(self.num_draft + 1, self.drafter.shape.scratch_slots)

    @property
    def needs_update_counts(self) -> bool:
        """Whether drafts or K depend on earlier outputs, so that update counts enter the noise.

        The tokens of a coupled or greedy rule do not depend on drafts.
        """
        learns = self.drafter.memory is not None or self.is_adaptive
        return learns and not (self.rule.is_coupled or self.rule.is_greedy)

    @property
    def reads_argmax(self) -> bool:
        """Whether rule and observers read no more of the target's scores than their argmax."""
        return self.rule.is_greedy and not any(x.needs_processed for x in self.observers)

    @property
    def needs_probs(self) -> bool:
        """Whether the rule or an observer reads ``Proposal.probs``."""
        return self.rule.needs_probs or any(x.needs_probs for x in self.observers)

    def context(
        self, tokens, length, sampler, request, is_greedy, params=None, cache=None
    ) -> Context:
        """Builds the drafter's ``Context``; what depends on rule and drafter is filled in here.

        Args:
          tokens, length, sampler, request, is_greedy: see ``Context``.
          params, cache: see ``TargetView``; None where the target is out of reach.
        """
        view = TargetView(self.target, params, cache) if self.drafter.shape.reads_target else None
        return Context(
            tokens,
            length,
            sampler,
            request,
            is_coupled=self.rule.is_coupled,
            has_probs=self.needs_probs,
            has_logits=self.rule.needs_logits,
            is_greedy=is_greedy,
            target=view,
        )


@flax.struct.dataclass
class BatchCarry:
    """An observer's carry that has no batch dimension; it is replicated on a mesh."""

    value: Any

    def axes(self) -> BatchCarry:
        """The logical axes of the arrays, see ``sharding``."""
        return BatchCarry(jax.tree.map(lambda x: PartitionSpec(), self.value))

    def take_rows(self, rows: jax.Array) -> BatchCarry:
        del rows
        return self


@flax.struct.dataclass
class DecodeState:
    """Everything that a round reads and writes."""

    tokens: jax.Array  # i32[B,M], prompt and output, left-aligned
    kind: jax.Array  # i8[B,M], a Kind for each token
    offered: jax.Array  # i16[B,M], levels of drafts offered by the round that begins here, or -1
    rejected: jax.Array  # i32[B,M], the draft (of siblings the first) that was rejected here, or -1
    nan_drafts: jax.Array  # i32[B], rounds in which logits of the draft were not finite
    prompt_length: jax.Array  # i32[B]
    limit: jax.Array  # i32[B], maximum tokens of a row, prompt and output
    finish: jax.Array  # i32[B], a Finish
    stop_tokens: jax.Array  # i32[B,X], -1 where a row has fewer
    target: Any  # the target's cache
    draft: Any  # the drafter's state
    sampler: Sampler
    draft_sampler: Sampler  # its seed is that of the row's drafts, see ``rng.draft_seeds``
    seen: dict[str, Any] = flax.struct.field(default_factory=dict)  # by each observer's name

    def __repr__(self) -> str:
        shape = getattr(self.tokens, "shape", ())  # while jax looks at structure it is no array
        return f"DecodeState(tokens {list(shape)})"

    @property
    def length(self) -> jax.Array:
        """i32[B], tokens fed to the target."""
        return self.target.length

    @property
    def total(self) -> jax.Array:
        """i32[B], tokens of the prompt and the output so far."""
        return self.prompt_length + (self.kind != Kind.NONE).sum(axis=1)

    @property
    def is_active(self) -> jax.Array:
        return self.finish == Finish.RUNNING

    def with_update_count(self, source: UpdateCounter, count: jax.Array | int) -> DecodeState:
        """Keys each row's noise by how often what it reads has changed.

        Args:
          source: what it reads.
          count: u32[B] or u32[], how often that has changed.

        Returns:
          The state; the same one where nothing learns.
        """
        if self.sampler.update_counts is None:
            return self

        def put(sampler):  # for each its own array, as each is donated
            return sampler.replace(update_counts=sampler.update_counts.at[:, source].set(count))

        return self.replace(sampler=put(self.sampler), draft_sampler=put(self.draft_sampler))


class Chunk(NamedTuple):
    """What a caller reads between two calls; the state itself is donated to the next call.

    Attributes:
      tokens: i32[B,M], as in the state.
      total: i32[B], tokens of prompt and output so far.
      finish: i32[B], a Finish for each row.
      rounds: i32[], rounds that this call ran.
      row_rounds: i32[], these rounds, each counted once for every active row.
    """

    tokens: jax.Array
    total: jax.Array
    finish: jax.Array
    rounds: jax.Array
    row_rounds: jax.Array


class Record(NamedTuple):
    """The record of the output of all rows, or of one row without the batch dimension.

    Attributes:
      tokens, kind, offered, rejected, nan_drafts, prompt_length, finish: as in the state.
      seen: as in the state, but only of observers that watch row by row.
    """

    tokens: jax.Array
    kind: jax.Array
    offered: jax.Array
    rejected: jax.Array
    nan_drafts: jax.Array
    prompt_length: jax.Array
    finish: jax.Array
    seen: dict[str, Any]

    @classmethod
    def of(cls, state: DecodeState) -> Record:
        own = {"seen": {k: x for k, x in state.seen.items() if not isinstance(x, BatchCarry)}}
        return cls(*(own.get(name, getattr(state, name)) for name in cls._fields))


def apply_limits(
    state: DecodeState, tokens, total, n, fault, num_before=0
) -> tuple[jax.Array, jax.Array]:
    """Returns how many of n new tokens each row keeps, and its ``Finish``.

    A stop token is kept, and tokens after it are cut. Tokens beyond the limit are cut. A fault
    stops the row after some of the tokens; it is none if they were cut there or before.

    Args:
      state: the state of all rows.
      tokens: i32[B,P], the new tokens.
      total: i32[B], tokens of prompt and output before them.
      n: i32[B] or an int, how many of them count.
      fault: i32[B], a ``Finish`` other than RUNNING where a row is at fault.
      num_before: i32[B] or an int, tokens before the fault.
    """
    index = jnp.arange(tokens.shape[1])
    is_stop = (tokens[:, :, None] == state.stop_tokens[:, None]).any(axis=2)
    until_stop = jnp.where(is_stop, index + 1, tokens.shape[1] + 1).min(axis=1)
    room = state.limit - total
    kept = jnp.where(state.is_active, jnp.minimum(jnp.minimum(n, until_stop), room), 0)
    finish = jnp.where(kept == room, Finish.LENGTH, Finish.RUNNING)
    finish = jnp.where(kept == until_stop, Finish.STOP_TOKEN, finish)
    is_fault = (fault != Finish.RUNNING) & (num_before < kept)
    kept = jnp.where(is_fault, num_before, kept)
    finish = jnp.where(is_fault, fault, finish)
    return kept, jnp.where(state.is_active, finish, state.finish).astype(jnp.int32)


def append(state, record: dict[str, jax.Array], total, n):
    """Writes the first n (i32[B]) columns of the record's arrays after ``total`` (i32[B]) tokens.

    The record has ``tokens`` and any other fields of the state. The state's samplers, if it has
    any, advance by the new tokens.
    """
    index = jnp.arange(record["tokens"].shape[1])
    is_new = index < n[:, None]
    M = state.tokens.shape[1]
    columns = jnp.where(is_new, total[:, None] + index, M)  # M is out of range: dropped

    def put_row(old, at, new):
        return old.at[at].set(new.astype(old.dtype), mode="drop")

    def put(old, new):
        return jax.vmap(put_row)(old, columns, new)

    changed = {name: put(getattr(state, name), new) for name, new in record.items()}
    for name in ("sampler", "draft_sampler"):  # in one order, or programs would differ by run
        if hasattr(state, name):
            changed[name] = getattr(state, name).advance(record["tokens"], n)
    return state.replace(**changed)
