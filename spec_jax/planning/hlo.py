"""Reads the text of a compiled XLA program: what each round executes, and what that moves.

``compiled.as_text()`` is one computation after another, of one instruction a line. ``read`` parses
it, and ``Program.round`` and ``Program.call`` return every instruction that runs with the number
of times that it does: loops are multiplied by their trip counts, all branches of a conditional are
included and marked, and an asynchronous operation counts once, where it starts.

``traffic`` counts collectives and HBM bytes of these instructions, each as often as it runs, since
the compiler's own analysis counts a loop's body once. An instruction reads its operands and writes
its results; inside of a fusion nothing else is read or written. Slices count by their size, also
where a fusion takes them of an operand or of its sums, and an update in place by what it writes. A
custom call that writes into an operand neither reads nor writes all of it: as much counts as its
other operands hold. A grouped product of a TPU reads at most one matrix for each of its rows.
Arrays in on-chip memory and scalars are free. Of a conditional the dearest branch counts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from spec_jax.errors import ConfigError

_BITS = {"pred": 8, "token": 0, "opaque": 0}  # the others say it in their name, such as bf16
_ARRAY = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<= ]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"\s+(ROOT )?%?([^\s=]+) = (.*?) ([a-z][\w-]*)\(")  # up to the operands
_COMMENT = re.compile(r"/\*.*?\*/")
_TRIPS = re.compile(r'known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
_CALLERS = "calls|to_apply|body|condition|true_computation|false_computation"
_CALLED = re.compile(rf"\b({_CALLERS})=%?([^\s,)}}]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_FREE = ("bitcast", "copy", "copy-done", "copy-start", "convert", "reshape")  # keep a constant

COLLECTIVES = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute "
    "collective-broadcast".split()
)
_NOTHING = frozenset(  # neither read nor written
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all "
    "partition-id replica-id opt-barrier domain async add-dependency get-dimension-size".split()
)
# The others read operands whole and write results, but for slices and updates.
_KNOWN = (
    COLLECTIVES
    | _NOTHING
    | frozenset(
        "abs add and atan2 batch-norm-grad batch-norm-inference batch-norm-training "
        "bitcast-convert broadcast cbrt ceil cholesky clamp compare complex concatenate convert "
        "convolution copy cosine count-leading-zeros custom-call divide dot dynamic-reshape "
        "dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft floor fusion "
        "gather imag infeed iota is-finite log log-plus-one logistic map maximum minimum multiply "
        "negate not or outfeed pad popcnt power ragged-dot real recv reduce reduce-precision "
        "reduce-window remainder reshape reverse rng rng-bit-generator rng-get-and-update-state "
        "round-nearest-afz round-nearest-even rsqrt scaled-dot scatter select select-and-scatter "
        "send set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign sine "
        "slice sort sqrt stochastic-convert subtract tan tanh topk transpose triangular-solve "
        "xor".split()
    )
)
_MOVED = ("bitcast", "convert", "copy", "reshape", "transpose")  # fused: nothing but other indices
_PRODUCTS = ("dot", "convolution", "custom-call", "ragged-dot", "scaled-dot")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place; which operand is written
_COPIES = ("copy", "transpose", "all-gather", "dynamic-slice", "slice")


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text or "")))


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

    @classmethod
    def all_of(cls, text: str) -> tuple[Array, ...]:
        """Returns the arrays of a shape, tuples flattened."""

        def one(dtype, dims, layout):
            order, _, rest = layout.partition(":")
            tile = re.search(r"T\(([\d,]+)\)", rest)
            space = re.search(r"S\((\d+)\)", rest)
            tiles = _numbers(tile and tile.group(1))
            return cls(dtype, _numbers(dims), _numbers(order), tiles, int(space[1]) if space else 0)

        return tuple(itertools.starmap(one, _ARRAY.findall(text)))

    def _bytes(self, dims: Sequence[int]) -> int:
        bits = _BITS.get(self.dtype)
        bits = _numbers(self.dtype)[0] if bits is None else bits
        return math.ceil(math.prod(dims) * bits / 8)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return self._bytes(self.dims)

    @functools.cached_property
    def padded_bytes(self) -> int:
        """Bytes in memory, where the tiled dimensions are whole tiles."""
        dims = [self.dims[i] for i in self.layout] if self.layout else list(self.dims[::-1])
        dims += [1] * (len(self.tile) - len(dims))
        for i, size in enumerate(reversed(self.tile)):
            dims[i] = -(-dims[i] // size) * size
        return self._bytes(dims)

    @property
    def is_in_hbm(self) -> bool:
        """Whether it counts: it is no scalar, and in the device's main memory."""
        return self.space == 0 and bool(self.dims)


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
        return _aliases(re.search(r"output_to_operand_aliasing=\{(.*?\))\}", self.attributes))

    @property
    def op_name(self) -> str:
        """Where it stands in the traced program, with the named scopes."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    def number(self, name: str) -> int | None:
        """Returns a number that the attributes state, such as "index" or "channel_id", or None."""
        match = re.search(rf"\b{name}=(\d+)", self.attributes)
        return int(match.group(1)) if match else None


class Computation(NamedTuple):
    """A computation of a program.

    Attributes:
      name: unique in the program.
      instructions: by name, in the order of the text.
      parameters: the names of its parameters, in their order.
      root: the instruction whose result is the computation's.
    """

    name: str
    instructions: dict[str, Instruction]
    parameters: list[str]
    root: Instruction


class Step(NamedTuple):
    """An instruction that runs.

    Attributes:
      instruction: what runs.
      times: how often it runs.
      branch: (conditional, branch) from the outermost inwards, if it stands in any; another branch
        of the same conditional may run in its place.
      is_fused: it stands inside of a fusion, whose operands and results are what memory sees.
    """

    instruction: Instruction
    times: int
    branch: tuple[tuple[str, str], ...] = ()
    is_fused: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: the one that is called.
      aliased: which of its results, by number, take the place of which argument.
      unknown_trips: how often a loop runs whose trip count the text does not say.
    """

    computations: dict[str, Computation]
    entry: Computation
    aliased: Mapping[int, int] = dataclasses.field(default_factory=dict)
    unknown_trips: int = 1

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Every instruction of every computation, by name."""
        return {n: i for c in self.computations.values() for n, i in c.instructions.items()}

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """By name, the instructions that take its result, and as which operand."""
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in self.instructions.values():
            for index, name in enumerate(instruction.operands):
                users.setdefault(name, []).append((instruction, index))
        return users

    def operands(self, i: Instruction) -> list[Instruction]:
        """Returns the instructions whose results an instruction takes."""
        return [self.instructions[name] for name in i.operands]

    @functools.cached_property
    def rounds(self) -> Instruction | None:
        """The loop of the entry whose trip count the text does not say, as it depends on the data.

        Of several the one with the most instructions; None if there is no such loop.
        """
        loops = [i for i in self.entry.instructions.values() if i.opcode == "while"]
        unknown = [i for i in loops if self.trips(i) is None]
        return max(unknown, key=lambda i: len([*self._walk(i.called["body"], 1)]), default=None)

    def round(self) -> list[Step]:
        """Returns what one iteration of the loop over rounds runs, its condition included.

        Raises:
          ConfigError: there is no such loop.
        """
        if self.rounds is None:
            raise ConfigError("the program has no loop whose trip count depends on its data")
        parts = (self.rounds.called["condition"], self.rounds.called["body"])
        return [step for name in parts for step in self._walk(name, 1)]

    def call(self) -> list[Step]:
        """Returns what one call runs apart from the rounds; a program without rounds whole."""
        return [*self._walk(self.entry.name, 1, skip=self.rounds)]

    def loops(self) -> dict[str, int | None]:
        """Returns the trip count of every loop by name; None where the text does not say it."""
        return {n: self.trips(i) for n, i in self.instructions.items() if i.opcode == "while"}

    def trips(self, loop: Instruction) -> int | None:
        """Returns how often a loop runs at most, or None.

        The compiler's own note says it, or the condition does: an element of the carry that begins
        at a constant stays below another constant. A loop that may also end earlier is counted to
        this end.
        """
        noted = _TRIPS.search(loop.attributes)
        if noted:
            return int(noted.group(1))
        root = self.computations[loop.called["condition"]].root
        outer = {}
        if root.opcode == "fusion":
            inner = self.computations[root.called["calls"]]
            outer = dict(zip(inner.parameters, root.operands))
            root = inner.root
        carry = self.instructions[loop.operands[0]]
        for compare in self.operands(root) if root.opcode == "and" else (root,):
            if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
                continue
            element, limit = (self.instructions[outer.get(n, n)] for n in compare.operands)
            limit = self._constant(limit)
            if element.opcode == "get-tuple-element" and limit is not None:
                if carry.opcode != "tuple":
                    return None
                first = self._constant(self.operands(carry)[element.number("index")])
                return None if first is None else max(limit - first, 0)
        return None

    def _constant(self, i: Instruction) -> int | None:
        """The integer that an instruction always has, or None."""
        while i.opcode in _FREE:
            i = self.operands(i)[0]
        integer = re.match(r"(-?\d+),", i.attributes) if i.opcode == "constant" else None
        return int(integer.group(1)) if integer else None

    def same_memory(self) -> Callable[[tuple[str, int]], tuple[str, int]]:
        """Returns a function of values, (instruction, number of its result), to their memory.

        Values are in the same memory if one of them is the other one, written in place or not: a
        loop's carry and what its body returns, a call's operand and the parameter that it is, what
        an update or an aliased custom call writes into. A copy has a memory of its own.
        """
        parents: dict[tuple[str, int], tuple[str, int]] = {}

        def find(value):
            while (above := parents.setdefault(value, value)) != value:
                parents[value] = value = parents[above]
            return value

        def join(one, other, first=0, second=0):
            """Joins the results of two instructions, from these numbers on."""
            for n in range(min(len(one.arrays) - first, len(other.arrays) - second)):
                parents[find((one.name, first + n))] = find((other.name, second + n))

        for i in self.instructions.values():
            operands = self.operands(i)
            is_one = len(i.arrays) == 1
            if i.opcode == "tuple":
                first = 0
                for operand in operands:
                    join(i, operand, first)
                    first += len(operand.arrays)
            elif i.opcode == "get-tuple-element" and is_one:
                join(i, operands[0], 0, i.number("index"))
            elif i.opcode in ("bitcast", "opt-barrier", "while") or (i.kind in _UPDATES and is_one):
                join(i, operands[0])
            elif i.opcode == "fusion-done":  # what was started also has its operands
                join(i, operands[0], 0, len(_arrays(self, operands[0])))
            for result, operand in i.aliased.items():
                join(i, operands[operand], result)
            bodies = []
            if i.opcode == "conditional":
                bodies = [(name, [given]) for name, given in zip(i.branches, operands[1:])]
            elif i.opcode in ("while", "call", "fusion", "fusion-start"):
                bodies = [(name, operands) for name in i.called.values()]
            for name, given in bodies:
                body = self.computations[name]
                for parameter, operand in zip(body.parameters, given):
                    join(self.instructions[parameter], operand)
                if name != i.called.get("condition"):
                    first = len(_arrays(self, i)) if i.opcode == "fusion-start" else 0
                    join(i, body.root, first)
        return find

    def _walk(
        self,
        name: str,
        times: int,
        branch: tuple[tuple[str, str], ...] = (),
        is_fused: bool = False,
        skip: Instruction | None = None,
    ) -> Iterator[Step]:
        for i in self.computations[name].instructions.values():
            if i is skip:
                continue
            yield Step(i, times, branch, is_fused)
            if i.opcode == "while":
                trips = self.trips(i)
                trips = self.unknown_trips if trips is None else trips
                yield from self._walk(i.called["condition"], times * (trips + 1), branch)
                yield from self._walk(i.called["body"], times * trips, branch)
            elif i.opcode == "conditional":
                for taken in i.branches:
                    yield from self._walk(taken, times, (*branch, (i.name, taken)))
            elif i.kind in ("fusion", "async") and "calls" in i.called:
                yield from self._walk(i.called["calls"], times, branch, i.kind == "fusion")
            elif i.opcode == "call":
                yield from self._walk(i.called["to_apply"], times, branch)


def read(text: str, unknown_trips: int = 1) -> Program:
    """Parses what ``compiled.as_text()`` returns.

    Args:
      text: of the compiled program.
      unknown_trips: how often to count a loop inside of a round whose trip count is not said.

    Raises:
      ConfigError: it is not the text of a compiled program.
    """
    found: dict[str, list[Instruction]] = {}
    entry = None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head.group(2)
            found[name] = []
            entry = name if head.group(1) else entry
        elif found and (begin := _LINE.match(line := _COMMENT.sub("", line))):
            found[name].append(_instruction(begin, line[begin.end() :]))
    if entry is None:
        raise ConfigError(f"no entry in the text of a compiled program: {text[:80]!r}")
    computations = {}
    for name, instructions in found.items():
        parameters = [i for i in instructions if i.opcode == "parameter"]
        parameters.sort(key=lambda i: _numbers(i.attributes)[0])
        root = next(i for i in instructions if i.is_root)
        named = {i.name: i for i in instructions}
        computations[name] = Computation(name, named, [i.name for i in parameters], root)
    head = text[: text.find("\n")]
    aliased = _aliases(re.search(r"input_output_alias=\{(.*?)\}, [a-z_]+=", head))
    return Program(computations, computations[entry], aliased, unknown_trips)


def _aliases(match: re.Match | None) -> dict[int, int]:
    pairs = re.findall(r"\{(\d*)\}: \((\d+)", match.group(1)) if match else []
    return {int(result or 0): int(other) for result, other in pairs}


def _instruction(begin: re.Match, rest: str) -> Instruction:
    is_root, name, shape, opcode = begin.groups()
    depth = itertools.accumulate({"(": 1, ")": -1}.get(char, 0) for char in rest)
    close = next((i for i, x in enumerate(depth) if x < 0), None)
    if close is None:
        raise ConfigError(f"a bracket is not closed: {rest[:80]!r}")
    if re.sub("-(start|update|done)$", "", opcode) not in _KNOWN:
        raise ConfigError(f"{name} has the opcode {opcode}, of which it is not known what it moves")
    operands = tuple(re.findall(r"%([^\s,(){}]+)", rest[:close]))  # older texts have shapes too
    attributes = rest[close + 1 :].lstrip(", ")
    if opcode in ("constant", "parameter"):  # what is in the brackets names no operand
        operands, attributes = (), f"{rest[:close]}, {attributes}"
    return Instruction(name, opcode, Array.all_of(shape), operands, attributes, is_root is not None)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that runs.

    Attributes:
      kind: such as "all-reduce".
      num_bytes: of a device's operands or results, whichever are larger: of a gather the results.
      times: how often it runs.
      op_name: where it stands in the traced program.
      in_branch: it stands in a branch of a conditional.
    """

    kind: str
    num_bytes: int
    times: int
    op_name: str
    in_branch: bool


class Move(NamedTuple):
    """What one instruction reads from HBM and writes to it, each time that it runs."""

    step: Step
    read: int
    written: int

    @property
    def num_bytes(self) -> int:
        """All times together."""
        return (self.read + self.written) * self.step.times


@dataclasses.dataclass(frozen=True)
class Copy:
    """An instruction that makes another array of a cache, or of a layer of it.

    Attributes:
      name: of the instruction.
      kind: its opcode, or of a fusion that of its root.
      array: what it makes.
      times: how often it runs.
      is_prefetch: it moves the array between HBM and on-chip memory as it is.
    """

    name: str
    kind: str
    array: Array
    times: int
    is_prefetch: bool


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a round, or a call without its rounds, moves on each device.

    Attributes:
      collectives: all that run, in every branch of every conditional.
      moves: what is read and written, by instruction.
    """

    collectives: tuple[Collective, ...]
    moves: tuple[Move, ...]

    @property
    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Of each kind of collective, how many run and the bytes of all."""
        found: dict[str, tuple[int, int]] = {}
        for c in sorted(self.collectives, key=lambda c: c.kind):
            count, size = found.get(c.kind, (0, 0))
            found[c.kind] = (count + c.times, size + c.times * c.num_bytes)
        return found

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
        ranked = sorted(self.moves, key=lambda m: m.num_bytes, reverse=True)[:n]
        return [(m.num_bytes, m.step.instruction.name, m.step.instruction.op_name) for m in ranked]


def _total(moves: Iterable[Move], depth: int) -> int:
    """Bytes of moves that are in the same branches up to ``depth``."""
    total = 0
    inside: dict[str, dict[str, list[Move]]] = {}
    for move in moves:
        if branch := move.step.branch[depth:]:
            conditional, taken = branch[0]
            inside.setdefault(conditional, {}).setdefault(taken, []).append(move)
        else:
            total += move.num_bytes
    return total + sum(
        max(_total(taken, depth + 1) for taken in branches.values()) for branches in inside.values()
    )


def is_run(step: Step) -> bool:
    """Whether a step computes or moves something by itself, as a GPU's kernel does."""
    i = step.instruction
    is_counted = i.opcode not in _NOTHING and i.kind not in _NOTHING
    return is_counted and not step.is_fused and not i.opcode.endswith(("-done", "-update"))


def traffic(program: Program, steps: Sequence[Step]) -> Traffic:
    """Returns what instructions move.

    Args:
      program: that they are of.
      steps: the instructions that run.
    """
    collectives = []
    moves = []
    seen = set()
    for step in steps:
        i = step.instruction
        if i.kind in COLLECTIVES:
            # One that is spread over several fusions has the same channel in each of them.
            channel = i.number("channel_id") if step.is_fused else None
            if channel is None or channel not in seen:
                seen.add(channel)
                operands = _arrays(program, i)
                size = max(_size(operands), _size(_results(i, operands)))
                is_branched = bool(step.branch)
                collectives.append(Collective(i.kind, size, step.times, i.op_name, is_branched))
        if is_run(step):
            read, written = _moved(program, i)
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
    least: dict[tuple[str, int], int] = {}
    for result, elements in caches.items():
        values = [(program.entry.root.name, result)]
        if result in program.aliased:
            values.append((program.entry.parameters[program.aliased[result]], 0))
        for home in map(memory, values):
            least[home] = min(elements, least.get(home, elements))
    copies = []
    for step in steps:
        i = step.instruction
        if step.is_fused or i.opcode.endswith("-done"):
            continue
        made = _made(program, i)
        if made.kind not in _COPIES:
            continue
        source = program.operands(made)[0]
        while i is not made and source.opcode in _MOVED:  # fused: the same array
            source = program.operands(source)[0]
        ends = [memory((end.name, 0)) for end in (source, i)]
        elements = min((least[home] for home in ends if home in least), default=math.inf)
        operands = _arrays(program, i)
        for array in _results(i, operands):
            if math.prod(array.dims) < elements or ("slice" in made.kind and array.space):
                continue
            given = operands[0]
            is_same = (given.dims, given.layout) == (array.dims, array.layout)
            is_prefetch = made.kind == "copy" and given.space != array.space and is_same
            copies.append(Copy(i.name, made.kind, array, step.times, is_prefetch))
    return copies


def rewrites(program: Program, steps: Sequence[Step], weights: Mapping[str, int]) -> list[Copy]:
    """Returns the instructions that write a weight again, as it is or multiplied.

    Such an instruction writes as many elements as it reads of the weight, or more: a slice of a
    stack, weights side by side, or products that another instruction sums. Experts that are chosen
    by their number have the kind "gather". A product of matrices writes none, however many rows it
    has.

    Args:
      program: that the steps are of.
      steps: the instructions that run.
      weights: by the names of parameters of the entry, the elements of the least part that counts,
        such as one matrix.
    """
    memory = program.same_memory()
    least = {memory((name, 0)): elements for name, elements in weights.items()}
    found = []
    for step in steps:
        i = step.instruction
        if not is_run(step) or _has_product(program, i):
            continue
        results = [array for array in _results(i, _arrays(program, i)) if array.is_in_hbm]
        most = max((math.prod(array.dims) for array in results), default=0)
        for index, operand in enumerate(program.operands(i)):
            elements = least.get(memory((operand.name, 0)), math.inf)
            if len(operand.arrays) != 1 or most < elements:
                continue
            part = _elements_read(program, i, index)
            read = math.prod(operand.arrays[0].dims) if part is None else part
            if most >= read >= elements:
                kind = _made(program, i).kind
                written = max(results, key=lambda array: math.prod(array.dims))
                found.append(Copy(i.name, kind, written, step.times, False))
    return found


def _has_product(program: Program, i: Instruction) -> bool:
    """Whether an instruction multiplies matrices, or calls a library or a kernel that may."""
    if i.kind != "fusion":
        return i.opcode in _PRODUCTS
    fused = program.computations[i.called["calls"]].instructions.values()
    return any(_has_product(program, inner) for inner in fused)


def _made(program: Program, i: Instruction) -> Instruction:
    """The instruction that makes a result: of a fusion the last one of it."""
    if i.kind != "fusion":
        return i
    made = program.computations[i.called["calls"]].root
    while made.opcode == "bitcast" and made.operands:
        made = program.operands(made)[0]
    return made


def _arrays(program: Program, i: Instruction) -> tuple[Array, ...]:
    """The arrays of its operands."""
    return tuple(array for operand in program.operands(i) for array in operand.arrays)


def _results(i: Instruction, operands: tuple[Array, ...]) -> tuple[Array, ...]:
    """The arrays that it makes, without the scratch memory of a library, bytes beside the results;
    an asynchronous start also repeats its operands.
    """
    if i.opcode == "copy-start":
        return i.arrays[:1]
    if i.opcode in ("custom-call", "fusion") and len(i.arrays) > 1:
        return tuple(a for a in i.arrays if a.dtype != "s8" or len(a.dims) > 1)
    if not i.opcode.endswith("-start") or i.opcode == "all-reduce-start":
        return i.arrays
    rest = i.arrays[len(operands) :]
    return tuple(a for a in rest if a.dims) or rest[:1]


def _size(arrays: Iterable[Array]) -> int:
    return sum(a.num_bytes for a in arrays)


def _moved(program: Program, i: Instruction) -> tuple[int, int]:
    """Bytes that an instruction reads from HBM and writes to it."""
    if "AllocateBuffer" in i.attributes:
        return 0, 0
    fused = program.computations[i.called["calls"]] if i.kind == "fusion" else None
    read = 0
    operands = program.operands(i)
    for index, operand in enumerate(operands):
        if len(operand.arrays) != 1 or not operand.arrays[0].is_in_hbm:
            continue
        array = operand.arrays[0]
        part = _elements_read(program, i, index)
        if fused is None:
            if i.opcode == "custom-call" and i.name.startswith("ragged-dot"):
                if len(array.dims) == 3:  # of the matrices of a grouped product one for each row
                    part = i.arrays[0].dims[0] * math.prod(array.dims[1:])
        read += _scaled(array, part)
    if i.aliased:
        new = [o for n, o in enumerate(operands) if n not in i.aliased.values()]
        given = _size(a for o in new for a in o.arrays)
        return read, given + _size(a for n, a in enumerate(i.arrays) if n not in i.aliased)
    parts = [_part_written(program, i)] if fused is None else _parts_written(program, fused)
    results = _results(i, _arrays(program, i))
    parts = parts if len(parts) == len(results) else [None] * len(results)
    return read, sum(_scaled(a, part) for a, part in zip(results, parts) if a.is_in_hbm)


def _elements_read(program: Program, i: Instruction, index: int) -> int | None:
    """Elements of an operand that an instruction or a fusion reads; None: all."""
    if i.kind != "fusion":
        return _part_read(i, index)
    return _part_used(program, program.computations[i.called["calls"]].parameters[index], (i.name,))


def _scaled(array: Array, elements: int | None) -> int:
    """Bytes of so many elements of an array, at most all of it; None: all."""
    whole = math.prod(array.dims)
    if elements is None or elements >= whole:
        return array.padded_bytes
    return array.padded_bytes * elements // whole


def _part_read(i: Instruction, index: int) -> int | None:
    """Elements that an instruction reads of an operand; None: all."""
    if index == 0 and i.kind in _SLICES:
        return math.prod(i.arrays[i.opcode.endswith("-start")].dims)
    is_written = (index == 0 and i.kind in _UPDATES) or index in i.aliased.values()
    return 0 if is_written else None


def _part_written(program: Program, i: Instruction) -> int | None:
    """Elements that an instruction writes of its result; None: all."""
    if i.kind not in _UPDATES:
        return None
    return math.prod(program.operands(i)[_UPDATES[i.kind]].arrays[0].dims)


def _part_used(program: Program, name: str, fusions: tuple[str, ...]) -> int | None:
    """Elements of a value in a fusion that are read; None: all.

    ``fusions`` has the fusions that the value stands in, from the outermost inwards.
    """
    parts = []
    if program.instructions[name].is_root:
        if len(fusions) == 1:
            return None
        parts.append(_part_used(program, fusions[-1], fusions[:-1]))
    for user, index in program.users.get(name, []):
        if user.opcode in _MOVED:
            parts.append(_part_used(program, user.name, fusions))
        elif user.opcode == "reduce" and index == 0 and len(user.arrays) == 1:
            part = _part_used(program, user.name, fusions)
            summed = program.instructions[name].arrays[0].dims
            parts.append(part and part * math.prod(summed) // math.prod(user.arrays[0].dims))
        elif user.kind == "fusion":
            inner = program.computations[user.called["calls"]]
            parts.append(_part_used(program, inner.parameters[index], (*fusions, user.name)))
        else:
            parts.append(_part_read(user, index))
    return None if None in parts else sum(parts)


def _parts_written(program: Program, fused: Computation) -> list[int | None]:
    """For each result of a fusion, the elements that are written; None: all."""

    def origin(i: Instruction) -> Instruction:
        while i.opcode in _MOVED:
            i = program.operands(i)[0]
        return i

    def part(i: Instruction) -> int | None:
        own = _part_written(program, origin(i))
        if own is None:
            return None
        into = origin(program.operands(origin(i))[0])
        before = 0 if into.opcode == "parameter" else part(into)
        return None if before is None else own + before

    root = fused.root
    return [*map(part, program.operands(root) if root.opcode == "tuple" else [root])]
