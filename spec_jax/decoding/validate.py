"""Checks inside the round: of a drafter's proposal, of a rule's verdict, of the target's scores.

They apply to all drafters and rules, the package's too. A row with an invalid draft or verdict ends
before this round's tokens, with a reason that names what was at fault. The other rows go on.

A node without a distribution, whose logits are not finite or of which every token is forbidden, is
a fault only of the target, and only where a token would be emitted from it: the row ends there,
after the tokens before it, as in plain decoding. Drafts without a distribution are not offered.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.contracts import Proposal, Rule, TargetScores, Verdict
from spec_jax.decoding.state import Finish, System
from spec_jax.errors import ConfigError
from spec_jax.sharding import SAMPLED_ROWS, constrain, shard_map_rows

# Of the sum of a distribution. Added one after the other, 2**18 small float32 numbers may lose
# 2**18 * 2**-25 of their sum, and the loop must not stop a row for that.
_SUM_TOLERANCE = 0.01


def validate_proposal(
    proposal: Proposal, system: System, is_greedy: jax.Array | None = None
) -> Proposal:
    """Makes a faulty proposal safe to feed and sets its ``fault``, row by row.

    In rows where ``is_greedy``, the drafts' distributions are replaced by point masses and not
    checked: the target takes its argmax, which does not depend on them.

    Args:
      proposal: a proposal of the contract's shapes.
      system: target, drafter, rule and K.
      is_greedy: bool[B], see ``Context``.

    Raises:
      ConfigError: while tracing, the proposal lacks what the rule or an observer needs, or is a
        tree and the rule accepts only chains.
    """
    drafter = system.drafter
    rule = system.rule
    if proposal.parents is not None:
        if not rule.has_trees:
            raise ConfigError(
                f"rule {rule.name!r} accepts chains only; drafter {drafter.name!r} proposes trees"
            )
    reader = f"rule {rule.name!r}"
    is_unknown = system.needs_probs and drafter.is_sampled and proposal.probs is None
    if is_unknown and not rule.needs_probs:
        reader = next(f"observer {x.name!r}" for x in system.observers if x.needs_probs)
        is_unknown = system.num_draft > 0
    if is_unknown or (rule.needs_logits and proposal.logits is None):
        what = "probs" if is_unknown else "logits"
        raise ConfigError(
            f"{reader} needs the drafts' {what}, which drafter {drafter.name!r} "
            "did not put into its Proposal"
        )
    is_valid = (proposal.tokens >= 0) & (proposal.tokens <= system.target.last_id)
    if proposal.parents is not None:
        is_before = (proposal.parents >= 0) & (proposal.parents <= jnp.arange(system.num_draft))
        parents = jnp.where(is_before, proposal.parents, 0)
        proposal = proposal.replace(parents=parents)
        is_valid &= is_before & proposal.paths[:, 1:, 0]
    n_draft = jnp.clip(proposal.n_draft, 0, system.num_draft)
    has_count = proposal.n_draft == n_draft
    proposal = proposal.replace(n_draft=n_draft)
    if proposal.is_dropped is not None:
        proposal = proposal.without(proposal.is_dropped)
    is_invalid = (proposal.is_offered & ~is_valid).any(axis=1) | ~has_count
    proposal = proposal.replace(tokens=jnp.where(is_valid, proposal.tokens, 0))
    if rule.needs_logits:
        best = proposal.at_parents(proposal.logits.max(axis=-1))
        is_sound = ((best < jnp.inf) | ~proposal.is_offered).all(axis=1)
        is_sound = is_sound if proposal.is_sound is None else is_sound & proposal.is_sound
        proposal = proposal.without(~jnp.isfinite(best)).replace(is_sound=is_sound)
    fault = jnp.where(is_invalid, Finish.INVALID_DRAFT, Finish.RUNNING)
    if proposal.probs is not None and system.num_draft > 0:
        greedy = jnp.zeros(n_draft.shape, bool) if is_greedy is None else is_greedy
        probs, is_wrong = shard_map_rows(_guard_probs, SAMPLED_ROWS)(
            proposal.replace(logits=None), greedy
        )
        proposal, is_wrong = proposal.replace(probs=probs), constrain(is_wrong, "batch")
        if system.needs_probs:
            fault = jnp.where(is_wrong & ~is_invalid, Finish.INVALID_DRAFT_PROBS, fault)
    fault = fault.astype(jnp.int32)  # of no weak type, with which programs would compile twice
    return proposal.replace(fault=fault)


def _guard_probs(proposal: Proposal, is_greedy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the distributions that a rule may read, and the rows whose reports are invalid.

    Args:
      proposal: the drafts, with ``probs``.
      is_greedy: bool[B].

    Returns:
      f32[B,K,V], and bool[B].
    """
    q = proposal.probs
    tokens = proposal.tokens
    offered = proposal.is_offered
    # One pass over q: a negative entry counts as 2, and NaN and infinity stay in the sum.
    mass = jnp.where(q < 0, 2.0, q).sum(axis=-1)
    is_wrong = ~(jnp.abs(mass - 1.0) <= _SUM_TOLERANCE)
    if proposal.parents is None:
        drawn = jnp.take_along_axis(q, tokens[:, :, None], axis=2)[:, :, 0]
        is_wrong |= ~(drawn > 0)  # no draw could give this token
        is_read = offered
        point = tokens[:, :, None] == jnp.arange(q.shape[-1])
    else:
        # Children of a node without mass are deterministic, each a point mass of its own.
        is_wrong &= mass != 0
        nodes = jnp.arange(tokens.shape[1])
        is_read = (offered[:, None] & (proposal.parents[:, None] == nodes[:, None])).any(axis=2)
        point = jnp.zeros((), bool)
    read = jnp.where(is_read[:, :, None], q, 0.0)  # what no draft was drawn from may be NaN
    probs = jnp.where(is_greedy[:, None, None], point.astype(q.dtype), read)
    return probs, (is_wrong & is_read).any(axis=1) & ~is_greedy


def validate_verdict(
    verdict: Verdict, proposal: Proposal, scores: TargetScores, system: System
) -> Verdict:
    """Makes a faulty verdict safe to commit and sets its ``fault``, row by row.

    The token after a node without a distribution is not checked: it is not emitted.

    Args:
      verdict: a verdict of the contract's shapes.
      proposal: the drafts.
      scores: the target's scores of every node.
      system: target, drafter, rule and K.
    """
    proposal = proposal.reachable(scores.is_finite)  # what the rule saw
    depth = proposal.depth
    n_accept = jnp.clip(verdict.n_accept, 0, depth)
    drafts = proposal.tokens
    is_drafted = proposal.is_offered
    path = verdict.path
    has_root = True
    if path is not None:
        has_root = path[:, 0] == 0
        node = jnp.clip(path[:, 1:], 1, drafts.shape[1])

        def take(x):
            return jnp.take_along_axis(x, node - 1, axis=1)

        is_edge = (node == path[:, 1:]) & (take(proposal.parents) == path[:, :-1])
        drafts, is_drafted = take(drafts), take(is_drafted) & is_edge
        path = jnp.clip(path, 0, proposal.tokens.shape[1])
    clean = verdict.replace(n_accept=n_accept, path=path)
    has_count = verdict.n_accept == n_accept
    is_draft = (verdict.tokens[:, :-1] == drafts) & is_drafted
    has_drafts = (is_draft | (jnp.arange(depth) >= n_accept[:, None])).all(axis=1)
    has_dist = jnp.take_along_axis(scores.is_finite, clean.last[:, None], axis=1)[:, 0]
    has_replacement = _has_replacement(clean, system.target.last_id) | ~has_dist
    has_probs = _has_accept_probs(clean, proposal, system.rule)
    is_right = has_count & has_root & has_drafts & has_replacement & has_probs
    fault = jnp.where(is_right, Finish.RUNNING, Finish.INVALID_VERDICT).astype(jnp.int32)
    return clean.replace(
        n_accept=jnp.where(is_right, n_accept, 0),
        tokens=jnp.where(is_right[:, None], verdict.tokens, 0),
        path=None if path is None else jnp.where(is_right[:, None], path, 0),
        fault=fault,
    )


def _has_replacement(verdict: Verdict, last_id: int) -> jax.Array:
    """bool[B], whether the token after the accepted drafts could be drawn from the replacement.

    Only the replacement's number for this token is read. If any number is not finite, that of the
    drawn token is not, since an argmax takes the first NaN.
    """
    token = jnp.take_along_axis(verdict.tokens, verdict.n_accept[:, None], axis=1)[:, 0]
    is_id = (token >= 0) & (token <= last_id)
    index = jnp.where(is_id, token, 0)[:, None]
    mass = jnp.take_along_axis(verdict.replacement, index, axis=1)[:, 0]
    return is_id & (mass > 0) & jnp.isfinite(mass)


def _has_accept_probs(verdict: Verdict, proposal: Proposal, rule: Rule) -> jax.Array:
    """bool[B], whether the probabilities of all drafts that the rule reached are finite."""
    index = jnp.arange(proposal.tokens.shape[1] + 1)
    if rule.is_joint:
        is_read = index <= proposal.n_draft[:, None]
    elif verdict.path is None:
        is_read = index <= verdict.n_accept[:, None]
    else:
        last = verdict.last[:, None, None]
        is_read = jnp.take_along_axis(proposal.paths, last, axis=1)[:, 0]  # of each node
    is_unread = ~(proposal.at_parents(is_read) & proposal.is_offered)
    return (jnp.isfinite(verdict.accept_probs) | is_unread).all(axis=1)


def find_fault(
    scores: TargetScores, proposal: Proposal, verdict: Verdict
) -> tuple[jax.Array, jax.Array]:
    """Returns why each row cannot go on, and where.

    A root without a distribution takes precedence, since neither drafts nor verdicts cause it. Of
    other nodes the rule sees no probabilities, and nothing that follows them.

    Returns:
      i32[B], a ``Finish``, and i32[B], how many of the verdict's tokens come before the fault.
    """
    path = verdict.path
    of_path = scores.is_finite
    if path is not None:
        of_path = jnp.take_along_axis(of_path, path, axis=1)
    num_finite = jnp.cumprod(of_path, axis=1, dtype=jnp.int32).sum(axis=1)
    fault = jnp.where(proposal.fault == Finish.RUNNING, verdict.fault, proposal.fault)
    num_before = jnp.where(fault == Finish.RUNNING, num_finite, 0)
    is_target = (num_finite <= num_before) & (num_finite <= verdict.n_accept)
    return jnp.where(is_target, Finish.NAN_TARGET, fault), num_before
