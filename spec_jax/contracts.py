"""What the parts of speculative decoding hand to each other. Types only.

A *drafter* makes a ``Proposal``; the *target* scores it; a *rule* turns both into a
``Verdict``. They meet nowhere else. Nodes are numbered as a tree's are, parents first: a
chain is a tree without branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax import tree as trees


class Cache(Protocol):
    """What the decoder needs of a model's state, attention or state-space.

    Law: after ``commit(n)`` the state equals that of a fresh prefill of the same tokens,
    whatever else the window held.
    """

    length: jax.Array  # i32[B], tokens fed

    def commit(self, n: jax.Array, path: jax.Array | None = None) -> Cache:
        """Folds ``n`` (i32[B]) tokens of the window in and forgets the others.

        Args:
          n: how many.
          path: i32[B,P], where in the window they stand, in ascending order, of which the first
            n count; None: at its front.
        """

    def insert_row(self, row: Any, other: Cache) -> Cache:
        """Replaces row ``row`` by the only row of ``other``."""

    def snapshot(self) -> Any: ...

    def restore_from_snapshot(self, snapshot: Any) -> Cache: ...


class ForwardOutput(NamedTuple):
    """Result of a forward pass.

    Attributes:
      hidden: dtype[B,T,D], what ``unembed`` takes.
      cache: the cache with the window written, ``length`` unmoved.
      features: dtype[B,T,E], tapped states for heads that draft from them, or None.
    """

    hidden: jax.Array
    cache: Any
    features: jax.Array | None = None


def _as_it_is(cache: Any, width: int) -> Any:
    del width
    return cache


class Model(NamedTuple):
    """A language model as pure functions; target and standalone draft alike.

    Attributes:
      vocab_size: V.
      max_length: the most tokens a row may hold, prompt and output together.
      init_cache: ``(params, batch, slots) -> Cache``, of the weights' dtype.
      forward: ``(params, tokens i32[B,T], cache, *, window_offset) -> ForwardOutput``; for trees
        of drafts also ``window_mask`` (bool[B,T,W]: what of the window each token sees).
      unembed: ``(params, hidden dtype[...,D]) -> f32[...,V]``, -inf for ids that only pad.
      num_tokens: ids below it are tokens, the others pad the embedding; None: all are tokens.
      open_window: ``(cache, width) -> Cache`` with room for a window of ``width`` tokens that
        several passes fill; ``commit`` closes it. A window that one pass fills needs none.
      can_rewind: ``commit`` may keep a part of the window. Where it may not, a target can be
        fed accepted tokens alone (N = 1), and nothing can be drafted with it.
    """

    vocab_size: int
    max_length: int
    init_cache: Callable[..., Cache]
    forward: Callable[..., ForwardOutput]
    unembed: Callable[[Any, jax.Array], jax.Array]
    num_tokens: int | None = None
    open_window: Callable[[Any, int], Any] = _as_it_is
    can_rewind: bool = True

    @property
    def last_id(self) -> int:
        """The largest id that is a token."""
        return (self.vocab_size if self.num_tokens is None else self.num_tokens) - 1


@flax.struct.dataclass
class Proposal:
    """What a drafter proposes in one round.

    Node 0 is the root, the pending token; node ``i`` is ``tokens[:, i - 1]``. The properties
    hold for a batch and for one of its rows.
    """

    tokens: jax.Array  # i32[B,K]
    n_draft: jax.Array  # i32[B], how many of them count, 0..K
    # The distribution that the children of a node were really drawn from, by parent node (a
    # chain: row i-1 for token i), siblings without replacement in the order of their indices.
    # A child drawn when the law had no mass left is the drafter's choice, free of chance.
    # None: so is every token.
    probs: jax.Array | None = None  # f32[B,K,V]
    logits: jax.Array | None = None  # f32[B,K,V], raw, for the rules that compare logits
    is_sound: jax.Array | None = None  # bool[B], False where the draft's logits were not finite
    fault: jax.Array | None = None  # i32[B], set by the loop: why a row cannot go on
    parents: jax.Array | None = None  # i32[B,K], the parent of each token's node; None: a chain
    tree_depth: int = flax.struct.field(pytree_node=False, default=0)  # no node is deeper

    @property
    def depth(self) -> int:
        """The most drafts that can be accepted."""
        return self.tokens.shape[-1] if self.parents is None else self.tree_depth

    @property
    def paths(self) -> jax.Array | None:
        """bool[B,Q,Q], the nodes on the way from the root to each node; None for a chain."""
        return None if self.parents is None else trees.paths(self.parents, self.tree_depth)

    @property
    def is_offered(self) -> jax.Array:
        """bool[B,K], which tokens count."""
        return jnp.arange(self.tokens.shape[-1]) < self.n_draft[..., None]

    @property
    def levels(self) -> jax.Array:
        """i32[B], the depth of the deepest node that counts."""
        if self.parents is None:
            return self.n_draft
        depths = self.paths.sum(axis=-1, dtype=jnp.int32)[..., 1:] - 1
        return jnp.where(self.is_offered, depths, 0).max(axis=-1)

    def has_children(self, node: jax.Array) -> jax.Array:
        """bool[B], whether a draft behind ``node`` (i32[B]) counts."""
        if self.parents is None:
            return node < self.n_draft
        return (self.is_offered & (self.parents == node[..., None])).any(axis=-1)


@flax.struct.dataclass
class TargetScores:
    """The target's view of every node: row i is the law of the token after node i."""

    logits: jax.Array  # f32[B,K+1,V], raw
    processed: jax.Array  # f32[B,K+1,V], after all sampling parameters, dropped tokens -inf
    features: jax.Array | None = None  # dtype[B,K+1,E], tapped states; rules do not read them

    @property
    def probs(self) -> jax.Array:
        """f32[B,K+1,V], the distribution that plain decoding would sample from."""
        return jax.nn.softmax(self.processed, axis=-1)


@flax.struct.dataclass
class Noise:
    """The randomness a rule consumes; uniform in [0, 1) and standard Gumbel, float32."""

    uniforms: jax.Array  # f32[B,K]
    gumbel: jax.Array  # f32[B,1,V], or f32[B,P,V] by depth for a rule of noise by position


@flax.struct.dataclass
class Verdict:
    """A rule's judgement of one round.

    ``accept_probs[i]`` is the probability of the rule's i-th coin (the drawn uniform lies
    below it) and ``replacement`` the law of the token after the last accepted draft: so
    the probability of every outcome is known, and a certificate can sum over them.
    """

    n_accept: jax.Array  # i32[B], 0..P-1, P being the proposal's depth + 1
    tokens: jax.Array  # i32[B,P], accepted drafts, then one token of the target's, then 0
    accept_probs: jax.Array  # f32[B,K], of a draft whose parent and turn are reached
    replacement: jax.Array  # f32[B,V]
    path: jax.Array | None = None  # i32[B,P], root and accepted nodes, then 0; None for a chain

    @property
    def last(self) -> jax.Array:
        """i32[B], the last accepted node, or the root."""
        if self.path is None:
            return self.n_accept
        return jnp.take_along_axis(self.path, self.n_accept[..., None], axis=-1)[..., 0]


class Context(NamedTuple):
    """What a drafter may look at when it proposes; nothing of it is the drafter's own.

    Attributes:
      tokens: i32[B,M], prompt and output so far, left-aligned; ``tokens[b, length[b]]``
        is the pending token.
      length: i32[B], tokens fed to the target.
      sampler: the draft's sampling parameters, by row.
      counts: the token counts that penalties read; None where there are none.
      request: u32[B], the target's seed of each row.
      is_coupled: the rule wants drafts drawn with its own noise.
      has_probs: the rule reads ``Proposal.probs``.
      has_logits: the rule reads ``Proposal.logits``.
      gumbel: f32[B,K,V], by parent node, noise to draw with in place of the drafter's own, or
        None. The certificate forces every draft through it.
      stop_below: a row offers no draft after one that the draft itself gave a smaller
        probability than this; 0: all K are offered.
    """

    tokens: jax.Array
    length: jax.Array
    sampler: Any
    counts: Any
    request: jax.Array
    is_coupled: bool
    has_probs: bool
    has_logits: bool
    gumbel: jax.Array | None = None
    stop_below: float = 0.0


class CatchUp(NamedTuple):
    """How a drafter skips rounds of K = 0, and catches up before it drafts again.

    In a skipped round neither ``propose`` nor ``commit`` is called.

    Attributes:
      run: ``(params, state, tokens i32[B,M], length i32[B], width) -> state``: feeds what the
        skipped rounds committed, up to ``length`` tokens, in passes of at most ``width`` tokens.
      defer_commit: called instead of ``commit`` in a skipped round, with the same arguments; stores
        what ``run`` needs. None if nothing is stored.
      max_lag: how many tokens may be skipped before ``run`` must be called; None means any number.
    """

    run: Callable[..., Any]
    defer_commit: Callable[..., Any] | None = None
    max_lag: int | None = None


class Drafter(NamedTuple):
    """A way to propose tokens, as pure functions over its own params and state.

    Attributes:
      name: for reports.
      vocab_size: V, or None for a drafter that copies tokens.
      max_length: the most tokens a row may hold, or None.
      is_sampled: it draws from a distribution (``Proposal.probs``); else a point mass.
      init: ``(params, batch, slots) -> state``.
      prefill: ``(params, state, tokens i32[B,T], lengths i32[B], pending i32[B], features) ->
        state``; ``pending`` is each row's first token, not yet fed, and ``features[:, t]``
        belongs to ``tokens[:, t]``.
      propose: ``(params, state, context, num_draft) -> (Proposal, state)``.
      commit: ``(params, state, tokens i32[B,P], n i32[B], features, path) -> state``: the target
        has been fed the pending token and the accepted drafts, ``n`` tokens in all.
        ``tokens`` are [accepted drafts | the new pending token], ``n`` of them count, and
        ``features[:, i]`` belongs to the token *before* ``tokens[:, i]``; ``path`` is the
        verdict's. With adaptive K a drafter with ``taps`` is told of several rounds of K = 0 at
        once, of up to 32 tokens and no path.
      insert_row: ``(state, row, other) -> state``, ``other`` of one row.
      taps: the target's states that it reads as features (see ``transformer.forward``), in
        this order; empty for a drafter that reads none.
      tree: the ``Tree`` or ``DynamicTree`` that it drafts, or None: a chain.
      window: slots behind the committed ones that it writes, where these are more than K + 1.
      catch_up: how it skips rounds of K = 0, or None: it takes part in them, with 0 drafts.
      rewind: ``(state, n i32[B]) -> state`` forgets the last n tokens that were committed, the
        pending one takes their place; None for a drafter that cannot.
    """

    name: str
    vocab_size: int | None
    max_length: int | None
    is_sampled: bool
    init: Callable[..., Any]
    prefill: Callable[..., Any]
    propose: Callable[..., tuple[Proposal, Any]]
    commit: Callable[..., Any]
    insert_row: Callable[..., Any]
    taps: tuple[int, ...] = ()
    tree: Any = None
    window: int = 0
    catch_up: CatchUp | None = None
    rewind: Callable[[Any, jax.Array], Any] | None = None


class Rule(NamedTuple):
    """An acceptance rule: a pure function of scores, proposal and noise.

    Attributes:
      name: the name in configs, flags and reports.
      accept: ``(TargetScores, Proposal, Noise) -> Verdict``.
      is_lossless: the emitted tokens have exactly the target's law.
      expected_acceptance: ``(p f32[V], q f32[V] | None, token) -> f32``: the chance that a
        draft from ``q`` (or the given token) is accepted at a position that is reached;
        None where there is no closed form.
      needs_probs: it reads ``Proposal.probs``; a sampled draft must come with them.
      needs_logits: it reads ``Proposal.logits``.
      is_coupled: its noise is one Gumbel vector a position, the same as plain decoding's,
        and a sampled draft should be drawn with it.
      is_greedy: it emits argmax tokens, so it is for temperature 0.
      is_joint: it looks at nodes past the first rejection.
      has_trees: it judges trees of drafts as well as chains.
    """

    name: str
    accept: Callable[[TargetScores, Proposal, Noise], Verdict]
    is_lossless: bool
    expected_acceptance: Callable[..., jax.Array] | None = None
    needs_probs: bool = False
    needs_logits: bool = False
    is_coupled: bool = False
    is_greedy: bool = False
    is_joint: bool = False
    has_trees: bool = False
