"""Checks inside the round: of a drafter's proposal and of the target's scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.contracts import Proposal, Rule, TargetScores, Verdict
from spec_jax.decoding.state import Finish, System
from spec_jax.errors import ConfigError
from spec_jax.shapes import check_shapes


def validate_proposal(proposal: Proposal, system: System, batch: int) -> Proposal:
    """Makes a faulty proposal safe to feed and sets its ``fault``, row by row.

    Raises:
      ShapeError: at tracing, an array of another shape than the contract's.
      ConfigError: at tracing, the rule needs what the drafter does not give.
    """
    drafter, rule, V = system.drafter, system.rule, system.target.vocab_size
    sizes = {"B": batch, "K": system.num_draft, "V": V}
    if proposal.parents is not None:
        check_shapes(sizes, parents=(proposal.parents, "B K"))
        if system.has_expected:
            raise ConfigError("has_expected is set; expected acceptance is known of chains alone")
        if not rule.has_trees:
            raise ConfigError(
                f"rule {rule.name!r} accepts chains only; drafter {drafter.name!r} proposes trees"
            )
    check_shapes(sizes, tokens=(proposal.tokens, "B K"), n_draft=(proposal.n_draft, "B"))
    for name in ("probs", "logits"):
        array = getattr(proposal, name)
        if array is not None:
            check_shapes(sizes, **{name: (array, "B K V")})
    is_unknown = rule.needs_probs and drafter.is_sampled and proposal.probs is None
    if is_unknown or (rule.needs_logits and proposal.logits is None):
        what = "probs" if is_unknown else "logits"
        raise ConfigError(
            f"rule {rule.name!r} needs the drafts' {what}, which drafter {drafter.name!r} "
            "did not put into its Proposal"
        )
    offered = proposal.is_offered
    is_valid = (proposal.tokens >= 0) & (proposal.tokens <= system.target.last_id)
    if proposal.parents is not None:
        is_before = (proposal.parents >= 0) & (proposal.parents <= jnp.arange(system.num_draft))
        parents = jnp.where(is_before, proposal.parents, 0)
        proposal = proposal.replace(parents=parents)
        is_valid &= is_before & proposal.paths[:, 1:, 0]
    n_draft = jnp.clip(proposal.n_draft, 0, system.num_draft)
    is_invalid = (offered & ~is_valid).any(axis=1) | (proposal.n_draft != n_draft)
    fault = jnp.where(is_invalid, Finish.INVALID_DRAFT, Finish.RUNNING)
    if proposal.is_sound is not None:
        fault = jnp.where(proposal.is_sound, fault, Finish.NAN_DRAFT)
    tokens = jnp.where(is_valid, proposal.tokens, 0)
    fault = fault.astype(jnp.int32)  # of no weak type, with which programs would compile twice
    return proposal.replace(tokens=tokens, n_draft=n_draft, is_sound=None, fault=fault)


def has_faulty_scores(
    rule: Rule, scores: TargetScores, proposal: Proposal, verdict: Verdict
) -> jax.Array:
    """bool[B], whether the target's logits were not finite at a node that the rule has read."""
    index = jnp.arange(scores.processed.shape[1])
    if rule.is_joint:
        is_read = index <= proposal.n_draft[:, None]
    elif verdict.path is None:
        is_read = index <= verdict.n_accept[:, None]
    else:
        is_read = jnp.take_along_axis(proposal.paths, verdict.last[:, None, None], axis=1)[:, 0]
    is_finite = jnp.isfinite(scores.processed.max(axis=-1))
    return (~is_finite & is_read).any(axis=1)
