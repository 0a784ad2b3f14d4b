"""What a compiled program moves: collectives over the mesh, bytes of HBM, copies of a cache.

HBM bytes are estimated from the instructions that run, each as often as it does, since the
compiler's own analysis counts a loop's body once. An instruction reads its operands and writes its
results; inside of a fusion nothing else is read or written. Slices count by their size, also where
a fusion takes them of an operand, and an update in place by what it writes. A custom call that
writes into an operand neither reads nor writes all of it: as much counts as its other operands
hold. A grouped product of a TPU reads at most one matrix for each of its rows. Arrays in on-chip
memory and scalars are free. Of a conditional the dearest branch counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spec_jax.planning.hlo import Array, Computation, Instruction, Program, Step

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_NOTHING = (  # neither read nor written
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "domain",
    "async-start",
)
_MOVED = ("bitcast", "convert", "copy", "reshape", "transpose")  # fused: nothing but other indices
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that runs.

    Attributes:
      kind: such as "all-reduce".
      num_bytes: of a device's operands or results, whichever are larger: of a gather the results.
      group: number of devices that take part together; 0 if the text does not say it.
      times: how often it runs.
      op_name: where it stands in the traced program.
      in_branch: it stands in a branch of a conditional.
    """

    kind: str
    num_bytes: int
    group: int
    times: int
    op_name: str
    in_branch: bool


@dataclasses.dataclass(frozen=True)
class Move:
    """What one instruction reads from HBM and writes to it, each time that it runs."""

    step: Step
    read: int
    written: int


@dataclasses.dataclass(frozen=True)
class Copy:
    """An instruction that makes another array of a cache, or of a layer of it.

    Attributes:
      name: of the instruction.
      kind: its opcode, or of a fusion that of its root.
      array: what it makes.
      times: how often it runs.
      is_prefetch: it moves the array between HBM and on-chip memory as it is.
      op_name: where it stands in the traced program.
    """

    name: str
    kind: str
    array: Array
    times: int
    is_prefetch: bool
    op_name: str


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a round, or a call without its rounds, moves on each device.

    Attributes:
      collectives: all that run, in every branch of every conditional.
      moves: what is read and written, by instruction.
    """

    collectives: tuple[Collective, ...]
    moves: tuple[Move, ...]

    def count(self, kind: str | None = None) -> int:
        """Returns how many collectives run, of one kind or of all."""
        return sum(c.times for c in self.collectives if kind in (None, c.kind))

    def collective_bytes(self, kind: str | None = None) -> int:
        """Returns the bytes of the collectives, of one kind or of all."""
        return sum(c.times * c.num_bytes for c in self.collectives if kind in (None, c.kind))

    @property
    def in_branches(self) -> tuple[Collective, ...]:
        """The collectives in branches of conditionals."""
        return tuple(c for c in self.collectives if c.in_branch)

    @property
    def largest_gather(self) -> int:
        """The bytes of the largest all-gather's result."""
        return max((c.num_bytes for c in self.collectives if c.kind == "all-gather"), default=0)

    @property
    def hbm_bytes(self) -> int:
        """Bytes read and written, with the dearest branch of each conditional."""
        return _total(self.moves, 0)

    def heaviest(self, n: int = 10) -> list[tuple[int, str, str]]:
        """Returns the n instructions that move most: bytes, name and place in the program."""

        def by_bytes(m):
            return (m.read + m.written) * m.step.times

        ranked = sorted(self.moves, key=by_bytes, reverse=True)[:n]
        return [(by_bytes(m), m.step.instruction.name, m.step.instruction.op_name) for m in ranked]


def _total(moves: Iterable[Move], depth: int) -> int:
    """Bytes of moves that are in the same branches up to ``depth``."""
    total = 0
    inside = {}
    for move in moves:
        branch = move.step.branch[depth:]
        if branch:
            conditional, taken = branch[0]
            inside.setdefault(conditional, {}).setdefault(taken, []).append(move)
        else:
            total += (move.read + move.written) * move.step.times
    return total + sum(
        max(_total(taken, depth + 1) for taken in branches.values()) for branches in inside.values()
    )


def of_round(program: Program) -> Traffic:
    """Returns what one iteration of the outermost loop moves, see ``Program.round``."""
    return count(program, program.round())


def of_call(program: Program) -> Traffic:
    """Returns what a call moves apart from its rounds, see ``Program.call``."""
    return count(program, program.call())


def count(program: Program, steps: Sequence[Step]) -> Traffic:
    """Returns what instructions move.

    Args:
      program: that they are of.
      steps: the instructions that run.
    """
    collectives = []
    seen = set()
    for step in steps:
        i = step.instruction
        if i.kind not in COLLECTIVES:
            continue
        # A collective that is spread over several fusions has the same channel in each of them.
        if step.is_fused and i.channel is not None:
            if i.channel in seen:
                continue
            seen.add(i.channel)
        operands = _operands(step)
        size = max(_size(operands), _size(_results(i, operands)))
        collectives.append(
            Collective(i.kind, size, i.group_size, step.times, i.op_name, bool(step.branch))
        )
    moves = []
    for step in steps:
        if step.is_fused or step.instruction.opcode in _NOTHING:
            continue
        if step.instruction.opcode.endswith(("-done", "-update")):
            continue
        read, written = _moved(program, step)
        if read or written:
            moves.append(Move(step, read, written))
    return Traffic(tuple(collectives), tuple(moves))


def cache_copies(program: Program, steps: Sequence[Step], caches: Mapping[int, int]) -> list[Copy]:
    """Returns the instructions that copy, transpose, gather or slice a cache.

    A cache is found by where it comes from and where it goes: it is a result, or an argument that a
    result takes the place of, or on the way from one to the other. A slice counts if it is written
    to HBM: on the way to on-chip memory it is merely read.

    Args:
      program: that the steps are of.
      steps: the instructions that run.
      caches: of each result of the program that is a cache, by its number, the elements of the
        least part whose copy counts, such as one layer of a device.
    """
    memory = program.same_memory()
    entry = program.computations[program.entry]
    least: dict[Any, int] = {}
    for result, elements in caches.items():
        values = [(entry.name, entry.root.name, result)]
        if result in program.aliased:
            values.append((entry.name, entry.parameters[program.aliased[result]], 0))
        for value in values:
            home = memory.get(value, value)
            least[home] = min(elements, least.get(home, elements))
    kinds = ("copy", "transpose", "all-gather", "dynamic-slice", "slice")
    copies = []
    for step in steps:
        i = step.instruction
        kind = step.instruction.kind
        at = step.computation
        if step.is_fused or i.opcode.endswith("-done"):
            continue
        made = i
        if kind == "fusion":
            at = program.computations[i.called["calls"]]
            made = at.root
            while made.opcode == "bitcast" and made.operands:
                made = at.instructions[made.operands[0]]
            kind = made.opcode
        if kind not in kinds:
            continue
        source = at.instructions[made.operands[0]]
        while i is not made and source.opcode in _MOVED:  # fused: the same array
            source = at.instructions[source.operands[0]]
        ends = ((at.name, source.name, 0), (step.computation.name, i.name, 0))
        elements = min((least[memory[x]] for x in ends if memory.get(x) in least), default=None)
        for array in _results(i, _operands(step)):
            if elements is None or math.prod(array.dims) < elements:
                continue
            if "slice" in kind and array.space:
                continue
            given = next(iter(_operands(step)))
            is_prefetch = (
                kind == "copy"
                and given.space != array.space
                and (given.dims, given.layout) == (array.dims, array.layout)
            )
            copies.append(Copy(i.name, kind, array, step.times, is_prefetch, i.op_name))
    return copies


def _operands(step: Step) -> tuple[Array, ...]:
    named = step.computation.instructions
    return tuple(itertools.chain.from_iterable(named[n].arrays for n in step.instruction.operands))


def _results(i: Instruction, operands: tuple[Array, ...]) -> tuple[Array, ...]:
    """The arrays that it makes; an asynchronous start also repeats its operands."""
    if i.opcode == "copy-start":
        return i.arrays[:1]
    if not i.opcode.endswith("-start") or i.opcode == "all-reduce-start":
        return i.arrays
    rest = i.arrays[len(operands) :]
    return tuple(a for a in rest if a.dims) or rest[:1]


def _size(arrays: Iterable[Array]) -> int:
    return sum(a.num_bytes for a in arrays)


def _moved(program: Program, step: Step) -> tuple[int, int]:
    """Bytes that an instruction reads from HBM and writes to it."""
    i = step.instruction
    computation = step.computation
    if "AllocateBuffer" in i.attributes:
        return 0, 0
    fused = program.computations[i.called["calls"]] if i.opcode == "fusion" else None
    read = 0
    operands = [computation.instructions[n] for n in i.operands]
    for index, operand in enumerate(operands):
        if len(operand.arrays) != 1 or not _is_in_hbm(operand.arrays[0]):
            continue
        array = operand.arrays[0]
        if fused is None:
            part = _part_read(i, index)
            part = _rows_of_groups(i, array) if part is None else part
        else:
            part = _part_used(program, fused, fused.parameters[index])
        read += _scaled(array, part)
    if i.aliased:
        new = [o for n, o in enumerate(operands) if n not in i.aliased.values()]
        given = _size(a for o in new for a in o.arrays)
        return read, given + _size(a for n, a in enumerate(i.arrays) if n not in i.aliased)
    if fused is None:
        parts = [_part_written(i, [o.arrays for o in operands])]
    else:
        parts = _parts_written(fused)
    results = _results(i, tuple(a for o in operands for a in o.arrays))
    parts = parts if len(parts) == len(results) else [None] * len(results)
    written = sum(_scaled(a, part) for a, part in zip(results, parts) if _is_in_hbm(a))
    return read, written


def _is_in_hbm(array: Array) -> bool:
    return array.space == 0 and bool(array.dims)


def _scaled(array: Array, elements: int | None) -> int:
    """Bytes of so many elements of an array, at most all of it; None: all."""
    whole = math.prod(array.dims)
    if elements is None or elements >= whole:
        return array.padded_bytes
    return array.padded_bytes * elements // whole


def _elements(i: Instruction) -> int:
    """Elements of what a slice makes."""
    sizes = [math.prod(a.dims) for a in i.arrays]
    return sizes[1] if i.opcode.endswith("-start") else sizes[0]


def _rows_of_groups(i: Instruction, array: Array) -> int | None:
    """Elements that a grouped product reads of its matrices: one for each row; None: no such."""
    is_grouped = i.opcode == "custom-call" and i.name.startswith("ragged-dot")
    is_stack = is_grouped and len(array.dims) == 3
    return i.arrays[0].dims[0] * math.prod(array.dims[1:]) if is_stack else None


def _part_read(i: Instruction, index: int) -> int | None:
    """Elements that an instruction reads of an operand; None: all."""
    if index == 0:
        if i.kind in _SLICES:
            return _elements(i)
        if i.kind in ("dynamic-update-slice", "scatter"):
            return 0
    return 0 if index in i.aliased.values() else None


def _part_written(i: Instruction, operands: list[tuple[Array, ...]]) -> int | None:
    """Elements that an instruction writes of its result; None: all."""
    updates = {"dynamic-update-slice": 1, "scatter": 2}.get(i.kind)
    return None if updates is None else math.prod(operands[updates][0].dims)


def _part_used(
    program: Program, fused: Computation, name: str, outer: tuple[tuple[Computation, str], ...] = ()
) -> int | None:
    """Elements of a value that a fusion reads; None: all.

    ``outer`` has the fusions that this one stands in, each with the name of the inner one in it.
    """
    total = 0
    if fused.root.name == name:
        if not outer:
            return None
        part = _part_used(program, *outer[-1], outer[:-1])
        if part is None:
            return None
        total += part
    for user, index in fused.users.get(name, []):
        if user.opcode in _MOVED:
            part = _part_used(program, fused, user.name, outer)
        elif user.opcode == "fusion":
            inner = program.computations[user.called["calls"]]
            above = (*outer, (fused, user.name))
            part = _part_used(program, inner, inner.parameters[index], above)
        else:
            part = _part_read(user, index)
        if part is None:
            return None
        total += part
    return total


def _parts_written(fused: Computation) -> list[int | None]:
    """For each result of a fusion, the elements that are written; None: all."""
    root = fused.root
    outputs = [fused.instructions[n] for n in root.operands] if root.opcode == "tuple" else [root]

    def part(i: Instruction) -> int | None:
        while i.opcode in _MOVED:
            i = fused.instructions[i.operands[0]]
        if i.kind not in ("dynamic-update-slice", "scatter"):
            return None
        own = _part_written(i, [fused.instructions[n].arrays for n in i.operands])
        into = fused.instructions[i.operands[0]]
        while into.opcode in _MOVED:
            into = fused.instructions[into.operands[0]]
        before = 0 if into.opcode == "parameter" else part(into)
        return None if before is None else own + before

    return [part(i) for i in outputs]
