"""Compiles a traced program and counts what it needs and moves on each device."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from typing import Any

import jax

from spec_jax.planning import hlo
from spec_jax.planning.chips import Chip
from spec_jax.planning.programs import Traced
from spec_jax.train.placement import device_bytes

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_OUT_OF_MEMORY = re.compile(  # two wordings
    r"Used ([\d.]+)([KMGT]?)\w* of [\d.]+\w* hbm"
    r"|memory required .*?\(([\d.]+)([KMGT]?)\w*\) exceeds available HBM \([\d.]+\w*\)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """What a compiled program does in a round of decoding, or in a step of training.

    Attributes:
      collectives: count and bytes of each kind, every branch included.
      in_branches: collectives in branches of conditionals.
      largest_gather: bytes of the largest all-gather's result.
      hbm_bytes: read from HBM and written to it.
      copies: copies of a cache, in the loop and at entry, as (name, times, bytes, place).
      rewrites: likewise of instructions that write a weight again, see ``hlo.rewrites``.
      gathers: likewise of chosen experts, which are copied on purpose.
      kernels: instructions that a GPU launches; other devices have fewer steps.
      call_hbm_bytes: what a call moves apart from its rounds.
      unknown_loops: loops whose trip count the program does not say; each is counted once.
      heaviest: bytes, name and place of the instructions that move most.
    """

    collectives: dict[str, tuple[int, int]]
    in_branches: int
    largest_gather: int
    hbm_bytes: int
    copies: list[tuple[str, int, int, str]]
    rewrites: list[tuple[str, int, int, str]]
    gathers: list[tuple[str, int, int, str]]
    kernels: int
    call_hbm_bytes: int
    unknown_loops: list[str]
    heaviest: list[tuple[int, str, str]]

    @property
    def num_collectives(self) -> int:
        return sum(count for count, _ in self.collectives.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes on each device.

    Attributes:
      params: of weights.
      cache: of keys, values and states of models.
      arguments: of all that the program is given, padded as the compiler lays it out; weights and
        cache included, and what a head shares with its target once.
      temporaries: beside arguments and results.
      state: of the arrays that are returned in place of those that are given.
      aliased: those of them that need no memory of their own.
      total: of everything together, at the same time.
    """

    params: int
    cache: int
    arguments: int = 0
    temporaries: int = 0
    state: int = 0
    aliased: int = 0
    total: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One compiled program.

    Attributes:
      needs: bytes on each device. Where the compiler has refused, ``total`` is what it says.
      counted: what it does; None where the compiler has refused.
      refusal: why the compiler has refused, or "".
      wall_s: seconds to trace and compile it.
      cpu_s: seconds of processors that this took.
    """

    needs: Needs
    counted: Counted | None
    refusal: str
    wall_s: float
    cpu_s: float

    def shortfall(self, chip: Chip) -> int:
        """The bytes that a device lacks; 0 if it fits."""
        return max(0, int(self.needs.total - chip.per_device.hbm_bytes))


def compile_and_count(trace: Any) -> Compiled:
    """Compiles a program. That it does not fit is a result.

    Args:
      trace: ``() -> Traced``.
    """
    begin = time.perf_counter(), time.process_time()

    def passed():
        return dict(wall_s=time.perf_counter() - begin[0], cpu_s=time.process_time() - begin[1])

    traced: Traced = trace()
    params = device_bytes(traced.params)
    cache = device_bytes(traced.cache)
    try:
        compiled = traced.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        used = _OUT_OF_MEMORY.search(str(error))
        if used is None:
            raise
        number, unit = (found for found in used.groups() if found is not None)
        total = max(int(float(number) * _UNITS.get(unit, 1)), params + cache)
        needs = Needs(params=params, cache=cache, total=total)
        refusal = f"the compiler refuses: {used.group(0)}"
        return Compiled(needs=needs, counted=None, refusal=refusal, **passed())
    times = passed()
    program = hlo.read(compiled.as_text())
    memory = compiled.memory_analysis()
    returned = program.entry.root.arrays[: len(jax.tree.leaves(traced.state))]
    state = [array.padded_bytes for array in returned]
    given = [program.instructions[name] for name in program.entry.parameters]
    twice = [  # of the target's weights, that a head is given too: the same arrays
        array.padded_bytes
        for i in given
        if i.op_name.replace("\\'", "'").startswith("params['draft']['target']")
        for array in i.arrays
    ]
    arguments = memory.argument_size_in_bytes - sum(twice)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    needs = Needs(
        params=params,
        cache=cache,
        arguments=arguments,
        temporaries=memory.temp_size_in_bytes,
        state=sum(state),
        aliased=sum(size for i, size in enumerate(state) if i in program.aliased),
        total=arguments + memory.temp_size_in_bytes + results,
    )
    return Compiled(needs=needs, counted=_count(program, traced), refusal="", **times)


def _count(program: hlo.Program, traced: Traced) -> Counted:
    has_rounds = program.rounds is not None
    steps = program.round() if has_rounds else program.call()
    entry = program.call() if has_rounds else []
    moved = hlo.traffic(program, steps)
    parts = {"round": steps, "entry": entry}
    weights = _weights(program)

    def listed(find, arrays, is_listed):
        return [
            (copy.name, copy.times, copy.array.padded_bytes, place)
            for place, part in parts.items()
            for copy in find(program, part, arrays)
            if is_listed(copy)
        ]

    run = {step.instruction.name for step in steps}
    return Counted(
        collectives=moved.by_kind,
        in_branches=sum(c.times for c in moved.in_branches),
        largest_gather=moved.largest_gather,
        hbm_bytes=moved.hbm_bytes,
        copies=listed(hlo.cache_copies, traced.copied, lambda copy: not copy.is_prefetch),
        rewrites=listed(hlo.rewrites, weights, lambda copy: copy.kind != "gather"),
        gathers=listed(hlo.rewrites, weights, lambda copy: copy.kind == "gather"),
        kernels=sum(step.times for step in steps if hlo.is_run(step)),
        call_hbm_bytes=hlo.traffic(program, entry).hbm_bytes,
        unknown_loops=[n for n, trips in program.loops().items() if trips is None and n in run],
        heaviest=moved.heaviest(8),
    )


def _weights(program: hlo.Program) -> dict[str, int]:
    """The parameters that are matrices, and the elements of one; of an embedding, of which rows are
    looked up, all of it.
    """
    found = {}
    for name in program.entry.parameters:
        parameter = program.instructions[name]
        dims = parameter.arrays[0].dims
        if parameter.op_name.startswith("params[") and len(dims) > 1:
            found[name] = math.prod(dims if "embed" in parameter.op_name else dims[-2:])
    return found
