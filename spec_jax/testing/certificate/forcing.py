"""Drafts that are forced: given tokens, drawn by the drafter's own functions from pushed noise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
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


class Forced(NamedTuple):
    """Rounds whose drafts were forced; NumPy arrays with one row for each of N items.

    Attributes:
      items: N times (row, output before the round).
      weights: f64[N], the probability of the item.
      contexts: what the drafter saw.
      logits: f32[N,K+1,V], the target's.
      proposal: what the drafter returned.
    """

    items: Sequence[tuple[int, tuple[int, ...]]]
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


def parents_of(system: decoding.System) -> Sequence[int]:
    """Returns the parent of each draft's node, which is known before a round."""
    tree = system.drafter.tree
    is_chain = tree is None or not system.drafter.is_sampled
    return range(system.num_draft) if is_chain else tree.parents


def possible_drafts(
    parents: Sequence[int], dist: Callable[[Sequence[int]], np.ndarray] | None
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yields (tokens, probability) of every draft along ``parents``, siblings all different.

    Where siblings have used up the distribution a token is ``FREE``: the drafter's own choice. So
    is what would follow drafts after which the distribution is 0: it is not offered.

    Args:
      parents: of the nodes.
      dist: the distribution f64[V] of the next draft after some drafts; None for a deterministic
        drafter, all of whose tokens are ``FREE``.
    """
    K = len(parents)
    if dist is None:
        yield (FREE,) * K, 1.0
        return

    def visit(tokens, weight):
        i = len(tokens)
        if i == K:
            yield tokens, weight
            return
        way = []
        node = parents[i]
        while node:
            way.insert(0, tokens[node - 1])
            node = parents[node - 1]
        q = np.zeros(1) if FREE in way else np.array(dist(way))
        if not q.any():
            yield from visit((*tokens, FREE), weight)
            return
        q[[tokens[j] for j in range(i) if parents[j] == parents[i] and tokens[j] != FREE]] = 0.0
        if q.sum() <= 1e-12:
            if i + 1 in parents:
                raise ValueError(f"node {i + 1} has children, and no distribution to draw it from")
            yield from visit((*tokens, FREE), weight)
            return
        for token in np.flatnonzero(q):
            yield from visit((*tokens, int(token)), weight * q[token] / q.sum())

    yield from visit((), 1.0)


def force(
    system: decoding.System,
    params: dict[str, Any],
    rows: Sequence[Row],
    items: Sequence[tuple[int, tuple[int, ...]]],
    drafts: np.ndarray,
    num_tokens: int,
    batch: int,
) -> Forced:
    """Drafts given tokens, by pushing the noise that the drafter draws with, and scores them.

    Args:
      system: target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      rows: prompts and samplers.
      items: N times (row, output before the round).
      drafts: i64[N,K], the tokens, FREE where nothing is pushed.
      num_tokens: maximum tokens of an output; longer ones compile other programs.
      batch: rows drafted at once.

    Returns:
      The rounds, each of weight 1. Whether the drafts are the ones pushed is not checked.

    Raises:
      ProposalError: a proposal is at fault.
    """
    V = system.target.vocab_size
    K = system.num_draft
    contexts = make_contexts(rows, items, width_of(rows, num_tokens, K), V)
    push = np.zeros((len(items), K, V), np.float32)
    for i, parent in enumerate(parents_of(system)):
        at = np.flatnonzero(drafts[:, i] != FREE)
        push[at, parent, drafts[at, i]] = 1e4 * (K - i)  # the first sibling is pushed hardest
    propose = functools.partial(_propose_as_written, system, params)
    logits, proposal = in_chunks(propose, batch, contexts, push)
    # No ordinary noise draws a token whose probability underflows: see ``draws_as_reported``.
    is_drawn = (proposal.tokens == drafts) & np.asarray(proposal.is_offered)
    is_never = (is_drawn & (_of_drafts(proposal, parents_of(system)) == 0)).any(axis=1)
    check_faults(system, rows, items, proposal, ~is_never)
    return Forced(items, np.ones(len(items)), contexts, logits, proposal)


def width_of(rows: Sequence[Row], num_tokens: int, num_draft: int) -> int:
    """Returns how many tokens the contexts have room for."""
    width = max(len(row.prompt) for row in rows) + num_tokens + num_draft + 2
    return -(-width // _BUCKET) * _BUCKET


def check_faults(
    system: decoding.System, rows: Sequence[Row], items, proposal: Proposal, is_checked=True
) -> None:
    """Raises a ProposalError where the decoder would stop a row because of the proposal.

    Args:
      system: whose drafter it is.
      rows: prompts and samplers.
      items: N times (row, output before the round).
      proposal: what the drafter returned.
      is_checked: bool[N].
    """
    at = np.flatnonzero((proposal.fault != decoding.Finish.RUNNING) & is_checked)
    if len(at):
        row, output = items[at[0]]
        finish = decoding.Finish(int(proposal.fault[at[0]]))
        raised = find_raised(finish, system, (*rows[row].prompt, *output))
        what = f"makes a proposal that stops the row ({finish.name.lower()})"
        if raised is not None:
            what = f"raised {type(raised).__name__}: {raised}"
        raise ProposalError(
            f"drafter {system.drafter.name!r} {what}, {where(rows[row], output, system.num_draft)}"
        ) from raised


def _of_drafts(proposal: Proposal, parents: Sequence[int]) -> np.ndarray:
    """f32[N,K], the reported probability of each draft; 1 where nothing is reported."""
    if proposal.probs is None:
        return np.ones(proposal.tokens.shape, np.float32)
    rows = np.arange(len(proposal.tokens))[:, None]
    return np.asarray(proposal.probs)[rows, list(parents), proposal.tokens]


def draws_as_reported(
    system: decoding.System, params: dict[str, Any], forced: Forced, batch: int
) -> np.ndarray:
    """Returns bool[N]: each draft is the Gumbel-max draw from its report.

    Under ordinary noise, and under noise that outweighs the report, so that all tokens are equally
    near to being drawn, and the drafts themselves nearer by a hair: tokens that are drawn once in
    a million times are compared as sharply as others.
    """
    if forced.proposal.probs is None:
        return np.ones(len(forced.items), bool)
    gumbel = np.random.default_rng(0).gumbel(size=forced.proposal.probs.shape).astype(np.float32)
    parents = parents_of(system)
    propose = functools.partial(_propose_as_written, system, params)
    noises = (gumbel, _outweighing(forced.proposal, parents))
    drawn = [in_chunks(propose, batch, forced.contexts, noise)[1] for noise in noises]
    is_drawn = [matches_report(x, noise, parents) for x, noise in zip(drawn, noises)]
    return np.logical_and(*is_drawn)


def _outweighing(proposal: Proposal, parents: Sequence[int]) -> np.ndarray:
    """f32[N,K,V]: -ln q and a little more for the drafts, the first sibling's most.

    A token of probability 0 has at most the smallest float32.
    """
    noise = -np.log(np.maximum(proposal.probs, SMALLEST), dtype=np.float32)
    noise[np.asarray(proposal.probs) == 0] -= 1
    rows = np.arange(len(noise))
    for i, parent in enumerate(parents):
        noise[rows, parent, proposal.tokens[:, i]] += _HAIR * list(parents[i:]).count(parent)
    return noise


def matches_report(drawn: Proposal, gumbel: np.ndarray, parents: Sequence[int]) -> np.ndarray:
    """bool[N], whether each token is its parent's Gumbel-max draw, earlier siblings left out."""
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
    """Whether the tokens are the Gumbel-max draws from ``probs``, near ties aside."""
    with np.errstate(divide="ignore"):
        scores = np.log(np.asarray(probs, np.float64)) + gumbel
    drawn = np.take_along_axis(scores, np.asarray(tokens)[..., None], axis=-1)[..., 0]
    return drawn >= scores.max(axis=-1) - 1e-3


def make_contexts(rows, items, width, V):
    """The context of every item, as the decoder would hold it."""
    size = len(items)
    tokens = np.zeros((size, width), np.int32)
    length = np.zeros(size, np.int32)
    outputs = np.zeros_like(tokens)
    for i, (row, output) in enumerate(items):
        history = (*rows[row].prompt, *output)
        tokens[i, : len(history)] = history
        length[i] = len(history) - 1
        outputs[i, : len(output)] = output
    # The samplers of all rows, whichever are left: all calls share programs.
    of = np.asarray([item[0] for item in items])
    samplers = [make_sampler(side, len(rows), V) for side in zip(*(row[1:] for row in rows))]
    samplers = jax.tree.map(lambda x: np.asarray(x)[of], samplers)
    num_output = np.asarray([len(output) for _, output in items], np.int32)

    def start(x):
        return x.start(tokens, length + 1 - num_output, V).advance(outputs, num_output)

    sampler, draft_sampler = jax.tree.map(np.asarray, [jax.jit(start)(x) for x in samplers])
    return tokens, length, sampler, draft_sampler


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
    """Prefills both models afresh, drafts with forced noise, scores the window."""
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
