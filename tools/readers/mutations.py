"""Inputs that differ from others in one to four places: bytes, numbers, strings, and values of JSON.

What is drawn follows from the generator alone, so that a seed repeats it. Long runs add libFuzzer's own mutations.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

# The edges of integers, lengths of terabytes, what floats cannot hold, and what are no numbers of JSON.
_NUMBERS = (
    *(b"0", b"-1", b"1", b"255", b"65536", b"2147483648", b"4294967295", b"9223372036854775807"),
    *(b"18446744073709551616", b"1" * 400, b"9" * 5000, b"1e999", b"-1e-999", b"0.5", b"NaN", b"-Infinity", b"true"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**200, 0.5, 1e300, float("nan"), float("inf")),
    *("", "a", "\x00", "\x1b[2J\x07", "\u202e\u2066", "\ud800", "<script>&\"'", "../../etc/passwd", "/dev/zero", "-"),
    *("a" * 10_000, [], {}, [[]], {"": None}, [None], [0] * 1000),
)
_TEXTS = (
    *(b"\x00", b"\n", b"\r", b"\t", b'"', b"'", b"\\", b"{", b"}", b"[", b"]", b",", b":", b"=", b"#", b"{{", b"}}"),
    *(
        b"\xef\xbb\xbf",
        b"\xff",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\x1b[2J",
        b"\xe2\x80\xae",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
    ),
    *(b"\\ud800", b"\\u0000", b"../", b"/", b"<script>", b"&amp;", b"%s", b"%n", b"\r\n\r\n", b"null", b"{%", b"%}"),
)
_DEEP = ((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"{{", b"}}"), (b"-", b""), (b"a.", b""))
_WORDS = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_DIGITS = re.compile(rb"\d+")
_STRING = re.compile(rb'"[^"\n]{0,200}"')
MOST_BYTES = 2**16

Mutation = Callable[[bytes, random.Random, Sequence[bytes]], bytes]


def mutated(data: bytes, generator: random.Random, others: Sequence[bytes], most_bytes: int = MOST_BYTES) -> bytes:
    """``data`` changed, of at most ``most_bytes``; ``others``: inputs that it may take parts of."""
    for _ in range(generator.choice((1, 1, 1, 2, 4))):
        data = generator.choice(MUTATIONS)(data, generator, others)
    return data[:most_bytes]


def _span(data: bytes, generator: random.Random, most: int = 64) -> tuple[int, int]:
    first = generator.randrange(len(data) + 1)
    return first, min(len(data), first + generator.randrange(1, most + 1))


def flip(data: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """One bit is another."""
    if not data:
        return b"\x00"
    changed = bytearray(data)
    changed[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def cut(data: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """Some bytes are missing."""
    first, end = _span(data, generator, most=max(1, len(data) // generator.choice((1, 4, 64))))
    return data[:first] + data[end:]


def end(data: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """All behind a place is missing."""
    return data[: generator.randrange(len(data) + 1)]


def insert(data: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """A text that means something in a format."""
    at = generator.randrange(len(data) + 1)
    return data[:at] + generator.choice(_TEXTS) * generator.choice((1, 1, 1, 2, 1000)) + data[at:]


def duplicate(data: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """A part occurs again, up to a thousand times."""
    first, end = _span(data, generator)
    return data[:end] + data[first:end] * generator.choice((1, 1, 3, 1000)) + data[end:]


def splice(data: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """The end is that of another input."""
    other = generator.choice(others) if others else data
    return data[: generator.randrange(len(data) + 1)] + other[generator.randrange(len(other) + 1) :]


def number(data: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """A number in digits is an extreme one."""
    return _replaced(data, generator, _DIGITS, generator.choice(_NUMBERS))


def string(data: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """A string in quotes is that of another place, or a number."""
    found = _STRING.findall(data)
    return _replaced(data, generator, _STRING, generator.choice((*found, *_NUMBERS)))


def _replaced(data: bytes, generator: random.Random, pattern: re.Pattern[bytes], new: bytes) -> bytes:
    places = [match.span() for match in pattern.finditer(data)]
    if not places:
        return data + new
    first, end = generator.choice(places)
    return data[:first] + new + data[end:]


def word(data: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """Binary lengths and offsets are extreme ones."""
    size = generator.choice((1, 2, 4, 8))
    at = generator.randrange(max(1, len(data) - size + 1))
    value = generator.choice(_WORDS) & (256**size - 1)
    return data[:at] + value.to_bytes(size, generator.choice(("little", "big"))) + data[at + size :]


def deep(data: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """Something is nested, a little or as deep as no parser goes."""
    opening, closing = generator.choice(_DEEP)
    depth, at = generator.choice((3, 30, 300, 10_000)), generator.randrange(len(data) + 1)
    # One in three is never closed.
    return data[:at] + opening * depth + (data[at : at + 1] + closing * depth) * (generator.random() < 0.67) + data[at:]


def json_value(data: bytes, generator: random.Random, others: Sequence[bytes]) -> bytes:
    """A value of JSON, of one line or of all, is of another type, missing, there twice, or under another key."""
    lines = data.split(b"\n")
    whole = generator.random() < 0.5
    chosen = generator.randrange(len(lines))
    try:
        value = json.loads(data if whole else lines[chosen])
    except (ValueError, RecursionError):
        return data
    places: list[tuple[Any, Any]] = []
    _collect(value, places)
    if not places:
        return data
    holder, key = generator.choice(places)
    match generator.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[generator.choice([str(other) for _, other in places])] = holder.pop(key)
        case 1:
            holder.insert(key, holder[key])
        case 2:
            other, name = generator.choice(places)
            holder[key] = json.loads(json.dumps(other[name]))
        case 3:
            holder[key] = [holder[key]] if generator.random() < 0.5 else {"a": holder[key]}
        case _:
            holder[key] = generator.choice(_VALUES)
    text = json.dumps(value).encode()
    return text if whole else b"\n".join([*lines[:chosen], text, *lines[chosen + 1 :]])


def _collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        places.append((value, key))
        if len(places) < 10_000:
            _collect(inner, places)


MUTATIONS: tuple[Mutation, ...] = (
    *(flip, cut, end, insert, duplicate, splice, number, number, string, word, deep),
    *(json_value, json_value, json_value),
)
