"""Ranges of the integers of a kernel's Triton IR, to find indices that do not fit their type; loaded by path.

Each integer is an interval. A result beyond its type has wrapped on a GPU. That is a fault where it reaches an address,
a mask or the bound of a loop; some arithmetic wraps by intention (angles modulo a turn).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_OPERATION = re.compile(r'^(?:(%\w+)(?::\d+)? = )?"?([a-z]+\.[a-z_]+)"?(.*)$')
_VALUE = re.compile(r"%\w+(?:#\d+)?")
_INTEGER_TYPE = re.compile(r"^(?:tensor<(?:\d+x)*)?i(\d+)>?$")
_ARGUMENT = re.compile(r"(%arg\d+): ([^,{)]+)")
_SAME = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "arith.extsi", "arith.index_cast")


@dataclass(frozen=True)
class Range:
    """What an integer may be."""

    low: int
    high: int
    wrapped: frozenset[str] = frozenset()
    """The operations on the way to it whose result may not fit its type."""


@dataclass
class _Region:
    kind: str
    name: str | None = None
    types: Sequence[str] = ()
    yields: list[list[Range | None]] = field(default_factory=list)
    sums: bool = False


def wrapped_indices(text: str, grid: Sequence[int], arguments: Sequence[object], loaded: tuple[int, int]) -> list[str]:
    """The operations of a kernel whose result may wrap and reaches an address, a mask or the bound of a loop.

    Args:
        text: the kernel's Triton IR, with its device functions inlined.
        grid: of the launch.
        arguments: of the launch, without constants.
        loaded: range of the integers in memory: document starts, positions.
    """
    return _Kernel(grid, arguments, loaded).read(text)


class _Kernel:
    def __init__(self, grid: Sequence[int], arguments: Sequence[object], loaded: tuple[int, int]) -> None:
        self._grid = dict(zip("xyz", (*grid, 1, 1), strict=False))
        self._arguments, self._loaded = arguments, loaded
        self._values: dict[str, Range | None] = {}
        self._regions: list[_Region] = []
        self._found: dict[str, None] = {}

    def read(self, text: str) -> list[str]:
        for raw in text.splitlines():
            line = re.sub(r"\s*loc\(.*$", "", raw).strip()
            if line.startswith("tt.func"):
                self._bind(line)
            elif line.startswith("}"):
                self._close(line)
            elif match := _OPERATION.match(line):
                self._step(match[1], match[2], match[3], line)
        return list(self._found)

    def _bind(self, line: str) -> None:
        names = _ARGUMENT.findall(line)
        assert len(names) == len(self._arguments), (names, self._arguments)
        for (name, kind), value in zip(names, self._arguments, strict=True):
            if _bits(kind.strip()) is not None:
                assert isinstance(value, int)
                self._values[name] = Range(value, value)

    def _close(self, line: str) -> None:
        if line.endswith("{"):  # "} else {", "} do {"
            return
        region = self._regions.pop() if self._regions else None
        if region is None or region.name is None:
            return
        if region.kind == "reduction":
            value = self._values[region.name]
            if value is not None and region.sums:
                count = math.prod(map(int, re.findall(r"(\d+)x", line.partition("->")[0])))
                self._values[region.name] = self._fitted(
                    (min(value.low, value.low * count), max(value.high, value.high * count)),
                    line.rpartition("->")[2].strip(),
                    line,
                    value.wrapped,
                )
            return
        for number, kind in enumerate(region.types):
            parts = [some[number] for some in region.yields if number < len(some)]
            # A loop's own result may be anything: it is carried from step to step.
            known = region.kind == "scf.if" and parts and all(part is not None for part in parts)
            value = _join([part for part in parts if part is not None]) if known else _any(kind)
            self._values[f"{region.name}#{number}"] = value
            if len(region.types) == 1:
                self._values[region.name] = value

    def _step(self, name: str | None, operation: str, rest: str, line: str) -> None:
        if self._regions and self._regions[-1].kind == "reduction":
            self._regions[-1].sums |= operation == "arith.addi"
            return
        values = [self._values.get(value) for value in _VALUE.findall(rest)]
        if operation == "scf.yield":
            if self._regions:
                self._regions[-1].yields.append(values)
            return
        if line.endswith("{"):
            self._open(name, operation, rest, values, line)
            return
        if operation == "tt.addptr":
            self._reaches(values[1])
        elif operation in ("tt.load", "tt.store"):
            for value in values[1:]:
                self._reaches(value)
        kind = re.split(r" -> | to | : ", rest)[-1].strip()
        # Of a pair of types, as of a choice by a mask, the last.
        kind = kind.rpartition(", ")[2]
        if operation == "tt.load":
            kind = re.sub(r"!tt\.ptr<(\w+)[^>]*>", r"\1", kind)
        if name is not None:
            self._values[name] = None if _bits(kind) is None else self._value(operation, rest, values, kind, line)

    def _open(self, name: str | None, operation: str, rest: str, values: list[Range | None], line: str) -> None:
        if operation in ("tt.reduce", "tt.scan"):
            (operand, *_) = values
            # A sum leaves the range of its elements; maxima and the like do not.
            self._regions.append(_Region("reduction", name))
            if name is not None:
                self._values[name] = operand
            return
        results = re.search(r"-> \(([^)]*)\)", rest)
        self._regions.append(_Region(operation, name, results[1].split(", ") if results else ()))
        if operation == "scf.for":
            variable, low, high = _VALUE.findall(rest)[:3]
            bounds = self._values.get(low), self._values.get(high)
            for bound in bounds:
                self._reaches(bound)
            first, last = bounds
            assert first is not None and last is not None, line
            self._values[variable] = Range(first.low, max(first.low, last.high - 1))
        if results and operation in ("scf.for", "scf.while"):
            carried = re.search(r"(?:iter_args)?\(((?:%\w+ = [^,)]+(?:, )?)+)\)", rest)
            names = re.findall(r"(%\w+) = ", carried[1]) if carried else []
            for each, kind in zip(names, results[1].split(", "), strict=False):
                self._values[each] = _any(kind)

    def _reaches(self, value: Range | None) -> None:
        if value is not None:
            self._found.update(dict.fromkeys(sorted(value.wrapped)))

    def _value(self, operation: str, rest: str, values: list[Range | None], kind: str, line: str) -> Range:
        known = [value for value in values if value is not None]
        wrapped = frozenset[str]().union(*(value.wrapped for value in known))
        bounds = self._bounds(operation, rest, known, kind) if len(known) == len(values) or not values else None
        if operation == "tt.load":
            bounds = self._loaded
        return self._fitted(bounds, kind, line, wrapped)

    def _fitted(self, bounds: tuple[int, int] | None, kind: str, line: str, wrapped: frozenset[str]) -> Range:
        bits = _bits(kind)
        assert bits is not None
        if bits == 1:
            return Range(0, 1, wrapped)
        everything = -(1 << bits - 1), (1 << bits - 1) - 1
        if bounds is None:
            return Range(*everything, wrapped)
        if bounds[0] < everything[0] or bounds[1] > everything[1]:
            return Range(*everything, wrapped | {f"{line}: {bounds[0]:,} to {bounds[1]:,}"})
        return Range(*bounds, wrapped)

    def _bounds(self, operation: str, rest: str, x: list[Range], kind: str) -> tuple[int, int] | None:
        """Without regard to the type; None where anything is possible."""
        match operation:
            case "arith.constant":
                found = re.match(r" (?:dense<)?(-?\d+)>? :", rest)
                return (int(found[1]), int(found[1])) if found else None
            case "tt.get_program_id":
                return 0, self._grid[rest.split()[0]] - 1
            case "tt.get_num_programs":
                return 1, self._grid[rest.split()[0]]
            case "tt.make_range":
                ends = re.search(r"end = (\d+).*start = (\d+)", rest)
                return (int(ends[2]), int(ends[1]) - 1) if ends else None
            case "arith.addi":
                return x[0].low + x[1].low, x[0].high + x[1].high
            case "arith.subi":
                return x[0].low - x[1].high, x[0].high - x[1].low
            case "arith.muli" | "arith.shli":
                of = [1 << min(v, 64) if operation == "arith.shli" else v for v in (x[1].low, x[1].high)]
                products = [a * b for a in (x[0].low, x[0].high) for b in of]
                return min(products), max(products)
            case "arith.divsi":
                divisors = [v for v in (x[1].low, x[1].high) if v] + [d for d in (-1, 1) if x[1].low < d < x[1].high]
                quotients = [_cut(a, b) for a in (x[0].low, x[0].high) for b in divisors]
                return min(quotients), max(quotients)
            case "arith.remsi":
                most = max(abs(x[1].low), abs(x[1].high)) - 1
                return max(-most, min(x[0].low, 0)), min(most, max(x[0].high, 0))
            case "arith.minsi":
                return min(x[0].low, x[1].low), min(x[0].high, x[1].high)
            case "arith.maxsi":
                return max(x[0].low, x[1].low), max(x[0].high, x[1].high)
            case "arith.select":
                return min(v.low for v in x[-2:]), max(v.high for v in x[-2:])
            case "arith.trunci" | "arith.extui" if operation == "arith.trunci" or x[0].low >= 0:
                return x[0].low, x[0].high
            case "arith.shrsi":
                return x[0].low >> x[1].high, x[0].high >> x[1].low if x[0].high >= 0 else x[0].high >> x[1].high
            case "arith.andi" if min(v.low for v in x) >= 0:
                return 0, min(v.high for v in x)
            case "math.absi":
                return 0, max(abs(x[0].low), abs(x[0].high))
            case _ if operation in _SAME:
                return x[0].low, x[0].high
        return None


def _bits(kind: str) -> int | None:
    """Of the integers of a type; None for others."""
    match = _INTEGER_TYPE.match(kind)
    return int(match[1]) if match else None


def _any(kind: str) -> Range | None:
    bits = _bits(kind)
    return None if bits is None else Range(-(1 << bits - 1), (1 << bits - 1) - 1)


def _join(parts: list[Range]) -> Range:
    wrapped = frozenset[str]().union(*(part.wrapped for part in parts))
    return Range(min(part.low for part in parts), max(part.high for part in parts), wrapped)


def _cut(a: int, b: int) -> int:
    """a / b, rounded towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
