"""Calls of functions that a user may bring, checked while a program is traced.

The result of a drafter or a rule is compared with the contract before anything is compiled. An
error that the function raises passes through, with a note that names the function and the shapes of
its arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.contracts import (
    Drafter,
    ForwardOutput,
    Model,
    Noise,
    Prompt,
    Proposal,
    Rule,
    TargetScores,
    Verdict,
)
from spec_jax.errors import ConfigError, ShapeError, SpecJaxError

_LISTED = 16  # arrays that a note names
_READS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_HINT = (
    "Python's `if`, `while`, `and`, `int()` and the like need the value of an array, which is not "
    "known while a program is traced; take jnp.where(condition, a, b) or jax.lax.cond"
)


def call_prefill(drafter: Drafter, params: Any, prompt: Prompt, slots: int) -> Any:
    """Calls ``Drafter.init`` and ``Drafter.prefill``.

    Args:
      drafter: the drafter.
      params: its parameters.
      prompt: what the target has been fed.
      slots: the number of slots of the state.

    Returns:
      The drafter's state after the prompts.
    """
    batch = len(prompt.lengths)
    with blame(f"init of drafter {drafter.name!r}", batch=batch, slots=slots):
        state = drafter.init(params, batch, slots)
    with blame(f"prefill of drafter {drafter.name!r}", prompt=prompt, state=state):
        return drafter.prefill(params, state, prompt)


def call_forward(
    model: Model, params: Any, tokens: jax.Array, cache: Any, **options: Any
) -> ForwardOutput:
    """Calls ``Model.forward``.

    Args:
      model: the target.
      params: its weights.
      tokens: i32[B,T].
      cache: its cache.
      **options: see ``Model``.

    Raises:
      ConfigError: it does not return a ``ForwardOutput``.
      ShapeError: a result has another shape than the contract's.
    """
    with blame("forward of the target", tokens=tokens, cache=cache, params=params):
        output = model.forward(params, tokens, cache, **options)
    if not isinstance(output, ForwardOutput):
        raise ConfigError(
            f"forward of the target returned {_kind(output)}; expected a ForwardOutput(hidden, "
            "cache, features)"
        )
    B, T = tokens.shape
    for name in ("hidden", "features"):
        value = getattr(output, name)
        if (value is not None or name == "hidden") and jnp.shape(value)[:-1] != (B, T):
            raise ShapeError(
                f"forward of the target returned {name} {_text(value)}; expected [B={B},T={T},...]"
            )
    return output


def call_unembed(model: Model, params: Any, hidden: jax.Array) -> jax.Array:
    """Calls ``Model.unembed``.

    Args:
      model: the target.
      params: its weights.
      hidden: dtype[B,T,D].

    Raises:
      ShapeError: the result is no f32[B,T,V].
    """
    with blame("unembed of the target", hidden=hidden, params=params):
        logits = model.unembed(params, hidden)
    expected = (*hidden.shape[:-1], model.vocab_size)
    if getattr(logits, "shape", None) != expected or logits.dtype != jnp.float32:
        raise ShapeError(
            f"unembed of the target returned {_text(logits)}; expected f32[B={expected[0]},"
            f"T={expected[1]},V={expected[2]}], of vocab_size={model.vocab_size}"
        )
    return logits


def check_proposal(drafter: Drafter, result: Any, batch: int, num_draft: int, vocab_size: int):
    """Checks what ``Drafter.propose`` returned.

    Args:
      drafter: the drafter.
      result: what it returned.
      batch: B.
      num_draft: K.
      vocab_size: V.

    Raises:
      ConfigError: it is no pair of a proposal and a state, or ``Drafter.memory`` disagrees with
        whether the updates of a memory are counted.
      ShapeError: an array of the proposal has another shape or dtype than the contract's.
    """
    owner = f"propose of drafter {drafter.name!r}"
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not (is_pair and isinstance(result[0], Proposal)):
        raise ConfigError(f"{owner} returned {_kind(result)}; expected a pair (Proposal, state)")
    proposal, _ = result
    sizes = {"B": batch, "K": num_draft, "V": vocab_size}
    expected = {"tokens": "i32 B K", "n_draft": "i32 B"}
    optional = {
        "probs": "f32 B K V",
        "logits": "f32 B K V",
        "parents": "i32 B K",
        "is_sound": "bool B",
        "is_dropped": "bool B K",
        "num_updates": "u32 B",
        "confidence": "f32 B K",
    }
    expected |= {name: x for name, x in optional.items() if getattr(proposal, name) is not None}
    _check_arrays(owner, proposal, expected, sizes)
    memory = drafter.memory
    is_counted = proposal.num_updates is not None
    if is_counted and memory is None:
        raise ConfigError(f"{owner} counts updates of a memory; set memory=UpdateCount()")
    if memory is not None and memory.read is None and not is_counted and num_draft > 0:
        raise ConfigError(
            f"{owner} returned no num_updates although the drafter has a memory; return the count "
            "of its updates there, or give memory=UpdateCount(read=(params, state) -> count)"
        )
    if proposal.parents is not None and not 1 <= proposal.tree_depth <= num_draft:
        raise ShapeError(
            f"{owner} returned a tree with tree_depth {proposal.tree_depth}; expected the depth "
            f"of its deepest node, 1 to {num_draft}"
        )


def call_accept(rule: Rule, scores: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
    """Calls ``Rule.accept`` for all rows of a batch.

    Drafts that follow a node without a distribution are not offered to it.

    Args:
      rule: the acceptance rule.
      scores: the target's scores of every node.
      proposal: the drafts.
      noise: the noise of this round.

    Raises:
      ConfigError: the rule does not return a verdict, or branches in Python on the value of an
        array.
      ShapeError: an array of the verdict has another shape or dtype than the contract's, or the
        rule is written for one row.
    """
    owner = f"rule {rule.name!r}"
    if scores.is_finite is not None:
        proposal = proposal.reachable(scores.is_finite)
    given = {"target": scores, "proposal": proposal, "noise": noise}

    def accept(scores, proposal, noise):
        verdict = rule.accept(scores, proposal, noise)
        _check_verdict(owner, verdict, proposal, scores.processed.shape[-1])
        return verdict

    try:
        with blame(f"accept of {owner}", **given):
            return accept(scores, proposal, noise)
    except Exception as error:
        of_one_row = _error_on_one_row(rule, given)
        if isinstance(error, _READS_A_VALUE) or isinstance(of_one_row, _READS_A_VALUE):
            raise ConfigError(
                f"accept of {owner} branches on the value of an array: {_HINT}. A rule that is "
                "written for one row is then mapped over the rows: "
                "Rule(..., accept=spec_jax.rules.batched(function))"
            ) from error
        if of_one_row is None:
            raise ShapeError(
                f"accept of {owner} is written for one row and was given the batch, "
                f"{_listed(given)}; map it over the rows: "
                "Rule(..., accept=spec_jax.rules.batched(function))"
            ) from error
        raise


def _check_verdict(owner: str, verdict: Any, proposal: Proposal, vocab_size: int) -> None:
    if not isinstance(verdict, Verdict):
        raise ConfigError(
            f"accept of {owner} returned {_kind(verdict)}; expected a Verdict(n_accept, tokens, "
            "accept_probs, replacement)"
        )
    B, K = proposal.tokens.shape
    sizes = {"B": B, "K": K, "V": vocab_size, "P": proposal.depth + 1}
    expected = {
        "n_accept": "i32 B",
        "tokens": "i32 B P",
        "accept_probs": "f32 B K",
        "replacement": "f32 B V",
    }
    if proposal.parents is not None:
        expected["path"] = "i32 B P"
    elif verdict.path is not None:
        raise ShapeError(f"accept of {owner} returned a path; the drafts are a chain: leave it out")
    _check_arrays(f"accept of {owner}", verdict, expected, sizes)


def _error_on_one_row(rule: Rule, given: Mapping[str, Any]) -> Exception | None:
    """Returns the error of the rule mapped over the rows; None if it works that way."""
    mapped = rule._replace(accept=jax.vmap(rule.accept))
    try:
        scores, proposal, noise = given.values()
        verdict = jax.eval_shape(mapped.accept, scores, proposal, noise)
        _check_verdict("", verdict, proposal, scores.processed.shape[-1])
    except Exception as error:
        return error
    return None


def check_state(owner: str, before: Any, after: Any) -> None:
    """Checks that a state keeps its structure, shapes and dtypes, as a loop requires.

    Args:
      owner: the functions that made the new state from the old one.
      before: the old state.
      after: the new state.

    Raises:
      ShapeError: the structure has changed, or an array, which the message names.
    """
    old, new = (dict(_leaves(state)) for state in (before, after))
    for name in [*old, *new]:
        found, expected = (
            _text(leaves[name]) if name in leaves else "nothing" for leaves in (new, old)
        )
        if found != expected:
            raise ShapeError(
                f"{owner} made state{name} {found}; expected {expected}, as it was: a loop "
                "carries a state of one structure"
            )
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ShapeError(
            f"{owner} made a state of structure {jax.tree.structure(after)}; expected "
            f"{jax.tree.structure(before)}, as it was"
        )


def check_rows(owner: str, state: Any, batch: int) -> None:
    """Checks that the first axis of every array of a state is the rows.

    Args:
      owner: the function that made the state.
      state: a pytree.
      batch: B.

    Raises:
      ShapeError: an array has another first axis; the message names it.
    """
    for name, leaf in _leaves(state):
        if getattr(leaf, "shape", ())[:1] != (batch,):
            raise ShapeError(
                f"{owner} made state{name} {_text(leaf)}; expected the rows first, [B={batch},...]"
            )


@contextlib.contextmanager
def blame(owner: str, **given: Any) -> Iterator[None]:
    """Adds a note to an error that is raised inside: which function, and its arguments."""
    try:
        yield
    except SpecJaxError:
        raise
    except Exception as error:
        error.add_note(f"raised in {owner}, which was given {_listed(given)}")
        if isinstance(error, _READS_A_VALUE):
            error.add_note(_HINT)
        raise


def _check_arrays(
    owner: str, record: Any, expected: Mapping[str, str], sizes: Mapping[str, int]
) -> None:
    kinds = {"i32": np.integer, "u32": np.uint32, "f32": np.floating, "bool": np.bool_}
    wrong = []
    for name, text in expected.items():
        kind, *axes = text.split()
        shape = tuple(sizes[axis] for axis in axes)
        value = getattr(record, name)
        is_array = hasattr(value, "shape") and hasattr(value, "dtype")
        if not (
            is_array and tuple(value.shape) == shape and jnp.issubdtype(value.dtype, kinds[kind])
        ):
            found = _text(value) if is_array else _kind(value)
            of = ",".join(f"{axis}={size}" for axis, size in zip(axes, shape))
            wrong.append(f"{name} {found}, expected {kind}[{of}]")
    if wrong:
        raise ShapeError(f"{owner} returned " + "; ".join(wrong))


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the path and the value of every leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path), leaf


def _listed(given: Mapping[str, Any]) -> str:
    leaves = [(name + path, x) for name, tree in given.items() for path, x in _leaves(tree)]
    parts = [f"{name} {_text(leaf)}" for name, leaf in leaves]
    more = [f"and {len(parts) - _LISTED} more"] if len(parts) > _LISTED else []
    return ", ".join(parts[:_LISTED] + more)


def _text(leaf: Any) -> str:
    """An array as ``f32[2,4]``, anything else as it prints."""
    if not hasattr(leaf, "shape"):
        return repr(leaf)
    name = str(leaf.dtype)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        name = name.replace(long, short)
    return f"{name}[{','.join(map(str, leaf.shape))}]"


def _kind(value: Any) -> str:
    article = "an" if type(value).__name__[0] in "aeiouAEIOU" else "a"
    return "None" if value is None else f"{article} {type(value).__name__}"
