"""Columns of tables in Arrow's memory: texts of any type that holds them, and fields inside of structs."""

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow

from lightscale.data_pipeline.preparation.readers.inputs import MISSING, NO_TEXT, ReadOptions
from lightscale.data_pipeline.preparation.readers.interface import RawDocument, Reading, id_text

ROWS = 256
"""So many are made Python objects at a time."""


def column_fault(schema: Any, text_field: str) -> str | None:
    """Why the column ``text_field`` is no text; None where it is."""
    found = ", ".join(f"{field.name}: {field.type}" for field in list(schema)[:8])
    if text_field not in schema.names:
        return f"no column {text_field!r} (found {found})"
    kind = schema.field(text_field).type
    types = pyarrow.types
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return None
    return f"column {text_field!r} is {kind}, not string (found {found})"


def wanted_columns(schema: Any, options: ReadOptions) -> list[str]:
    """The columns to read: the text's, and of the others those that there are."""
    text_field, fields = options.text_field, (options.id_field, options.label_field)
    others = {field for field in fields if field is not None and field in schema.names and field != text_field}
    return [text_field, *sorted(others)]


def documents_of_batch(batch: Any, file_id: str, row: int, reading: Reading) -> Iterator[RawDocument]:
    """The documents of a record batch whose first row is ``row`` of the file."""
    options = reading.options
    # As bytes: pyarrow does not check that its strings are UTF-8.
    texts = batch.column(options.text_field).cast(pyarrow.large_binary()).to_pylist()
    ids, labels = (
        batch.column(field).to_pylist() if field in batch.schema.names else itertools.repeat(absent)
        for field, absent in ((options.id_field, None), (options.label_field, MISSING))
    )
    for data, own_id, label in zip(texts, ids, labels, strict=False):
        document_id = f"{file_id}@{row}"
        if data is None:
            reading.problems.add(NO_TEXT, f"{document_id}: null in {options.text_field!r}")
        elif reading.fits(data, document_id):
            yield RawDocument(id=document_id, data=data, begin=row, own_id=id_text(own_id), label=label)
        row += 1
