"""``prefill``, ``insert`` and ``generate`` for one system and its weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from spec_jax import decoding
from spec_jax.compilation import NamedProgram
from spec_jax.decoding import Chunk, DecodeState, Record, System
from spec_jax.drafters.loaded import draft_params
from spec_jax.drafters.suffix import History
from spec_jax.engine.adaptive.runner import AdaptiveRunner, AdaptiveState, name_of_round
from spec_jax.engine.request import Request
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.meshes import use_mesh
from spec_jax.sharding import log_once, unsplit_batch


@dataclasses.dataclass(eq=False, repr=False)
class Engine:
    """Runs requests on the device, for a call or for a queue.

    An engine serves one generation. With adaptive K it keeps the lag of that generation's draft.

    Attributes:
      system: target, drafter, rule and K.
      target: the weights of the target.
      draft: the weights of the draft, or None.
      history: past outputs that a suffix drafter copies from, or None.
      adaptive: the costs and acceptance from which K is chosen; None: K is fixed.
      loop: the module ``decoding``, or an ``overlap.Overlap``.
      is_fallback: drafts were asked for, and the target cannot rewind (see ``Stats``).
      mesh: the devices of the weights and programs; None: the one device of the weights.
    """

    system: System
    target: LoadedModel
    draft: LoadedModel | LoadedHead | None = None
    history: History | None = None
    adaptive: AdaptiveState | None = None
    loop: Any = decoding
    is_fallback: bool = False
    mesh: Mesh | None = None
    _runner: AdaptiveRunner | None = None

    @property
    def num_ahead(self) -> int:
        """How many drafts the drafter may be ahead of what is emitted, 0 to K - 1."""
        return 0 if self.loop is decoding else self.system.num_draft - 1

    def params(self, batch: int | None = None, num_draft: int | None = None) -> dict[str, Any]:
        """Returns ``{"target": ..., "draft": ...}``, laid out for ``batch`` rows.

        Args:
          batch: rows that are decoded together; None: any number, as in prefill.
          num_draft: K; by default the system's.
        """
        K = self.system.num_draft if num_draft is None else num_draft
        target = self.target.cpu_layout.prepare(None if batch is None else batch * (K + 1))
        draft = None
        if self.system.num_draft > 0 and self.draft is not None:
            draft = draft_params(self.draft, target, batch, K, self.system.drafter.tree)
        elif self.system.num_draft > 0 and self.history is not None:
            draft = self.history.params
        return {"target": target, "draft": draft}

    def prefill(self, request: Request) -> DecodeState:
        """Feeds the prompts and samples each row's first token."""
        *arrays, slots, samples = request
        B, T = request.tokens.shape
        program = self._program(f"prefill of batch {B}, {T} tokens", request, T, slots, samples)
        options = dict(system=self.system, slots=slots, samples=samples)
        with use_mesh(self.mesh), program:
            return self.loop.prefill(self.params(), *arrays, **options)

    def prefill_by_chunk(self, request: Request) -> Iterator[DecodeState | None]:
        """Prefills, and yields None after every chunk of the prompts and then the state.

        In between, other rows may decode.
        """
        *arrays, slots, samples = request
        prompts = request.tokens[::samples], request.lengths[::samples]
        B, T = prompts[0].shape
        target = self.params()["target"]
        passes = decoding.feed_in_passes(target, *prompts, self.system, slots)
        num_fed = 0
        longest = int(request.lengths.max())
        while num_fed < longest:
            name = f"prefill of batch {B}, {T} tokens, from {num_fed}"
            with use_mesh(self.mesh), self._program(name, request, T, slots):
                num_fed, fed = jax.block_until_ready(next(passes))
            if num_fed % self.system.prefill_chunk == 0 or num_fed >= longest:
                yield None
        program = self._program(
            f"prefill of batch {B}, {T} tokens", request, T, slots, samples, "fed"
        )
        options = dict(system=self.system, slots=slots, samples=samples)
        with use_mesh(self.mesh), program:
            fed = decoding.finish_feeding(target, fed, self.system)
            yield decoding.prefill(self.params(), *arrays, **options, fed=fed)

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
        sizes = state.tokens.shape, len(prefix.limit)
        program = self._program("a row's insertion", state, *sizes)
        with use_mesh(self.mesh), program:
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
        if self.mesh is not None:
            for line in unsplit_batch(batch, self.mesh):
                log_once(line)
        program = self._program(name_of_round(self.system, batch), state, state.tokens.shape)
        with use_mesh(self.mesh), program:
            args = (state, jnp.asarray(stop), jnp.int32(max_rounds), jnp.int32(min_active))
            if self.adaptive is None:
                return self.loop.generate(self.params(batch), *args, system=self.system)
            if self._runner is None:
                params_of = functools.partial(self.params, batch)
                self._runner = AdaptiveRunner(self.system, params_of, self.adaptive)
            return self._runner(*args)

    def _program(self, what: str, of: Request | DecodeState, *sizes: Any) -> NamedProgram:
        """Names the next program, for ``Stats.compile_s`` and for progress."""
        samplers = jax.tree.structure((of.sampler, of.draft_sampler))
        return NamedProgram(what, self.system, samplers, of.stop_tokens.shape, *sizes)

    def read(self, state: DecodeState, row: int | None = None) -> Record:
        """Copies the output of all rows, or of one, so that the state may be donated."""
        with use_mesh(self.mesh):
            if row is None:
                return decoding.read_rows(state)
            return decoding.read_row(state, jnp.int32(row))

    def remember(self, tokens: tuple[int, ...]) -> None:
        """Keeps a finished output for a drafter that copies from past ones."""
        if self.history is not None:
            self.history.add(tokens)
