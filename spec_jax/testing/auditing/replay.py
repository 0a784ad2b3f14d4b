"""A decoding run again round by round, with the logits that each of its tokens came from.

Also the same logits computed independently, in one pass over the whole text.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.compilation import bounded_jit
from spec_jax.decoding import round as rounds
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.request import make_request
from spec_jax.loading import LoadedModel
from spec_jax.meshes import mesh_of, use_mesh
from spec_jax.models import transformer
from spec_jax.models.params import cast, is_float
from spec_jax.sampling import Samplers, make_samplers
from spec_jax.sharding import constrain_state, replicate

_BUCKET = 64  # texts are padded to a multiple of it, so that they share programs


class Replayed(NamedTuple):
    """One row, decoded again.

    Attributes:
      tokens: the output.
      logits: f32[N,V], raw, that the tokens were chosen from, in the pass and from the cache that
        the decoder really had.
    """

    tokens: list[int]
    logits: np.ndarray


class Call(NamedTuple):
    """Arguments of the call that is decoded again.

    Attributes:
      prompts: ids of every row.
      limits: maximum output tokens of every row.
      samplers: of the target.
      stop_tokens: ids at which a row ends.
      pad_to: see ``SpeculativeDecoder.generate``.
    """

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    samplers: Samplers
    stop_tokens: Sequence[int]
    pad_to: int = 0


def replay(
    decoder: SpeculativeDecoder, call: Call, until: Mapping[int, int]
) -> dict[int, Replayed]:
    """Decodes a batch again by the rounds of the decoder's system, with its own caches.

    The rounds are the four calls of ``decode_round``, one program a round, so that the logits of
    each verify pass can be read.

    Args:
      decoder: what decoded; where it chooses K while decoding, its rounds have the largest K.
      call: the batch.
      until: how many output tokens are needed, by row.

    Returns:
      The rows of ``until``.
    """
    engine = decoder.engine(call.samplers)
    B = len(call.prompts)
    system = engine.system
    V = engine.system.target.vocab_size
    temperature = decoder.system().drafter.defaults.draft_temperature
    request = make_request(
        system,
        call.prompts,
        call.limits,
        *make_samplers(call.samplers, decoder.draft_sampler, B, V, None, temperature),
        stop_tokens=call.stop_tokens,
        pad_to=call.pad_to,
    )
    found: dict[int, list[np.ndarray]] = {row: [] for row in until}
    begin = np.asarray([len(prompt) for prompt in call.prompts])
    with use_mesh(decoder.mesh):
        *arrays, slots, _ = request
        fed = decoding.feed(engine.params()["target"], *arrays[:2], system, slots)
        first = np.asarray(fed[1])
        state = decoding.prefill(engine.params(), *arrays, system=system, slots=slots, fed=fed)
        for row, rows in found.items():
            rows.append(first[row, 0])
        params = engine.params(B)
        total = begin + 1
        is_active = np.asarray(decoding.read_rows(state).finish) == decoding.Finish.RUNNING
        while any(is_active[row] and total[row] - begin[row] < n for row, n in until.items()):
            state, *seen = _round(params, state, system=system)
            logits, after, is_active = map(np.asarray, seen)
            for row, rows in found.items():
                rows.extend(logits[row, : int(after[row] - total[row])])
            total = after
        tokens = np.asarray(decoding.read_rows(state).tokens)
    return {
        row: Replayed(
            tokens[row, begin[row] : total[row]].tolist(),
            np.asarray(rows, np.float32).reshape(-1, V),
        )
        for row, rows in found.items()
    }


@functools.partial(bounded_jit, static_argnames="system", donate_argnames="state")
def _round(params, state, *, system):
    """``decode_round``, and what the tokens were chosen from: f32[B,P,V] along the accepted path.

    Returns:
      The state, the logits, i32[B] tokens of prompt and output, bool[B] rows that go on.
    """
    proposal, state = rounds.draft(params, state, system)
    scores, state = rounds.verify(params["target"], state, proposal, system)
    verdict = rounds.accept(state, proposal, scores, system)
    logits = scores.logits
    if verdict.path is not None:
        logits = jnp.take_along_axis(logits, verdict.path[:, :, None], axis=1)
    state = rounds.commit(params["draft"], state, proposal, scores, verdict, system)
    state = constrain_state(state)
    return state, *replicate((logits, state.total, state.is_active))


class Honest(NamedTuple):
    """What the target says after each of N prefixes of a text, in one pass without a cache.

    Attributes:
      exact: f64[N,V], computed in float32; in float64 where the weights are in float32.
      rounded: f64[N,V], computed in the dtype of the weights.
      eps: of that dtype.
      unmeasured: why ``exact`` is no wider than ``rounded``, so that the effect of rounding is not
        known; None: it is wider.
    """

    exact: np.ndarray
    rounded: np.ndarray
    eps: float
    unmeasured: str | None = None


class Passes:
    """Single passes of a target over whole texts, in its own dtype and in a wider one.

    A model with a config is run by ``models.transformer``, whatever functions a decoder calls; one
    of your own by its functions, with a cache that nothing else has written, widened as the weights
    are. Its wider pass counts if the states that it returns are wider.

    Args:
      target: the model.
    """

    def __init__(self, target: LoadedModel):
        self.target = target
        leaves = jax.tree.leaves(target.params)
        self._dtype = jnp.result_type(*(x.dtype for x in leaves if is_float(x)))
        self._wide_dtype = jnp.dtype("float64" if self._dtype == jnp.float32 else "float32")

    @functools.cached_property
    def _wide(self):
        return cast(self.target.params, self._wide_dtype)

    def logits(self, ids: Sequence[int], begin: int) -> Honest:
        """Computes the logits after ``ids[:begin]``, ``ids[:begin + 1]`` and so on, to all of them.

        Args:
          ids: the text.
          begin: tokens of the first prefix, 1 or more.
        """

        def padded(size):
            return -(-size // _BUCKET) * _BUCKET

        tokens = np.zeros((1, padded(len(ids))), np.int32)
        tokens[0, : len(ids)] = ids
        N = len(ids) - begin + 1
        at = np.minimum(np.arange(begin - 1, begin - 1 + padded(N)), len(ids) - 1)
        target = self.target
        options = {"config": target.config}
        options["model"] = target.model if target.config is None else None

        def run(params, dtype=None):
            found = _one_pass(params, tokens, at.astype(np.int32), dtype=dtype, **options)
            logits, state = jax.device_get(found)
            return np.asarray(logits, np.float64)[:N, : target.model.last_id + 1], state.dtype

        eps = float(jnp.finfo(self._dtype).eps)
        with use_mesh(mesh_of(target.params)):
            rounded, _ = run(target.params)
            name = self._wide_dtype.name
            try:
                with jax.enable_x64(self._wide_dtype == jnp.float64):
                    exact, dtype = run(self._wide, None if target.config else self._wide_dtype)
            except Exception as error:
                if target.config is not None:
                    raise
                why = f"{target.name} does not run in {name}: {type(error).__name__}"
                return Honest(rounded, rounded, eps, why)
        if target.config is None and dtype != self._wide_dtype:
            why = f"{target.name} computes in {dtype} although its weights are in {name}"
            return Honest(rounded, rounded, eps, why)
        return Honest(exact, rounded, eps)


@functools.partial(bounded_jit, static_argnames=("config", "model", "dtype"), has_x64=True)
def _one_pass(params, tokens, at, *, config, model, dtype):
    """Returns f32[N,V] after the tokens ``at``, and one state, of the dtype that was computed in.

    Products of float64 weights are in float64.
    """
    if model is None:
        hidden = transformer.forward(params, tokens, config=config).hidden
        logits = transformer.unembed(params, hidden[:, at])
    else:
        cache = cast(model.init_cache(params, *tokens.shape), dtype)
        hidden = model.forward(params, tokens, cache).hidden
        logits = model.unembed(params, hidden[:, at])
    return replicate((logits[0], hidden[0, 0]))
