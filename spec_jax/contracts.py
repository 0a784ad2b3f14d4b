"""The types that the parts of speculative decoding exchange.

A *drafter* makes a ``Proposal``, the *target* scores it, and a *rule* turns both into a
``Verdict``; the parts know each other through these types alone. Drafted tokens are the nodes of
a tree, numbered parents first. A chain is a tree without branches.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax import tree as trees
from spec_jax.errors import ConfigError, ShapeError


class Cache(Protocol):
    """What the decoder needs from the state of a model, with attention or state-space layers.

    Invariant: after ``commit(n)`` the state equals that of a fresh prefill of the same tokens,
    whatever else the window held.
    """

    length: jax.Array  # i32[B], committed tokens

    def commit(self, n: jax.Array, path: jax.Array | None = None) -> Cache:
        """Returns the cache with ``n`` tokens of the window committed and the others forgotten.

        Args:
          n: i32[B], how many tokens are committed.
          path: i32[B,P], their positions in the window, ascending, of which the first n count;
            None means the first n positions.
        """

    def insert_row(self, row: Any, other: Cache) -> Cache:
        """Returns the cache with row ``row`` replaced by the only row of ``other``."""

    def snapshot(self) -> Any:
        """Returns a copy of the committed state, see ``models/caches/snapshot.py``."""

    def restore_from_snapshot(self, snapshot: Any) -> Cache:
        """Returns the cache in the state of a snapshot."""


class ForwardOutput(NamedTuple):
    """Result of a forward pass.

    Attributes:
      hidden: dtype[B,T,D], the input of ``unembed``.
      cache: the cache with the window written and ``length`` unchanged.
      features: dtype[B,T,E], the tapped states that heads draft from, or None.
    """

    hidden: jax.Array
    cache: Any
    features: jax.Array | None = None


def _unchanged(cache: Any, width: int) -> Any:
    del width
    return cache


class Model(NamedTuple):
    """A language model as pure functions. Targets and standalone drafts are both of this type.

    Attributes:
      vocab_size: V.
      max_length: maximum tokens of a row, prompt and output together.
      init_cache: ``(params, batch, slots) -> Cache`` in the weights' dtype.
      forward: ``(params, tokens i32[B,T], cache, *, window_offset) -> ForwardOutput``. For trees
        of drafts it also takes ``window_mask``, bool[B,T,W]: which slots of the window each token
        sees; and beside it ``positions``, i32[B,T], for tokens whose position is not the number of
        tokens that they see before themselves, such as those of a block that see each other. With
        ``num_layers`` it stops after so many layers, so that these can draft ("self"). For heads
        it takes ``taps``, see ``embedding``.
      unembed: ``(params, hidden dtype[...,D]) -> f32[...,V]``, -inf for ids that are padding.
      num_tokens: ids below this number are tokens and the others pad the embedding; None means
        that all ids are tokens.
      open_window: ``(cache, width) -> Cache`` with room for a window of ``width`` tokens, which
        ``commit`` closes. Only needed when several passes fill one window.
      can_rewind: ``commit`` may keep a part of the window. Otherwise a target decodes one token a
        pass (N = 1), its prompts are fed without padding, and a model cannot draft.
      config: its shape, where it is a model of the package's families.
      embedding: ``(params) -> dtype[V,D]``, the tokens' embeddings, which heads read. None: heads
        cannot draft for the model. Else ``forward`` takes ``taps``, a tuple of numbers of states of
        width D, and returns these states as ``features``: 0..L-1 is the state before that layer, L
        the one after the last layer, and L+1 the input of ``unembed``.
      num_layers: L; only needed with ``embedding``.
    """

    vocab_size: int
    max_length: int
    init_cache: Callable[..., Cache]
    forward: Callable[..., ForwardOutput]
    unembed: Callable[[Any, jax.Array], jax.Array]
    num_tokens: int | None = None
    open_window: Callable[[Any, int], Any] = _unchanged
    can_rewind: bool = True
    config: Any = None
    embedding: Callable[[Any], jax.Array] | None = None
    num_layers: int = 0

    def with_taps(self, taps: tuple[int, ...]) -> Model:
        """Returns the model whose passes return tapped states; equal taps, the same object.

        Args:
          taps: numbers of states, see ``embedding``.

        Raises:
          ConfigError: the model has no such state, or cannot be tapped.
        """
        return _tapped(self, tuple(taps))

    def ends(self, params: Any) -> dict[str, jax.Array]:
        """Returns ``embed``, dtype[V,D], and ``head``, dtype[D,V], of a model with ``embedding``.

        The head is the linear part of ``unembed``, with 0 where that returns -inf.
        """
        embed = self.embedding(params)
        units = jnp.concatenate([jnp.zeros((1, embed.shape[1])), jnp.eye(embed.shape[1])])
        bias, head = jnp.split(self.unembed(params, units.astype(embed.dtype)), (1,))
        head = jnp.nan_to_num(head - bias, nan=0.0, posinf=0.0, neginf=0.0)
        return {"embed": embed, "head": head.astype(embed.dtype)}

    def takes(self, option: str) -> bool:
        """Whether ``forward`` takes an option, such as "window_mask"."""
        options = inspect.signature(self.forward).parameters
        return option in options or any(x.kind is x.VAR_KEYWORD for x in options.values())

    @property
    def last_id(self) -> int:
        """The largest id of a token."""
        return (self.vocab_size if self.num_tokens is None else self.num_tokens) - 1


@functools.cache
def _tapped(model: Model, taps: tuple[int, ...]) -> Model:
    parts = {
        "embedding": model.embedding is not None,
        "num_layers": model.num_layers > 0,
        "taps of forward": model.takes("taps"),
    }
    if missing := ", ".join(name for name, is_there in parts.items() if not is_there):
        raise ConfigError(
            f"heads cannot draft for the target, whose Model has no {missing}; a function is "
            "wrapped for heads by wrap(Tappable(states, unembed, embedding), ...)"
        )
    L = model.num_layers
    if wrong := [i for i in taps if not 0 <= i <= L + 1]:
        raise ConfigError(f"taps {wrong} do not exist: a model of {L} layers has 0 to {L + 1}")

    @functools.wraps(model.forward)  # ``takes`` reads its signature
    def forward(params, tokens, cache, **options):
        output = model.forward(params, tokens, cache, taps=taps, **options)
        width = len(taps) * output.hidden.shape[-1]
        if getattr(output.features, "shape", (0,))[-1] != width:
            found = getattr(output.features, "shape", None)
            raise ShapeError(
                f"forward of the target returned features {found} for taps {taps}; expected "
                f"[B,T,{width}], as many states of the width of `hidden`"
            )
        return output

    return model._replace(forward=forward)


@flax.struct.dataclass
class Proposal:
    """The drafted tokens of one round.

    Node 0 is the root, the pending token, and node ``i`` is ``tokens[:, i - 1]``. The properties
    work on a batch and on a single row.
    """

    tokens: jax.Array  # i32[B,K]
    n_draft: jax.Array  # i32[B], how many of them are offered, 0..K
    # The distribution that the children of a node were really drawn from, by parent node (in a
    # chain, row i-1 belongs to token i). Siblings are drawn without replacement, in the order of
    # their indices. A child drawn after its distribution is used up counts as deterministic.
    # None: all tokens are deterministic. The loop replaces it by point masses in rows whose target
    # takes the argmax: no rule reads what was reported there.
    probs: jax.Array | None = None  # f32[B,K,V]
    logits: jax.Array | None = None  # f32[B,K,V], raw, for rules that compare logits
    # False where logits of the draft were not finite. Drafts of such logits are not offered; the
    # loop counts the round, see ``Stats.nan_drafts``.
    is_sound: jax.Array | None = None  # bool[B]
    fault: jax.Array | None = None  # i32[B], why a row cannot go on; set by the loop
    parents: jax.Array | None = None  # i32[B,K], the parent of each token's node; None: a chain
    # Nodes of a tree that are not offered, such as siblings for which no token was left; see
    # ``without``. None: all of the ``n_draft`` are offered.
    is_dropped: jax.Array | None = None  # bool[B,K]
    tree_depth: int = flax.struct.field(pytree_node=False, default=0)  # maximum depth of a node
    # Of a drafter with a memory and no ``UpdateCount.read``: how often it had been updated.
    num_updates: jax.Array | None = None  # u32[B]
    # How probably each draft is accepted if those before it are, estimated before it was drawn.
    confidence: jax.Array | None = None  # f32[B,K], of offered drafts

    @property
    def depth(self) -> int:
        """Maximum number of drafts that can be accepted."""
        return self.tokens.shape[-1] if self.parents is None else self.tree_depth

    @property
    def paths(self) -> jax.Array | None:
        """bool[B,Q,Q], the nodes on the path from the root to each node; None for a chain."""
        return None if self.parents is None else trees.paths(self.parents, self.tree_depth)

    @property
    def is_offered(self) -> jax.Array:
        """bool[B,K], which tokens are offered."""
        is_counted = jnp.arange(self.tokens.shape[-1]) < self.n_draft[..., None]
        return is_counted if self.is_dropped is None else is_counted & ~self.is_dropped

    @property
    def levels(self) -> jax.Array:
        """i32[B], the depth of the deepest node that is offered."""
        if self.parents is None:
            return self.n_draft
        depths = self.paths.sum(axis=-1, dtype=jnp.int32)[..., 1:] - 1
        return jnp.where(self.is_offered, depths, 0).max(axis=-1)

    def at_parents(self, x: jax.Array) -> jax.Array:
        """Picks each draft's parent from per-node values: [B,Q] in, [B,K] out."""
        if self.parents is None:
            return x[..., : self.tokens.shape[-1]]
        return jnp.take_along_axis(x, self.parents, axis=-1)

    def without(self, is_dropped: jax.Array) -> Proposal:
        """Returns the proposal without some drafts, and without those that follow them.

        Lossless as long as it depends on the tokens before a draft, and never on the draft itself
        or on what follows it.

        Args:
          is_dropped: bool[B,K].
        """
        if self.is_dropped is not None:
            is_dropped |= self.is_dropped
        if self.parents is None:
            kept = jnp.cumprod(~is_dropped, axis=-1, dtype=jnp.int32).sum(axis=-1)
            return self.replace(n_draft=jnp.minimum(self.n_draft, kept), is_dropped=None)
        is_dropped = (self.paths[..., 1:, 1:] & is_dropped[..., None, :]).any(axis=-1)
        return self.replace(is_dropped=is_dropped)

    def reachable(self, is_finite: jax.Array) -> Proposal:
        """Returns the proposal without the drafts that follow a node without a distribution.

        Args:
          is_finite: bool[B,Q], see ``TargetScores``.
        """
        return self.without(~self.at_parents(is_finite))

    def first_child(self, node: jax.Array) -> jax.Array:
        """i32[B], the first token that is offered as a child of ``node`` (i32[B]); -1 for none."""
        K = self.tokens.shape[-1]
        parents = jnp.arange(K) if self.parents is None else self.parents
        is_child = self.is_offered & (parents == node[..., None])
        is_first = is_child & (jnp.cumsum(is_child, axis=-1) == 1)
        return jnp.where(is_first, self.tokens, -1).max(axis=-1, initial=-1)


@flax.struct.dataclass
class TargetScores:
    """The target's scores of every node: row i is for the token after node i."""

    logits: jax.Array  # f32[B,K+1,V], raw
    processed: jax.Array  # f32[B,K+1,V], after all sampling parameters, dropped tokens -inf
    features: jax.Array | None = None  # dtype[B,K+1,E], tapped states; rules do not read them
    # Nodes that have a distribution: some token is allowed, and the logits are finite. Nothing that
    # follows another node is offered to the rule. None: all of them.
    is_finite: jax.Array | None = None  # bool[B,K+1]

    @property
    def probs(self) -> jax.Array:
        """f32[B,K+1,V], the distribution that plain decoding would sample from; 0 if none."""
        probs = jax.nn.softmax(self.processed, axis=-1)
        return probs if self.is_finite is None else jnp.where(self.is_finite[..., None], probs, 0.0)


@flax.struct.dataclass
class Noise:
    """The randomness that a rule consumes, in float32."""

    uniforms: jax.Array  # f32[B,K], in [0, 1)
    gumbel: jax.Array  # f32[B,1,V], standard Gumbel; f32[B,P,V] by depth for a coupled rule


@flax.struct.dataclass
class Verdict:
    """What a rule accepts in one round, and the token that follows.

    ``accept_probs[i]`` is the probability with which the rule accepts the i-th draft (it does
    where the uniform lies below), and ``replacement`` is the distribution of the token after the
    last accepted draft. So the probability of every outcome is known, and a certificate can sum
    over all of them.
    """

    n_accept: jax.Array  # i32[B], 0..P-1, P being the proposal's depth + 1
    tokens: jax.Array  # i32[B,P], accepted drafts, then one token of the target, then 0
    accept_probs: jax.Array  # f32[B,K], given that the draft's parent and turn are reached
    replacement: jax.Array  # f32[B,V]
    path: jax.Array | None = None  # i32[B,P], root and accepted nodes, then 0; None for a chain
    fault: jax.Array | None = None  # i32[B], why a row cannot go on; set by the loop

    @property
    def last(self) -> jax.Array:
        """i32[B], the last accepted node, or the root if none is accepted."""
        if self.path is None:
            return self.n_accept
        return jnp.take_along_axis(self.path, self.n_accept[..., None], axis=-1)[..., 0]


class TargetView(NamedTuple):
    """The target as a drafter may read it when it proposes. Nothing that it writes gets back there.

    The cache is the target's own: a drafter that feeds it tokens opens a window beside it, see
    ``models.caches.beside``. The target's states at these tokens came as features to ``prefill``
    and ``commit``.

    Attributes:
      model: its functions.
      params: its weights, as passes of a round take them.
      cache: with ``length`` tokens in each row. Its other slots hold garbage, see ``KVCache``.
    """

    model: Model
    params: Any
    cache: Any

    @property
    def config(self) -> Any:
        """Its shape; None for a custom model."""
        return self.model.config

    @property
    def length(self) -> jax.Array:
        """i32[B], tokens fed."""
        return self.cache.length


class Context(NamedTuple):
    """What a drafter may read when it proposes, beside its own parameters and state.

    Attributes:
      tokens: i32[B,M], prompt and output so far, left-aligned. ``tokens[b, length[b]]`` is the
        pending token.
      length: i32[B], tokens fed to the target.
      sampler: the draft's sampling parameters, by row, with the state of its processors. Its seed
        is the request's, with the draft sampler's own seed folded in: key the drafts by it.
      request: u32[B], the target's seed of each row, for noise that drafts share with the rule.
      is_coupled: drafts should be drawn with the rule's own noise.
      has_probs: the rule reads ``Proposal.probs``.
      has_logits: the rule reads ``Proposal.logits``.
      gumbel: f32[B,K,V] by parent node, noise to draw with instead of the drafter's own, or None.
        The certificate chooses every draft through it.
      stop_below: after a draft with a smaller probability than this, by the draft's own logits, no
        further draft of the row is offered; 0 means that all K are offered.
      is_greedy: bool[B], rows whose target takes the argmax, where no rule reads
        ``Proposal.probs``; None if that is not known.
      target: the target, for a drafter whose shape says ``reads_target``; None for any other.
    """

    tokens: jax.Array
    length: jax.Array
    sampler: Any
    request: jax.Array
    is_coupled: bool
    has_probs: bool
    has_logits: bool
    gumbel: jax.Array | None = None
    stop_below: float = 0.0
    is_greedy: jax.Array | None = None
    target: TargetView | None = None


class Prompt(NamedTuple):
    """Prompts that the target has been fed.

    Attributes:
      tokens: i32[B,T], right-padded.
      lengths: i32[B], their lengths without padding.
      pending: i32[B], the first token after each of them, which has not been fed.
      features: dtype[B,T,E], the target's states that ``DraftShape.taps`` name, of the same
        tokens; None if it names none.
      chunk: tokens of a row that a pass over them should have at most, see
        ``models.chunks.over_chunks``; None means unbounded.
    """

    tokens: jax.Array
    lengths: jax.Array
    pending: jax.Array
    features: jax.Array | None = None
    chunk: int | None = None


class DraftShape(NamedTuple):
    """What a drafter reads of the target, and how its drafts and their slots lie.

    Attributes:
      taps: indices of the target's states whose outputs it receives as features, concatenated in
        this order (see ``transformer.forward``); empty if it reads none.
      tree: the ``Tree`` or ``DynamicTree`` that it drafts; None means a chain.
      scratch_slots: cache slots past the committed length that ``propose`` may write; K + 1 if that
        is more.
      reads_target: ``propose`` reads ``Context.target``.
    """

    taps: tuple[int, ...] = ()
    tree: Any = None
    scratch_slots: int = 0
    reads_target: bool = False


class UpdateCount(NamedTuple):
    """Says that proposals depend on earlier outputs, and counts how often these changed a memory.

    That is, on outputs of other rows or of earlier calls, and not only on the row's own text and
    noise. The count enters the row's noise (see ``rng``); without it, the output is biased where
    seeds repeat. It belongs to the memory: it never falls, is saved and copied with it, and is read
    together with it or later, never earlier.

    Attributes:
      read: ``(params, state) -> u32[] or u32[B]``, called before ``propose``, whose noise then
        depends on the count; needed where drafts are sampled. None: the count is only known
        afterwards, and comes as ``Proposal.num_updates``.
    """

    read: Callable[[Any, Any], jax.Array] | None = None


class Sync(NamedTuple):
    """How a drafter's state moves by more, or by less, than the rounds that it took part in.

    Attributes:
      catch_up: ``(params, state, tokens i32[B,M], length i32[B], width) -> state``: feeds what
        skipped rounds of K = 0 committed, up to ``length`` tokens, in passes of at most ``width``
        tokens. In a skipped round neither ``propose`` nor ``commit`` is called. None: it takes part
        in these rounds, with 0 drafts.
      defer_commit: called instead of ``commit`` in a skipped round, with the same arguments; stores
        what ``catch_up`` needs. None if nothing is stored.
      max_lag: how many tokens may be skipped before ``catch_up`` must be called; None means any
        number.
      rewind: ``(state, n i32[B]) -> state`` without the last n committed tokens, whose place the
        pending token takes; None for a drafter that cannot.
    """

    catch_up: Callable[..., Any] | None = None
    defer_commit: Callable[..., Any] | None = None
    max_lag: int | None = None
    rewind: Callable[[Any, jax.Array], Any] | None = None


class Host(NamedTuple):
    """What a drafter that calls Python functions says about them.

    Attributes:
      find_error: ``(prefix, num_ahead) -> Exception | None``, called for a row with an invalid
        proposal: what a function raised after this prefix (ids of prompt and output), or after the
        prefix and up to ``num_ahead`` further drafts.
    """

    find_error: Callable[[tuple[int, ...], int], Exception | None]


class Defaults(NamedTuple):
    """What holds where a config and a call do not say it.

    Attributes:
      strategy: the acceptance strategy above temperature 0; None: "residual" for sampled drafts,
        "match" for deterministic ones.
      draft_temperature: at which it drafts above temperature 0; None: at the target's.
    """

    strategy: str | None = None
    draft_temperature: float | None = None


@runtime_checkable
class Memory(Protocol):
    """What a drafter has learned from earlier outputs. A shallow copy learns independently."""

    @property
    def params(self) -> Any:
        """The drafter's parameters, including the number of updates so far."""

    @property
    def num_updates(self) -> int:
        """How often it was updated, see ``UpdateCount``."""

    def add(self, output: Any) -> None:
        """Learns from the ids of a finished output."""


class Drafter(NamedTuple):
    """A way to draft tokens, as pure functions of its parameters and its state.

    Every drafter has the first nine attributes. The others are records with defaults, for what only
    some drafters have.

    Attributes:
      name: the name in messages and reports.
      vocab_size: V; None for a drafter that copies tokens.
      max_length: maximum tokens of a row, prompt and output together; None means unbounded. Where
        K more tokens would pass it, what the drafter proposes is not offered, nor checked.
      is_sampled: drafts are sampled from a distribution, ``Proposal.probs``, rather than chosen
        deterministically.
      init: ``(params, batch, slots) -> state``.
      prefill: ``(params, state, Prompt) -> state``.
      propose: ``(params, state, Context, num_draft) -> (Proposal, state)``.
      commit: ``(params, state, tokens i32[B,P], n i32[B], features, path) -> state``, called after
        the target has been fed the pending token and the accepted drafts, ``n`` tokens in all.
        ``tokens`` are [accepted drafts | new pending token], the first ``n`` of which count, and
        ``features[:, i]`` belongs to the token *before* ``tokens[:, i]``; ``path`` is
        ``Verdict.path``. With adaptive K, a drafter with ``taps`` gets the tokens of several rounds
        of K = 0 in one call, up to 32 of them and without a path; so it does with the last token of
        a prompt that several rows share.
      insert_row: ``(state, row, other) -> state``, where ``other`` has one row.
      shape: what it reads of the target, and how its drafts lie.
      memory: for drafters that learn from outputs; None for any other.
      sync: how it skips rounds of K = 0, and goes back.
      host: for drafters that call Python functions; None for any other.
      defaults: how it drafts, and by which rule, where nobody says so.
    """

    name: str
    vocab_size: int | None
    max_length: int | None
    is_sampled: bool
    init: Callable[..., Any]
    prefill: Callable[[Any, Any, Prompt], Any]
    propose: Callable[[Any, Any, Context, int], tuple[Proposal, Any]]
    commit: Callable[..., Any]
    insert_row: Callable[..., Any]
    shape: DraftShape = DraftShape()
    memory: UpdateCount | None = None
    sync: Sync = Sync()
    host: Host | None = None
    defaults: Defaults = Defaults()

    def __repr__(self) -> str:
        drafts = "sampled" if self.is_sampled else "deterministic"
        shape = "chains" if self.shape.tree is None else "trees"
        return f"Drafter({self.name!r}: {drafts} {shape})"


class Head(NamedTuple):
    """A head as pure functions of ``params``, ``{"head": ..., "target": ...}``.

    Attributes:
      name: the name in messages and reports.
      vocab_size: V of the target.
      max_length: maximum tokens of a row; None means unbounded.
      taps: the target's states that it reads, see ``transformer.forward``.
      width: D of the head.
      init_cache: ``(params, batch, slots) -> Cache``.
      join: ``(params, features dtype[B,T,E]) -> dtype[B,T,D]``, the states of pairs.
      feed: ``(params, state dtype[B,T,D], tokens i32[B,T], cache, window_offset, window_mask)
        -> (dtype[B,T,D], cache)``, a pass over pairs.
      recycle: ``(params, x dtype[...,D]) -> dtype[...,D]``, the state of the next pair, in place
        of the target's.
      unembed: ``(params, x dtype[...,D]) -> f32[...,V]``, -inf for what it cannot draft.
    """

    name: str
    vocab_size: int
    max_length: int | None
    taps: tuple[int, ...]
    width: int
    init_cache: Callable[..., Any]
    join: Callable[..., jax.Array]
    feed: Callable[..., tuple[jax.Array, Any]]
    recycle: Callable[..., jax.Array]
    unembed: Callable[..., jax.Array]


class Rule(NamedTuple):
    """An acceptance rule: a pure function of scores, proposal and noise.

    Attributes:
      name: the name in configs, flags and reports.
      accept: ``(TargetScores, Proposal, Noise) -> Verdict``.
      is_lossless: the emitted tokens have exactly the target's distribution.
      expected_acceptance: ``(p f32[V], q f32[V] | None, token) -> f32``, the probability that a
        draft from ``q`` (or the given token) is accepted at a position that is reached; None if
        there is no closed form.
      needs_probs: it reads ``Proposal.probs``, so a sampled draft must come with them.
      needs_logits: it reads ``Proposal.logits``.
      is_coupled: its noise is one Gumbel vector a position, the same as in plain decoding, and
        sampled drafts should be drawn with it.
      is_greedy: it emits argmax tokens, so it needs temperature 0.
      is_joint: it reads nodes after the first rejection.
      has_trees: it accepts in trees of drafts as well as in chains.
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

    def __repr__(self) -> str:
        chains = "chains and trees" if self.has_trees else "chains"
        return f"Rule({self.name!r}: {'lossless' if self.is_lossless else 'lossy'}, for {chains})"


class Processor(NamedTuple):
    """A logit processor: three pure functions of one row, which share a state.

    They are called for the target at every node of a round, for the draft at every token that it
    drafts, and for emitted tokens; ``processors.per_token`` makes a processor from functions of one
    token.

    Attributes:
      name: the name in messages; a row has one processor of a name.
      init: ``(tokens i32[T], length i32[], vocab_size) -> state``, of a prompt whose first
        ``length`` tokens count. A state is a pytree of arrays, and a function of the tokens alone.
      apply: ``(params, state, logits f32[T,V], drafted i32[K], is_before bool[T,K] | None) ->
        f32[T,V]``: the logits of T nodes. ``state`` is that of the emitted tokens, and node t comes
        after the drafts ``is_before[t]``, in order; None stands for a chain, whose node t comes
        after the first t drafts. ``params`` are what ``SamplerConfig`` sets for the processors of
        the package, None for others.
      advance: ``(state, tokens i32[P], n i32[]) -> state``, after the first n tokens.
    """

    name: str
    init: Callable[..., Any]
    apply: Callable[..., jax.Array]
    advance: Callable[..., Any]

    def __repr__(self) -> str:
        return f"Processor({self.name!r})"


class Round(NamedTuple):
    """One round, as an observer sees it.

    Attributes:
      proposal: the drafts; ``tokens`` i32[B,K], K = 0 in a round that drafts nothing. ``probs`` is
        None there and where drafts are copied, each of them with probability 1.
      scores: the target's scores of every node; ``features`` is None if the drafter taps none.
      verdict: what the rule accepted. Its first ``n_emit`` tokens are emitted.
      begin: i32[B], index of the first of these among the row's tokens, prompt included.
      n_emit: i32[B], how many tokens are emitted, after stop tokens and limits, and before a node
        without a distribution; 0 in a row that has finished or stops at another fault.
    """

    proposal: Proposal
    scores: TargetScores
    verdict: Verdict
    begin: jax.Array
    n_emit: jax.Array

    @property
    def nodes(self) -> jax.Array:
        """i32[B,P], the node whose scores each token of the verdict was taken from."""
        path = self.verdict.path
        P = self.verdict.tokens.shape[1]
        return jnp.broadcast_to(jnp.arange(P), self.verdict.tokens.shape) if path is None else path

    @property
    def columns(self) -> jax.Array:
        """i32[B,P], the index of each token among the row's; -1 for those that are not emitted."""
        index = jnp.arange(self.verdict.tokens.shape[1])
        return jnp.where(index < self.n_emit[:, None], self.begin[:, None] + index, -1)

    @property
    def is_accepted(self) -> jax.Array:
        """bool[B,P], which emitted tokens are accepted drafts."""
        index = jnp.arange(self.verdict.tokens.shape[1])
        return index < jnp.minimum(self.verdict.n_accept, self.n_emit)[:, None]

    @property
    def reached(self) -> jax.Array:
        """i32[B,P], the draft that the rule reached at the position of each emitted token, or -1.

        It is the token itself, or the draft that the token replaces: in a tree the first of the
        rejected siblings.
        """
        rejected = self.proposal.first_child(self.verdict.last)[:, None]
        drafts = jnp.where(self.is_accepted, self.verdict.tokens, rejected)
        return jnp.where(self.columns < 0, -1, drafts)


class FirstToken(NamedTuple):
    """The token that prefill samples, as an observer sees it.

    Attributes:
      scores: the target's, of one node: its arrays are [B,1,...], without features.
      tokens: i32[B,1].
      begin: i32[B], its index among the row's tokens: the length of the prompt.
      n_emit: i32[B], 1, or 0 in a row that ends before it, since its scores were not finite.
    """

    scores: TargetScores
    tokens: jax.Array
    begin: jax.Array
    n_emit: jax.Array

    @property
    def columns(self) -> jax.Array:
        """i32[B,1], the token's index among the row's; -1 where it is not emitted."""
        return jnp.where(self.n_emit > 0, self.begin, -1)[:, None]


class Observer(NamedTuple):
    """Watches decoding and keeps a state of its own, without changing a token.

    The observer's state is part of the loop's state: it is kept across streams, adaptive K and
    refilled rows. Functions must be pure. Two observers are equal if their functions are the same
    objects, so make an observer once: then compiled programs are shared.

    Attributes:
      name: the key of what it has seen in ``DecodeState.seen``; of several observers each has one.
      init: ``(batch, slots) -> seen``, before anything is seen: arrays [batch,...] if is_by_row.
      update: ``(seen, Round) -> seen``, called after every round.
      first: ``(seen, FirstToken) -> seen``, called by prefill; None: the first token is not seen.
      is_by_row: every array has the rows first, so that a refilled row begins anew. Otherwise all
        rows share what is seen, a refilled row adds to it, and its first token is not seen.
      needs_probs: it reads ``Proposal.probs``, which a drafter may leave out where no rule does. It
        must expect None there: in rounds of K = 0, and of drafts that are copied.
      needs_processed: it reads ``TargetScores.processed``, of which a greedy rule needs no more
        than the argmax.
    """

    name: str
    init: Callable[[int, int], Any]
    update: Callable[[Any, Round], Any]
    first: Callable[[Any, FirstToken], Any] | None = None
    is_by_row: bool = True
    needs_probs: bool = False
    needs_processed: bool = False
