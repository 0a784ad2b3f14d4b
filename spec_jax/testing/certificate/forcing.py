"""Drafts that are forced: given tokens, drawn by the drafter's own functions from pushed noise."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.compilation import bounded_jit
from spec_jax.contracts import Context, Proposal
from spec_jax.decoding.calls import call_prefill
from spec_jax.engine.generation import find_raised
from spec_jax.sampling import make_sampler
from spec_jax.testing.certificate.records import ProposalError, where
from spec_jax.testing.oracles import Row

DraftDistribution = Callable[[Row, Sequence[int], Sequence[int]], np.ndarray]

# XLA may compute in float32 what is written in bfloat16, and would hide what other devices do.
AS_WRITTEN = {"xla_allow_excess_precision": False}
DRAFT_SEED = 7  # of the draft samplers of many rows, whose drafts must differ all the same
FREE = -1  # a token that the enumeration does not force
SMALLEST = 2.0**-126  # float32 above 0
_HAIR = 3e-3  # by so much a draft outweighs the other tokens; a near tie is nearer
_BUCKET = 8  # histories are padded to a multiple of it, so that settings share programs


Item = tuple[int, tuple[int, ...]]  # a row, and its output before a round


class Forced(NamedTuple):
    """Rounds whose drafts were forced; NumPy arrays with one row for each of N items.

    Attributes:
      items: N times (row, output before the round).
      weights: f64[N], the probability of the item.
      contexts: what the drafter saw.
      logits: f32[N,K+1,V], the target's.
      proposal: what the drafter returned.
    """

    items: Sequence[Item]
    weights: np.ndarray
    contexts: Any
    logits: np.ndarray
    proposal: Proposal

    def at(self, index: np.ndarray) -> Forced:
        """Returns some of the items."""
        pick = functools.partial(jax.tree.map, lambda x: x[index])
        return Forced(
            [self.items[i] for i in index],
            self.weights[index],
            pick(self.contexts),
            self.logits[index],
            pick(self.proposal),
        )


def path_tokens(draft: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    """Returns the tokens on the path to a node, its own included.

    Args:
      draft: the token of each node but the root.
      parents: the parent of each of these nodes.
      node: where the path ends; 0 is the root.
    """
    path = []
    while node:
        path.insert(0, draft[node - 1])
        node = parents[node - 1]
    return tuple(path)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """What drafts rounds with forced noise, through the functions that the decoder calls.

    Attributes:
      system: target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      rows: prompts and samplers.
      num_tokens: maximum tokens of an output; longer ones compile other programs.
      batch: rows drafted at once.
    """

    system: decoding.System
    params: dict[str, Any]
    rows: Sequence[Row]
    num_tokens: int = 3
    batch: int = 1032  # caches of so many rows are written by one scatter

    @property
    def parents(self) -> Sequence[int]:
        """The parent of each draft's node, which is known before a round."""
        drafter = self.system.drafter
        is_chain = drafter.tree is None or not drafter.is_sampled
        return range(self.system.num_draft) if is_chain else drafter.tree.parents

    def all_drafts(self) -> list[tuple[int, ...]]:
        """Returns all that may be drafted in a round, siblings all different.

        Where siblings have used up the tokens, one is ``FREE``: the drafter's own choice, as are
        all those of a deterministic drafter.
        """
        parents = self.parents
        if not self.system.drafter.is_sampled:
            return [(FREE,) * len(parents)]
        ids = set(range(self.system.target.last_id + 1))
        drafts = [()]
        for node, parent in enumerate(parents):
            siblings = [j for j in range(node) if parents[j] == parent]
            if len(siblings) >= len(ids) and node + 1 in parents:
                raise ValueError(f"node {node + 1} has children, and no token is left for it")
            drafts = [
                (*draft, token)
                for draft in drafts
                for token in sorted(ids.difference(draft[j] for j in siblings)) or [FREE]
            ]
        return drafts

    def contexts(self, items: Sequence[Item]) -> Any:
        """Returns what the decoder would hand to the drafter after each item, as NumPy arrays."""
        V = self.system.target.vocab_size
        width = max(len(row.prompt) for row in self.rows)
        width += self.num_tokens + self.system.num_draft + 2
        width = -(-width // _BUCKET) * _BUCKET
        tokens = np.zeros((len(items), width), np.int32)
        length = np.zeros(len(items), np.int32)
        outputs = np.zeros_like(tokens)
        for i, (row, output) in enumerate(items):
            history = (*self.rows[row].prompt, *output)
            tokens[i, : len(history)] = history
            length[i] = len(history) - 1
            outputs[i, : len(output)] = output
        # The samplers of all rows, whichever are left: all calls share programs.
        of = np.asarray([item[0] for item in items])
        sides = zip(*(row[1:] for row in self.rows))
        samplers = [make_sampler(side, len(self.rows), V) for side in sides]
        samplers = jax.tree.map(lambda x: np.asarray(x)[of], samplers)
        num_output = np.asarray([len(output) for _, output in items], np.int32)

        def start(x):
            return x.start(tokens, length + 1 - num_output, V).advance(outputs, num_output)

        sampler, draft_sampler = jax.tree.map(np.asarray, [jax.jit(start)(x) for x in samplers])
        return tokens, length, sampler, draft_sampler

    def propose(self, contexts: Any, gumbel: np.ndarray) -> tuple[np.ndarray, Proposal]:
        """Returns the target's logits f32[N,K+1,V] and the proposal, drawn with this noise."""
        propose = functools.partial(_propose_as_written, self.system, self.params)
        return in_chunks(propose, self.batch, contexts, gumbel)

    def force(self, items: Sequence[Item], drafts: np.ndarray) -> Forced:
        """Drafts given tokens, by pushing the noise that the drafter draws with, and scores them.

        Args:
          items: N times (row, output before the round).
          drafts: i64[N,K], the tokens, FREE where nothing is pushed.

        Returns:
          The rounds, each of weight 1. Whether the drafts are the ones pushed is not checked.

        Raises:
          ProposalError: a proposal is at fault.
        """
        K = self.system.num_draft
        contexts = self.contexts(items)
        push = np.zeros((len(items), K, self.system.target.vocab_size), np.float32)
        for i, parent in enumerate(self.parents):
            at = np.flatnonzero(drafts[:, i] != FREE)
            push[at, parent, drafts[at, i]] = 1e4 * (K - i)  # the first sibling is pushed hardest
        logits, proposal = self.propose(contexts, push)
        is_checked = True
        if proposal.probs is not None:
            # No ordinary noise draws a token whose probability underflows: see
            # ``draws_as_reported``.
            rows = np.arange(len(items))[:, None]
            is_never = proposal.probs[rows, list(self.parents), proposal.tokens] == 0
            is_drawn = (proposal.tokens == drafts) & np.asarray(proposal.is_offered)
            is_checked = ~(is_drawn & is_never).any(axis=1)
        self.check_faults(items, proposal, is_checked)
        return Forced(items, np.ones(len(items)), contexts, logits, proposal)

    def check_faults(
        self, items: Sequence[Item], proposal: Proposal, is_checked: np.ndarray | bool = True
    ) -> None:
        """Raises a ProposalError where the decoder would stop a row because of the proposal.

        Args:
          items: N times (row, output before the round).
          proposal: what the drafter returned.
          is_checked: bool[N].
        """
        at = np.flatnonzero((proposal.fault != decoding.Finish.RUNNING) & is_checked)
        if len(at):
            row, output = items[at[0]]
            finish = decoding.Finish(int(proposal.fault[at[0]]))
            raised = find_raised(finish, self.system, (*self.rows[row].prompt, *output))
            what = f"makes a proposal that stops the row ({finish.name.lower()})"
            if raised is not None:
                what = f"raised {type(raised).__name__}: {raised}"
            place = where(self.rows[row], output, self.system.num_draft)
            name = self.system.drafter.name
            raise ProposalError(f"drafter {name!r} {what}, {place}") from raised

    def draws_as_reported(self, forced: Forced) -> np.ndarray:
        """Returns bool[N]: each draft is the Gumbel-max draw from its report.

        Under ordinary noise, and under noise that outweighs the report, so that all tokens are
        equally near to being drawn, and the drafts themselves nearer by a hair: tokens that are
        drawn once in a million times are compared as sharply as others.
        """
        is_drawn = np.ones(len(forced.items), bool)
        proposal = forced.proposal
        if proposal.probs is None:
            return is_drawn
        gumbel = np.random.default_rng(0).gumbel(size=proposal.probs.shape)
        # -ln q, and a little more for the drafts, the first sibling's most. A token of probability
        # 0 has at most the smallest float32.
        outweighing = -np.log(np.maximum(proposal.probs, SMALLEST), dtype=np.float32)
        outweighing[proposal.probs == 0] -= 1
        for i, parent in enumerate(self.parents):
            siblings = list(self.parents[i:]).count(parent)
            outweighing[np.arange(len(gumbel)), parent, proposal.tokens[:, i]] += _HAIR * siblings
        for noise in (gumbel.astype(np.float32), outweighing):
            drawn = self.propose(forced.contexts, noise)[1]
            is_drawn &= matches_report(drawn, noise, self.parents)
        return is_drawn


def matches_report(drawn: Proposal, gumbel: np.ndarray, parents: Sequence[int]) -> np.ndarray:
    """bool[N], whether each token is its parent's Gumbel-max draw, earlier siblings left out.

    Args:
      drawn: what the drafter returned, of N rounds.
      gumbel: f32[N,K,V], the noise that it drew with.
      parents: of the nodes.
    """
    probs = np.array(drawn.probs)
    is_drawn = np.ones(len(drawn.tokens), bool)
    is_offered = np.asarray(drawn.is_offered)
    for i, parent in enumerate(parents):
        q = probs[:, parent]
        token = drawn.tokens[:, i]
        at = np.flatnonzero((q.max(axis=1) > 0) & is_offered[:, i])
        is_drawn[at] &= is_argmax(token[at], q[at], gumbel[at, parent])
        np.put_along_axis(q, token[:, None], 0.0, axis=1)
    return is_drawn


def is_argmax(tokens, probs, gumbel) -> np.ndarray:
    """Whether the tokens are the Gumbel-max draws from ``probs``, near ties aside.

    Args:
      tokens: i64[...].
      probs: f32[...,V].
      gumbel: f32[...,V], the noise.
    """
    with np.errstate(divide="ignore"):
        scores = np.log(np.asarray(probs, np.float64)) + gumbel
    drawn = np.take_along_axis(scores, np.asarray(tokens)[..., None], axis=-1)[..., 0]
    return drawn >= scores.max(axis=-1) - 1e-3


def in_chunks(function, chunk, *trees):
    """Calls ``function`` on NumPy arrays a chunk of rows at a time: one compiled shape."""
    size = len(jax.tree.leaves(trees)[0])
    results = []
    for begin in range(0, size, chunk):
        index = np.minimum(np.arange(begin, begin + chunk), size - 1)
        result = function(*jax.tree.map(lambda x: x[index], trees))
        results.append(jax.tree.map(np.asarray, result))
    return jax.tree.map(lambda *x: np.concatenate(x)[:size], *results)


def propose_afresh(system: decoding.System, params, contexts, gumbel):
    """Prefills both models afresh, drafts with forced noise, scores the window.

    Args:
      system: target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      contexts: see ``Drafting.contexts``.
      gumbel: f32[N,K,V], the drafter's noise; None: its own.

    Returns:
      The target's logits f32[N,K+1,V], and the proposal.
    """
    tokens, length, sampler, draft_sampler = contexts
    target, drafter, rule, *_ = system
    size, width = tokens.shape
    slots = width + system.lookahead_slots
    cache = target.init_cache(params["target"], size, slots)
    fed = target.forward(params["target"], tokens, cache)
    pending = jnp.take_along_axis(tokens, length[:, None], axis=1)[:, 0]
    state = call_prefill(drafter, params["draft"], tokens, length, pending, fed.features, slots)
    context = Context(
        tokens,
        length,
        draft_sampler,
        sampler.seed,
        is_coupled=False,
        has_probs=True,
        has_logits=rule.needs_logits,
        gumbel=gumbel,
    )
    proposal, _ = decoding.propose(params["draft"], state, context, system)
    logits, _, _ = decoding.target_pass(
        params["target"], fed.cache.commit(length), tokens, proposal.tokens, system, proposal.paths
    )
    return logits, proposal


_propose_as_written = bounded_jit(
    propose_afresh, static_argnames="system", compiler_options=AS_WRITTEN
)
