"""``prefill``, ``insert`` and ``generate`` for one system and its weights."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.compilation import NamedProgram, Timed
from spec_jax.contracts import Observer
from spec_jax.decoding import Chunk, DecodeState, Record
from spec_jax.drafters.loaded import draft_params
from spec_jax.engine.adaptive.runner import AdaptiveRunner, name_of_round
from spec_jax.engine.build import DecoderParts
from spec_jax.engine.request import Request, check_transfers
from spec_jax.engine.stats import Stats
from spec_jax.errors import ConfigError, ShapeError
from spec_jax.meshes import use_mesh
from spec_jax.sampling import Samplers
from spec_jax.sharding import log_once, unsplit_batch


class Engine:
    """Runs requests on the device, for a call or for a queue.

    An engine serves one generation. With adaptive K it keeps the lag of that generation's draft.

    Args:
      decoder: whose weights and devices they are.
      samplers: of the target.
      observers: of this generation, beside the decoder's.
      count: gets the times of what runs, with compilation apart.

    Attributes:
      decoder: as given.
      system: target, drafter, rule and K.
      dispatched_s: when the last program had been dispatched, by ``time.perf_counter``.

    Raises:
      ConfigError: the rule cannot serve the samplers' temperature, ``jax_transfer_guard`` forbids
        moving arrays, or weights have been donated.
    """

    def __init__(
        self,
        decoder: DecoderParts,
        samplers: Samplers,
        observers: tuple[Observer, ...] = (),
        count: Callable[[Stats], None] | None = None,
    ):
        check_transfers()
        for role, model in (("target", decoder.target), ("draft", decoder.draft)):
            arrays = [] if model is None else jax.tree.leaves(model.params)
            if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
                raise ConfigError(
                    f"weights of the {role} {model.name} were donated to another program, or "
                    f"deleted; go on with decoder.with_params({role}=...) and the new ones"
                )
        self.decoder = decoder
        self._count = count
        system = decoder.system(samplers)
        self.system = system._replace(observers=(*system.observers, *observers))
        self._runner: AdaptiveRunner | None = None
        self.dispatched_s = 0.0

    @property
    def num_ahead(self) -> int:
        """How many drafts the drafter may be ahead of what is emitted, 0 to K - 1."""
        return self.system.num_draft - 1 if self.decoder.is_overlapped else 0

    def params(self, batch: int | None = None, num_draft: int | None = None) -> dict[str, Any]:
        """Returns ``{"target": ..., "draft": ...}``, laid out for ``batch`` rows.

        Args:
          batch: rows that are decoded together; None: any number, as in prefill.
          num_draft: K; by default the system's.
        """
        K = self.system.num_draft if num_draft is None else num_draft
        of = self.decoder
        target = of.target.cpu_layout.prepare(None if batch is None else batch * (K + 1))
        draft = None
        if self.system.num_draft > 0 and of.draft is not None:
            draft = draft_params(of.draft, target, batch, K, self.system.drafter.shape.tree)
        elif self.system.num_draft > 0 and of.history is not None:
            draft = of.history.params
        return {"target": target, "draft": draft}

    def prefill(self, request: Request, fed: Any = None) -> DecodeState:
        """Feeds the prompts and samples each row's first token.

        Args:
          request: the prompts.
          fed: the result of the last pass over them; None: they are fed here.
        """
        *arrays, slots, samples = request
        B, T = request.tokens.shape
        name = f"prefill of batch {B}, {T} tokens"
        options = dict(system=self.system, slots=slots, samples=samples)
        with self._running("prefill_s", name, request, T, slots, samples, fed is None):
            if fed is not None:
                options["fed"] = decoding.finish_feeding(self.params()["target"], fed, self.system)
            state = self.decoder.loop.prefill(self.params(), *arrays, **options)
            return self._checked(jax.block_until_ready(state), request)

    def prefill_by_chunk(self, request: Request) -> Iterator[DecodeState | None]:
        """Prefills, and yields None after every chunk of the prompts and then the state.

        In between, other rows may decode.
        """
        step = request.samples
        prompts = request.tokens[::step], request.lengths[::step]
        B, T = prompts[0].shape
        target = self.params()["target"]
        passes = decoding.feed_in_passes(target, *prompts, self.system, request.slots)
        num_fed = 0
        longest = int(request.lengths.max())
        while num_fed < longest:
            name = f"prefill of batch {B}, {T} tokens, from {num_fed}"
            with self._running("prefill_s", name, request, T, request.slots):
                num_fed, fed = jax.block_until_ready(next(passes))
            if num_fed % self.system.prefill_chunk == 0 or num_fed >= longest:
                yield None
        yield self.prefill(request, fed)

    def _checked(self, state: DecodeState, request: Request) -> DecodeState:
        """Refuses a custom model whose ``forward`` moves ``length``."""
        of = self.decoder
        if of.target.config is None and of.loop is decoding:
            length = np.asarray(state.length)
            if (length != request.lengths).any():
                raise ShapeError(
                    f"the cache of {of.target.name} holds {length.tolist()} tokens after prompts "
                    f"of {np.asarray(request.lengths).tolist()}: forward must not move "
                    "cache.length, only commit may; see spec_jax.certify(target=...)"
                )
        return state

    def insert(
        self, state: DecodeState, row: int, prefix: DecodeState, index: int = 0
    ) -> DecodeState:
        """Replaces a row by one of a prefilled request. Donates the state.

        Args:
          state: of the batch.
          row: the row's place in it.
          prefix: of the request.
          index: the place of the row in the request.
        """
        sizes = len(prefix.limit), state.tokens.shape
        with self._running("prefill_s", "a row's insertion", state, *sizes):
            return decoding.insert(state, row, prefix, index, system=self.system)

    def generate(
        self, state: DecodeState, stop: jax.Array, max_rounds: int, min_active: int = 1
    ) -> tuple[DecodeState, Chunk]:
        """Runs rounds until every row has finished, or ``max_rounds`` of them.

        With adaptive K it may return after fewer rounds. Donates the state.

        Args:
          state: of ``prefill``, or of the last call.
          stop: i32[B], a Finish for rows to end before the first round, RUNNING for the others.
          max_rounds: maximum number of rounds.
          min_active: return as soon as fewer rows are active.
        """
        batch = len(state.limit)
        if self.decoder.mesh is not None:
            for line in unsplit_batch(batch, self.decoder.mesh):
                log_once(line)
        name = name_of_round(self.system, batch)
        with self._running("decode_s", name, state, state.tokens.shape):
            args = (state, jnp.asarray(stop), jnp.int32(max_rounds), jnp.int32(min_active))
            if self.decoder.adaptive is None:
                return self.decoder.loop.generate(self.params(batch), *args, system=self.system)
            if self._runner is None:
                params_of = functools.partial(self.params, batch)
                self._runner = AdaptiveRunner(self.system, params_of, self.decoder.adaptive)
            return self._runner(*args)

    @contextlib.contextmanager
    def _running(
        self, counts_as: str, what: str, of: Request | DecodeState, *sizes: Any
    ) -> Iterator[None]:
        """Sets the mesh, names a program, for progress, and counts its time in ``Stats``."""
        samplers = jax.tree.structure((of.sampler, of.draft_sampler))
        program = NamedProgram(what, self.system, samplers, of.stop_tokens.shape, *sizes)
        with Timed() as timed, use_mesh(self.decoder.mesh), program:
            yield
        self.dispatched_s = time.perf_counter()
        if self._count is not None:
            self._count(Stats(**{counts_as: timed.run_s, "compile_s": timed.compile_s}))

    def read(self, state: DecodeState) -> Record:
        """Copies the output of all rows, so that the state may be donated."""
        with use_mesh(self.decoder.mesh):
            return decoding.read_rows(state)

    def read_row(self, state: DecodeState, row: int) -> Record:
        """Copies the output of a row while the others wait."""
        with self._running("decode_s", "the reading of a row", state, state.tokens.shape):
            return decoding.read_row(state, jnp.int32(row))
