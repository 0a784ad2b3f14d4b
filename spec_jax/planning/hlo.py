"""Reads the text of a compiled XLA program: its loops, its branches, what each round executes.

``compiled.as_text()`` is one computation after another, of one instruction a line. ``read`` parses
it, and ``Program.round`` and ``Program.call`` return every instruction that runs with the number
of times that it does: loops are multiplied by their trip counts, all branches of a conditional are
included and marked, and an asynchronous operation counts once, where it starts. What these
instructions move is counted in ``traffic``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from spec_jax.errors import ConfigError

_BITS = {"pred": 8, "token": 0, "opaque": 0}  # the others say it in their name, such as bf16
_ARRAY = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<= ]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"\s+(ROOT )?%?([^\s=]+) = ")
_COMMENT = re.compile(r"/\*.*?\*/")
_TRIPS = re.compile(r'known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
_CALLERS = "calls|to_apply|body|condition|true_computation|false_computation"
_CALLED = re.compile(rf"\b({_CALLERS})=%?([^\s,)}}]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FREE = ("bitcast", "copy", "copy-done", "copy-start", "convert", "reshape")  # keep a constant


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result.

    Attributes:
      dtype: as XLA spells it, such as "bf16".
      dims: its dimensions.
      layout: dimensions from the fastest to the slowest in memory.
      tile: of the fastest dimensions; those are padded to whole tiles.
      space: of memory; 0 is the device's main memory (HBM), 1 a TPU's on-chip memory.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = 0

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return math.ceil(math.prod(self.dims) * _bits(self.dtype) / 8)

    @functools.cached_property
    def padded_bytes(self) -> int:
        """Bytes in memory, where the tiled dimensions are whole tiles."""
        dims = [self.dims[i] for i in self.layout] if self.layout else list(self.dims[::-1])
        dims += [1] * (len(self.tile) - len(dims))
        for i, size in enumerate(reversed(self.tile)):
            dims[i] = -(-dims[i] // size) * size
        return math.ceil(math.prod(dims) * _bits(self.dtype) / 8)


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    return int(re.search(r"\d+", dtype).group())


def _arrays(text: str) -> tuple[Array, ...]:
    """Returns the arrays of a shape, tuples flattened."""
    arrays = []
    for dtype, dims, layout in _ARRAY.findall(text):
        order, _, rest = layout.partition(":")
        tile = re.search(r"T\(([\d,]+)\)", rest)
        space = re.search(r"S\((\d+)\)", rest)

        def ints(x):
            return tuple(int(n) for n in re.findall(r"\d+", x))

        arrays.append(
            Array(
                dtype,
                ints(dims),
                ints(order),
                ints(tile.group(1)) if tile else (),
                int(space.group(1)) if space else 0,
            )
        )
    return tuple(arrays)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in the program.
      opcode: such as "fusion", "all-reduce-start" or "while".
      arrays: of its result; of a tuple, of all its parts.
      operands: names of other instructions of the computation.
      attributes: the rest of the line.
      is_root: whether its result is the computation's.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def kind(self) -> str:
        """The opcode, without the "-start" of an asynchronous one."""
        return self.opcode.removesuffix("-start")

    @functools.cached_property
    def called(self) -> dict[str, str]:
        """The computations that it names: calls, to_apply, body, condition."""
        return dict(_CALLED.findall(self.attributes))

    @functools.cached_property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional."""
        match = _BRANCHES.search(self.attributes)
        if match:
            return tuple(name.strip().lstrip("%") for name in match.group(1).split(","))
        names = ("true_computation", "false_computation")
        return tuple(self.called[n] for n in names if n in self.called)

    @functools.cached_property
    def aliased(self) -> dict[int, int]:
        """Of a custom call: which of its results, by number, take the place of which operand."""
        if self.opcode != "custom-call":
            return {}
        match = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", self.attributes)
        pairs = re.findall(r"\{(\d*)\}: \((\d+)", match.group(1)) if match else []
        return {int(result or 0): int(operand) for result, operand in pairs}

    @property
    def op_name(self) -> str:
        """Where it stands in the traced program, with the named scopes."""
        match = _OP_NAME.search(self.attributes)
        return match.group(1) if match else ""

    @property
    def channel(self) -> str | None:
        """The channel of a collective; its pieces in several fusions have the same one."""
        match = re.search(r"channel_id=(\d+)", self.attributes)
        return match.group(1) if match else None

    @property
    def group_size(self) -> int:
        """The number of devices of a collective that take part together; 0 if not stated."""
        if "source_target_pairs" in self.attributes:
            return 2
        match = re.search(r"replica_groups=(.*?)(?:, [a-z_]+=|$)", self.attributes)
        text = match.group(1) if match else ""
        if text.startswith("["):
            return int(re.match(r"\[\d+,(\d+)\]", text).group(1))
        if text.startswith("mesh"):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", text))
            over = re.findall(r"'(\w+)'", text[text.index("]") :])
            return math.prod(int(sizes[name]) for name in over)
        first = re.match(r"\{\{([\d,]*)\}", text)
        return first.group(1).count(",") + 1 if first else 0


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text."""

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(i for i in self.instructions.values() if i.is_root)

    @functools.cached_property
    def parameters(self) -> dict[int, str]:
        """The names of its parameters by number."""
        return {
            int(i.attributes.split(",")[0]): i.name
            for i in self.instructions.values()
            if i.opcode == "parameter"
        }

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """By name, the instructions that take its result, and as which operand."""
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in self.instructions.values():
            for index, name in enumerate(instruction.operands):
                users.setdefault(name, []).append((instruction, index))
        return users


@dataclasses.dataclass(frozen=True)
class Step:
    """An instruction that runs.

    Attributes:
      instruction: what runs.
      computation: where it stands.
      times: how often it runs.
      branch: (conditional, branch) from the outermost inwards, if it stands in any; another branch
        of the same conditional may run in its place.
      is_fused: it stands inside of a fusion, whose operands and results are what memory sees.
    """

    instruction: Instruction
    computation: Computation
    times: int
    branch: tuple[tuple[str, str], ...] = ()
    is_fused: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: the name of the one that is called.
      aliased: which of its results, by number, take the place of which argument.
      unknown_trips: how often a loop runs whose trip count the text does not say.
    """

    computations: dict[str, Computation]
    entry: str
    aliased: Mapping[int, int] = dataclasses.field(default_factory=dict)
    unknown_trips: int = 1

    @property
    def instructions(self) -> list[Instruction]:
        """Every instruction of every computation, once."""
        return [i for c in self.computations.values() for i in c.instructions.values()]

    @property
    def has_rounds(self) -> bool:
        """Whether the entry has a loop whose trip count depends on its data."""
        return self._outer_loop() is not None

    def round(self) -> list[Step]:
        """Returns what one iteration of the outermost loop runs, its condition included.

        That loop is the one of the entry whose trip count the text does not say, as it depends on
        the data; of several the one with the most instructions.

        Raises:
          ConfigError: there is no such loop.
        """
        loop = self._outer_loop()
        if loop is None:
            raise ConfigError("the program has no loop whose trip count depends on its data")
        parts = (loop.called["condition"], loop.called["body"])
        return [step for name in parts for step in self._walk(name, 1)]

    def call(self) -> list[Step]:
        """Returns what one call runs apart from the rounds; a program without rounds whole."""
        loop = self._outer_loop()
        return [s for s in self._walk(self.entry, 1, skip=loop and loop.name)]

    def in_loops(self) -> list[Instruction]:
        """Returns every instruction of every loop and of what it calls, once each."""
        waiting = [i for i in self.instructions if i.opcode == "while"]
        inside: dict[str, Computation] = {}
        while waiting:
            i = waiting.pop()
            for name in {*i.called.values(), *i.branches} - set(inside):
                inside[name] = self.computations[name]
                waiting += inside[name].instructions.values()
        return [i for computation in inside.values() for i in computation.instructions.values()]

    def loops(self) -> dict[str, int | None]:
        """Returns the trip count of every loop by name; None where the text does not say it."""
        return {
            i.name: self.trips(computation, i)
            for computation in self.computations.values()
            for i in computation.instructions.values()
            if i.opcode == "while"
        }

    def trips(self, computation: Computation, loop: Instruction) -> int | None:
        """Returns how often a loop of this computation runs at most, or None.

        The compiler's own note says it, or the condition does: an element of the carry that begins
        at a constant stays below another constant. A loop that may also end earlier is counted to
        this end.
        """
        noted = _TRIPS.search(loop.attributes)
        if noted:
            return int(noted.group(1))
        bound = self._bound(self.computations[loop.called["condition"]])
        if bound is None:
            return None
        index, limit = bound
        carry = computation.instructions[loop.operands[0]]
        if carry.opcode != "tuple":
            return None
        first = _constant(computation, carry.operands[index])
        return None if first is None else max(limit - first, 0)

    def _bound(self, condition: Computation) -> tuple[int, int] | None:
        """Of a condition ``carry[i] < n``, or of that and another one: i and n."""
        root = condition.root
        computation = condition
        outer = {}
        if root.opcode == "fusion":
            computation = self.computations[root.called["calls"]]
            outer = {p: root.operands[i] for i, p in computation.parameters.items()}
            root = computation.root
        is_both = root.opcode == "and"
        for compare in map(computation.instructions.get, root.operands) if is_both else (root,):
            if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
                continue
            names = tuple(outer.get(n, n) for n in compare.operands)
            element = condition.instructions.get(names[0])
            limits = [_constant(c, names[1]) for c in (condition, computation)]
            limit = next((n for n in limits if n is not None), None)
            if element is not None and element.opcode == "get-tuple-element" and limit is not None:
                return int(re.search(r"index=(\d+)", element.attributes).group(1)), limit
        return None

    def same_memory(self) -> dict[tuple[str, str, int], Any]:
        """Returns for each value, (computation, instruction, number of its result), its memory.

        Values are in the same memory if one of them is the other one, written in place or not: a
        loop's carry and what its body returns, a call's operand and the parameter that it is, what
        an update or an aliased custom call writes into. A copy has a memory of its own.
        """
        parents: dict[tuple[str, str, int], tuple[str, str, int]] = {}

        def find(value):
            while (above := parents.setdefault(value, value)) != value:
                parents[value] = value = parents[above]
            return value

        def join(one, other):
            """Joins the results of two instructions, each (computation, instruction, first)."""
            c, i, first = one
            d, j, second = other
            for n in range(min(len(i.arrays) - first, len(j.arrays) - second)):
                parents[find((c.name, i.name, first + n))] = find((d.name, j.name, second + n))

        for computation in self.computations.values():
            for i in computation.instructions.values():
                operands = [computation.instructions[name] for name in i.operands]
                here = (computation, i, 0)
                given = [(computation, x, 0) for x in operands]
                if i.opcode == "tuple":
                    first = 0
                    for operand in operands:
                        join((computation, i, first), (computation, operand, 0))
                        first += len(operand.arrays)
                elif i.opcode == "get-tuple-element" and len(i.arrays) == 1:
                    index = int(re.search(r"index=(\d+)", i.attributes).group(1))
                    join(here, (computation, operands[0], index))
                elif i.opcode in ("bitcast", "opt-barrier", "while"):
                    join(here, given[0])
                elif i.kind in ("dynamic-update-slice", "scatter") and len(i.arrays) == 1:
                    join(here, given[0])
                for result, operand in i.aliased.items():
                    join((computation, i, result), given[operand])
                is_choice = i.opcode == "conditional"
                if is_choice or i.opcode in ("while", "call", "fusion"):
                    for n, name in enumerate(i.branches if is_choice else i.called.values()):
                        body = self.computations[name]
                        own = given[n + 1 :] if is_choice else given
                        for number, parameter in body.parameters.items():
                            join((body, body.instructions[parameter], 0), own[number])
                        if name != i.called.get("condition"):
                            join(here, (body, body.root, 0))
        return {value: find(value) for value in [*parents]}

    def _outer_loop(self) -> Instruction | None:
        entry = self.computations[self.entry]
        loops = [
            i
            for i in entry.instructions.values()
            if i.opcode == "while" and self.trips(entry, i) is None
        ]

        def size(i):
            return sum(1 for _ in self._walk(i.called["body"], 1))

        return max(loops, key=size, default=None)

    def _walk(
        self,
        name: str,
        times: int,
        branch: tuple[tuple[str, str], ...] = (),
        is_fused: bool = False,
        skip: str | None = None,
    ) -> Iterator[Step]:
        computation = self.computations[name]
        for i in computation.instructions.values():
            if i.name == skip:
                continue
            yield Step(i, computation, times, branch, is_fused)
            if i.opcode == "while":
                trips = self.trips(computation, i)
                trips = self.unknown_trips if trips is None else trips
                yield from self._walk(i.called["condition"], times * (trips + 1), branch)
                yield from self._walk(i.called["body"], times * trips, branch)
            elif i.opcode == "conditional":
                for taken in i.branches:
                    yield from self._walk(taken, times, (*branch, (i.name, taken)))
            elif i.opcode == "fusion":
                yield from self._walk(i.called["calls"], times, branch, is_fused=True)
            elif i.opcode == "call":
                yield from self._walk(i.called["to_apply"], times, branch)
            elif i.opcode == "async-start":
                yield from self._walk(i.called["calls"], times, branch)


def _constant(computation: Computation, name: str) -> int | None:
    """The integer that an instruction always has, or None."""
    instruction = computation.instructions.get(name)
    while instruction is not None and instruction.opcode in _FREE:
        instruction = computation.instructions.get(instruction.operands[0])
    if instruction is None or instruction.opcode != "constant":
        return None
    integer = re.match(r"(-?\d+),", instruction.attributes)
    return int(integer.group(1)) if integer else None


def read(text: str, unknown_trips: int = 1) -> Program:
    """Parses what ``compiled.as_text()`` returns.

    Args:
      text: of the compiled program.
      unknown_trips: how often to count a loop inside of a round whose trip count is not said.

    Raises:
      ConfigError: it is not the text of a compiled program.
    """
    computations: dict[str, Computation] = {}
    entry = None
    current = None
    for line in text.splitlines():
        if not line.startswith(" "):
            head = _HEAD.match(line)
            if head:
                current = {}
                computations[head.group(2)] = Computation(head.group(2), current)
                entry = head.group(2) if head.group(1) else entry
        elif current is not None:
            begin = _LINE.match(line)
            if begin:
                instruction = _instruction(begin, _COMMENT.sub("", line[begin.end() :]))
                current[instruction.name] = instruction
    if entry is None:
        raise ConfigError(f"no entry in the text of a compiled program: {text[:80]!r}")
    head = text[: text.find("\n")]
    aliases = re.search(r"input_output_alias=\{(.*?)\}, [a-z_]+=", head)
    pairs = re.findall(r"\{(\d*)\}: \((\d+)", aliases.group(1)) if aliases else []
    aliased = {int(result or 0): int(argument) for result, argument in pairs}
    return Program(computations, entry, aliased, unknown_trips)


def _instruction(begin: re.Match, rest: str) -> Instruction:
    if rest.startswith("("):
        end = _close(rest, 0) + 1
    else:
        end = rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = _close(rest, len(opcode))
    inside = rest[len(opcode) + 1 : close]
    attributes = rest[close + 1 :].lstrip(", ")
    if opcode in ("constant", "parameter"):  # what is in the brackets names no operand
        inside, attributes = "", f"{inside}, {attributes}"
    return Instruction(
        begin.group(2),
        opcode,
        _arrays(shape),
        tuple(_names(inside)),
        attributes,
        begin.group(1) is not None,
    )


def _close(text: str, start: int) -> int:
    """The index of the bracket that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ConfigError(f"a bracket is not closed: {text[start : start + 80]!r}")


def _names(text: str) -> Iterator[str]:
    """The names of operands; older texts have each operand's shape before it."""
    depth = 0
    start = 0
    for i, char in enumerate(text + ","):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(char, 0)
        if char == "," and depth == 0:
            word = text[start:i].split()
            if word:
                yield word[-1].lstrip("%")
            start = i + 1
