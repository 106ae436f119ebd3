"""Texts to be evaluated on: documents out of text, jsonl and parquet files, or out of a source of a token store."""

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError, shortened
from lightscale.files import open_regular, unpacked_gzip

MOST_BYTES = 2**32
"""Of one file, which is read whole."""
_JSONL = (".jsonl", ".jsonl.gz")
_PARQUET = ".parquet"


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A file that was read."""

    path: Path
    xxh3_128: str
    documents: list[dict[str, Any]]
    """Records of jsonl and parquet files; of a text file one record with its text."""


def find_files(paths: Sequence[str], folder: Path) -> list[Path]:
    """The files that ``paths`` and patterns match, relative to ``folder``, each once. UserError if there is none."""
    found: dict[Path, None] = {}
    for entry in paths:
        whole = str(folder / entry)
        path = Path(whole)
        if path.is_file():
            found[path] = None
            continue
        # Path.glob cannot start at an absolute pattern.
        matches = [Path(name) for name in sorted(glob.glob(whole, recursive=True))]  # noqa: PTH207
        files = [match for match in matches if match.is_file()]
        if not files:
            what = "is a directory; use files or a pattern in it" if path.is_dir() else "no such file"
            raise UserError(f"{whole}: {what}")
        found.update(dict.fromkeys(files))
    return list(found)


def read_file(path: Path, *, columns: Sequence[str] = ("text",)) -> TextFile:
    """The records of ``path``; each of a jsonl or parquet file has ``columns``. UserError names file and line."""
    name = path.name
    try:
        with open_regular(path, what="a file of texts", most_bytes=MOST_BYTES, follow_links=True) as file:
            data = file.read()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    found = xxhash.xxh3_128(data).hexdigest()
    column = columns[0]
    if name.endswith(_PARQUET):
        records = list(_parquet(path, columns))
    elif name.endswith(_JSONL):
        records = list(_jsonl(path, data, columns))
    else:
        column, records = "text", [{"text": _decoded(path, data)}]
    if not any(record[column].strip() for record in records):
        raise UserError(f"{path}: the file is empty")
    return TextFile(path=path, xxh3_128=found, documents=records)


def _decoded(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); the file may be damaged") from None


def json_lines(path: Path, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each object of a jsonl file with the number of its line, from 1; UserError names file and line."""
    # JSON escapes line feeds, but not the other characters at which `splitlines` splits.
    for number, line in enumerate(_decoded(path, data).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{path}:{number}: not a JSON object: {shortened(line, 80)}") from None
        if not isinstance(record, dict):
            raise UserError(f"{path}:{number}: not a JSON object: {shortened(line, 80)}")
        yield number, record


def _jsonl(path: Path, data: bytes, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    if path.name.endswith(".gz"):
        data = unpacked_gzip(data, path, most_bytes=MOST_BYTES)
    for number, record in json_lines(path, data):
        for column in columns:
            if not isinstance(record.get(column), str):
                raise UserError(f"{path}:{number}: no text in the field {column!r}; it has {_names(record)}")
        yield record


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        # An optional package, which other formats do not need.
        import pyarrow  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        raise UserError(f"{path}: pyarrow is needed to read it; pip install 'lightscale[corpus]'") from None
    try:
        table = pyarrow.parquet.read_table(path)
        records = table.to_pylist()
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged parquet file ({shortened(str(error))})") from None
    for column in columns:
        if column not in table.column_names:
            raise UserError(f"{path}: no column {column!r}; it has {', '.join(table.column_names)}")
    for row, record in enumerate(records):
        for column in columns:
            if not isinstance(record[column], str):
                raise UserError(f"{path}: row {row}: no text in the column {column!r}")
        yield record


def _names(record: dict[str, Any]) -> str:
    return shortened(", ".join(map(repr, record)), 120) or "nothing"


def check_store(path: Path, source: str, tokenizer: Tokenizer) -> None:
    """UserError unless the store ``path`` has ``source`` and was written with ``tokenizer``."""
    store = TokenStore(path)
    store.source(source)
    if store.tokenizer.sha256 != tokenizer.sha256:
        raise UserError(
            f"{path}: written with the tokenizer {store.tokenizer.name} (sha256 {store.tokenizer.sha256[:16]}…), not "
            f"with that of the run ({tokenizer.name}, sha256 {tokenizer.sha256[:16]}…); prepare the text with the "
            "run's tokenizer, or list its files in `paths`"
        )
