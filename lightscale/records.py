"""The records of a run, JSON lines, read strictly: whatever reads one, reads it here.

A line counts if it ends with a newline and holds one JSON object in UTF-8, not longer than `MOST_LINE_BYTES`, whose
known fields have their types. Every other line is skipped and counted: a file system that failed, an editor or another
program may have damaged a record, and a run must go on all the same. What is counted is said: see ``RunDirectory``.

A last line without a newline is not damaged: it is being written, or a kill cut it short.
"""

import datetime
import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from lightscale.errors import UserError
from lightscale.files import NotRegular, open_regular, read_regular

MOST_LINE_BYTES = 16 << 20
"""A longer line is no record: the longest ones, tables of norms and losses, have some hundred kilobytes."""

SEAL = "xxh3_64"
"""Key of a record's hash, the last key of a line; readers compare and remove it. Lines without it are read too."""
_SEALED = re.compile(rf'(.*), "{SEAL}": "(.{{16}})"\}}', re.DOTALL)
_HASH = re.compile(r"[0-9a-f]{16}")
# A whole record and something in place of its newline: no line that is being written.
_CHANGED_END = re.compile(rb'"xxh3_64": "[0-9a-f]{16}"\}.\Z', re.DOTALL)

# One line for each file of each rank; more is no manifest.
_MOST_MANIFEST_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 16
_LARGEST = 1 << 63

Record = dict[str, Any]
Check = Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    # Not isinstance: True and False are ints.
    return type(value) is int and 0 <= value < _LARGEST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    """Null stands for what JSON has not: NaN and infinities."""
    return value is None or type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def _is_time(value: Any) -> bool:
    try:
        datetime.datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return False
    return True


def _is_list(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_validation(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(one, dict) and "loss" in one and _is_number(one["loss"]) for one in value.values()
    )


@dataclass(frozen=True, kw_only=True)
class _Form:
    """What is known of the lines of one file: the fields that each has, and the types of others."""

    required: Mapping[str, Check]
    optional: Mapping[str, Check] = field(default_factory=dict)

    def fault(self, record: Record) -> str | None:
        """What is wrong with `record`; None: nothing."""
        for name, check in self.required.items():
            if name not in record:
                return f"has no {name}"
            if not check(record[name]):
                return _wrong(name, record[name])
        for name, check in self.optional.items():
            if name in record and not check(record[name]):
                return _wrong(name, record[name])
        return None


def _wrong(name: str, value: Any) -> str:
    return f"{name} = {json.dumps(value)[:60]} cannot be"


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value))


_EVENTS = _Form(
    required={"event": _is_text, "attempt": _is_whole},
    optional={"time": _is_time, "stall_s": _is_number, "put_aside": _is_list(_is_text)},
)
# What is read of single kinds of events; the others are only shown.
_OF_EVENTS = {
    "branch": _Form(
        required={"parent": _is_text, "step": _is_whole, "manifest": _is_text, "skips": _is_list(_is_pair)}
    ),
    "checkpoint": _Form(
        required={"step": _is_whole}, optional={"checkpoint": _is_text, "removed": _is_list(_is_whole)}
    ),
    "checkpoints_given_up": _Form(required={"step": _is_whole}),
    "records_damaged": _Form(required={"damage": lambda value: isinstance(value, dict)}),
    "data_skipped": _Form(required={"at_tokens": _is_whole, "skip_tokens": _is_whole}),
    "init_from": _Form(required={"manifest": _is_text}),
    "resume": _Form(required={"step": _is_whole}, optional={"checkpoint": _is_text, "refused": _is_list(_is_text)}),
    "rollback": _Form(
        required={"step": _is_whole},
        optional={"at_tokens": _is_whole, "skip_tokens": _is_whole},
    ),
    "start": _Form(required={}, optional={"world_size": _is_whole}),
    "step_skipped": _Form(required={"step": _is_whole}),
    "teacher": _Form(required={"checkpoint": _is_text, "manifest": _is_text}),
    "weights": _Form(required={"step": _is_whole}),
}
_NUMBERS = ("step_s", "loss", "grad_norm", "lr", "tokens_per_s", "checkpoint_stall_s", "memory_peak_bytes")
_FORMS = {
    "events.jsonl": _EVENTS,
    "metrics.jsonl": _Form(
        required={"step": _is_whole, "attempt": _is_whole},
        optional={"tokens": _is_whole, "time": _is_time, "validation": _is_validation, "checkpoint_step": _is_whole}
        | dict.fromkeys((*_NUMBERS, "memory_rss_bytes"), _is_number),
    ),
    "jobs.jsonl": _Form(required={"job": _is_whole}, optional={"scheduler": _is_text, "time": _is_time}),
}


@dataclass(kw_only=True)
class Records:
    """What a file of records holds."""

    lines: list[Record] = field(default_factory=list)
    """In the order written."""
    num_damaged: int = 0
    """Lines that were skipped; a file that is none counts as one."""
    first_damage: str | None = None
    """The first of them, and what is wrong with it."""

    def skip(self, damage: str) -> None:
        """Count one more line that cannot be read."""
        self.num_damaged += 1
        self.first_damage = self.first_damage or damage


def seal_of(text: str) -> str:
    """The hash that stands for `text` in a sealed record."""
    return xxhash.xxh3_64_hexdigest(text.encode())


def sealed(text: str) -> str:
    """`text`, a JSON object, with its hash as the last key; one without keys is left as it is."""
    return text if text == "{}" else f'{text[:-1]}, "{SEAL}": "{seal_of(text)}"}}'


def _unsealed(text: str) -> str:
    if (match := _SEALED.fullmatch(text)) is None:
        return text
    if seal_of(whole := match[1] + "}") != match[2]:
        raise ValueError(f"differs from its hash, {SEAL}")
    return whole


def parse_line(line: bytes, name: str) -> Record:
    """The record in a line of the file called `name`, without its hash; ValueError says why it is none."""
    try:
        # Not from bytes: json would guess UTF-16 where there are NULs.
        text = line.decode("utf-8").rstrip("\n")
    except ValueError:
        raise ValueError("not a JSON object") from None
    text = _unsealed(text)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text.lower():
            # Half of a surrogate pair can be written so, but neither printed nor stored.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise ValueError("not a JSON object") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    last = next(reversed(value), "")
    if len(last) == len(SEAL) and isinstance(value[last], str) and _HASH.fullmatch(value[last]):
        raise ValueError(f"its last key is {last!r} in place of {SEAL!r}")
    form = _FORMS.get(name)
    fault = form.fault(value) if form is not None else None
    if fault is None and form is _EVENTS and (more := _OF_EVENTS.get(value["event"])) is not None:
        fault = more.fault(value)
    if fault is not None:
        raise ValueError(fault)
    return value


def read_records(path: Path) -> Records:
    """All records in `path`; none where there is no file. UserError where it cannot be read at all."""
    records = Records()
    try:
        with open_regular(path, what="a record of a run") as file:
            for number, line in enumerate(_complete_lines(file), start=1):
                try:
                    if line is None:
                        raise ValueError(f"longer than {MOST_LINE_BYTES:,} bytes")
                    records.lines.append(parse_line(line, path.name))
                except ValueError as error:
                    records.skip(f"{path}:{number}: {error}")
    except FileNotFoundError:
        pass
    except NotRegular as error:
        records.skip(str(error))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return records


def trained_stores(run: Path) -> Iterator[str]:
    """Fingerprints of the stores that a run was trained on, by the checkpoints in its directory, oldest first."""
    for manifest in sorted((run / "checkpoints").glob("step-*/MANIFEST.json")):
        try:
            facts = json.loads(read_regular(manifest, what="a manifest", most_bytes=_MOST_MANIFEST_BYTES))
        except (OSError, ValueError, RecursionError, NotRegular):
            continue  # damaged: verifying checkpoints reports it
        if isinstance(facts, dict) and "store" in facts:
            yield str(facts["store"])


def newest_lines(file: BufferedReader, size: int) -> Iterator[tuple[int, bytes]]:
    """The complete lines among the first `size` bytes, last to first, and where each ends.

    Ends at a line that is too long for a record: whatever is read backwards is wanted for the newest lines only.
    """
    end, rest, is_complete = size, b"", False
    while end > 0 and len(rest) <= MOST_LINE_BYTES:
        # As much again as the line has so far: a long line must not be copied once for each chunk.
        start = max(0, end - max(_CHUNK_BYTES, len(rest)))
        file.seek(start)
        first, *lines = (file.read(end - start) + rest).split(b"\n")
        position = end + len(rest)
        for text in reversed(lines):
            # What is behind the last newline is a line that is being written.
            if is_complete:
                yield position + 1, text
            is_complete = True
            position -= len(text) + 1
        end, rest = start, first
    if is_complete and end == 0:
        yield len(rest) + 1, rest


def _complete_lines(file: BufferedReader) -> Iterator[bytes | None]:
    """Each line that has its newline, or another byte in its place; None for one that is too long."""
    while line := file.readline(MOST_LINE_BYTES):
        if line.endswith(b"\n") or _CHANGED_END.search(line):
            yield line
        elif len(line) < MOST_LINE_BYTES or not _skip_line(file):
            return
        else:
            yield None


def _skip_line(file: BufferedReader) -> bool:
    """Read to the end of the line; False where it has none. Holes of a sparse file are passed over."""
    while True:
        _skip_hole(file)
        rest = file.readline(MOST_LINE_BYTES)
        if not rest or rest.endswith(b"\n"):
            return bool(rest)


def _skip_hole(file: BufferedReader) -> None:
    if not hasattr(os, "SEEK_DATA"):
        return
    here, raw = file.tell(), os.lseek(file.fileno(), 0, os.SEEK_CUR)
    try:
        data = os.lseek(file.fileno(), here, os.SEEK_DATA)
    except OSError as error:
        # ENXIO: nothing but a hole up to the end; others: the file system does not know.
        data = os.fstat(file.fileno()).st_size if error.errno == errno.ENXIO else here
    # The buffer must find its file where it left it.
    os.lseek(file.fileno(), raw, os.SEEK_SET)
    file.seek(max(here, data))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
