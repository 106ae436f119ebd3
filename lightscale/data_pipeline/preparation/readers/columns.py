"""Columns of tables in Arrow's memory: texts of any type that holds them, and fields inside of structs."""

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.compute

from lightscale.data_pipeline.preparation.readers.inputs import MISSING, NO_TEXT, ReadOptions, SourceFile
from lightscale.data_pipeline.preparation.readers.interface import RawDocument, Reading, id_text
from lightscale.errors import UserError

ROWS = 256
"""So many are made Python objects at a time."""


def column_fault(schema: Any, options: ReadOptions) -> str | None:
    """Why a column of the texts has none; None where all have some, or where whole rows are read."""
    if options.has_records:
        return None
    faults = (_fault(schema, name) for name in options.text_fields)
    return next((fault for fault in faults if fault is not None), None)


def _fault(schema: Any, text_field: str) -> str | None:
    found = ", ".join(f"{field.name}: {field.type}" for field in list(schema)[:8])
    kind = _type_of(schema, text_field)
    if kind is None:
        return f"no column {text_field!r} (found {found})"
    values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    types = pyarrow.types
    is_text = types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)
    if is_text or types.is_binary(values) or types.is_large_binary(values) or types.is_binary_view(values):
        return None
    return f"column {text_field!r} is {kind}, not string (found {found})"


def wanted_columns(schema: Any, options: ReadOptions) -> list[str]:
    """The columns to read: the text's, and existing ones for the other fields. ``a.b`` is a column of that name."""
    if options.has_records:
        return list(schema.names)
    names = {*options.text_fields, options.id_field, options.label_field}
    return sorted(name for name in names if name is not None and _type_of(schema, name) is not None)


def documents_of_batch(batch: Any, file_id: str, row: int, reading: Reading) -> Iterator[RawDocument]:
    """The documents of a record batch whose first row is ``row`` of the file."""
    options = reading.options
    if options.has_records or options.text_pair_field is not None:
        for number, record in enumerate(_plain(batch.to_struct_array()), row):
            if record is None:
                reading.problems.add(NO_TEXT, f"{file_id}@{number}: a value that Python does not have, or no UTF-8")
            elif (document := reading.document(record, f"{file_id}@{number}", begin=number)) is not None:
                yield document
        return
    # As bytes: pyarrow does not check that its strings are UTF-8.
    texts = _as_bytes(_column(batch, options.text_field)).to_pylist()
    ids, labels = (
        itertools.repeat(absent)
        if field is None or _type_of(batch.schema, field) is None
        else _plain(_column(batch, field))
        for field, absent in ((options.id_field, None), (options.label_field, MISSING))
    )
    for data, own_id, label in zip(texts, ids, labels, strict=False):
        document_id = f"{file_id}@{row}"
        if data is None:
            reading.problems.add(NO_TEXT, f"{document_id}: null in {options.text_field!r}")
        elif reading.fits(data, document_id):
            yield RawDocument(id=document_id, data=data, begin=row, own_id=id_text(own_id), label=label)
        row += 1


def top_names(schema: Any, columns: list[str]) -> list[str]:
    """The columns of a table that ``columns`` are, or are inside of."""
    return sorted({name if name in schema.names else name.partition(".")[0] for name in columns})


def too_large(file: SourceFile, row: int) -> UserError:
    """Of a part that needs more memory than there is, as damaged files do: to skip it would depend on the machine."""
    return UserError(
        f"{file.path}: there is not enough memory for what comes after row {row}; the file is damaged, or has too "
        "large parts: remove it, or write it with fewer rows in each"
    )


def _plain(column: Any) -> list[Any]:
    """Values as Python's; None for those that it does not have, such as years beyond 9999; UTF-8 is repaired."""
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        values = [_plain_value(value) for value in column]
    return values


def _plain_value(value: Any) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError):
        types = pyarrow.types
        if types.is_string(value.type) or types.is_large_string(value.type):
            return value.as_buffer().to_pybytes().decode(errors="replace")
        return None


def _as_bytes(column: Any) -> Any:
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pyarrow.large_binary())


def _type_of(schema: Any, name: str) -> Any:
    """Of the column ``name``, or of the field inside of structs; None where there is none."""
    if name in schema.names:
        return schema.field(name).type
    first, *rest = name.split(".")
    if first not in schema.names:
        return None
    kind = schema.field(first).type
    for part in rest:
        if not pyarrow.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind


def _column(batch: Any, name: str) -> Any:
    if name in batch.schema.names:
        return batch.column(name)
    first, *rest = name.split(".")
    return pyarrow.compute.struct_field(batch.column(first), rest)
