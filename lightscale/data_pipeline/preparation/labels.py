"""Classes of documents: out of a field of jsonl objects or a column of parquet files, into numbers from 0 on.

A class is a string or a whole number there; its name is its text. A corpus lists its classes in order. Without a list,
its classes are those of the kept documents, sorted (by value if all are whole numbers), so that their numbers depend on
the documents alone. ``report.json`` and the store have the names.
"""

import json
from collections.abc import Collection, Iterable
from typing import Any

from lightscale.data_pipeline.preparation.readers.inputs import Missing
from lightscale.errors import UserError, shortened

MOST_CLASSES = 2**16
"""More values are no classes, but ids of documents or similar."""
MOST_CHARACTERS = 256
"""Of the name of a class."""


def class_of(value: Any, document_id: str, *, field: str, classes: Collection[str] | None) -> str:
    """The name of the class that ``value`` of a document's ``field`` is.

    ``classes``: the allowed ones; None: any. Raises ``UserError`` for any other value.
    """
    where = f'{document_id}: label_field = "{field}"'
    if isinstance(value, Missing):
        raise UserError(f"{where}: the document has no such field; add it, or remove the document from the corpus")
    if isinstance(value, bool) or not isinstance(value, (int, str)) or not is_name(str(value)):
        found = shortened(json.dumps(value, default=str), 80)
        raise UserError(
            f"{where}: the class is {found}; it must be a whole number, or a string of 1 to {MOST_CHARACTERS} "
            "printable characters; correct the document, or remove it from the corpus"
        )
    name = str(value)
    if classes is not None and name not in classes:
        names = shortened(", ".join(classes), 200)
        raise UserError(f"{where}: the class {shortened(name, 80)} is not in classes = {names}; add it there")
    return name


def is_name(text: str) -> bool:
    """Whether a class can be called that: it stands in tables and reports."""
    return 0 < len(text) <= MOST_CHARACTERS and text.isprintable()


def in_order(names: Iterable[str]) -> list[str]:
    """The ``names`` of classes that were found, each once: by value where all are whole numbers, else as text."""
    found = sorted(set(names))
    return sorted(found, key=int) if all(_is_number(name) for name in found) else found


def check_number(names: Collection[str], where: str) -> None:
    """``UserError`` where there are more than classes can be."""
    if len(names) > MOST_CLASSES:
        raise UserError(
            f"{where}: label_field has more than {MOST_CLASSES:_} different values; use a field that holds classes"
        )


def _is_number(name: str) -> bool:
    digits = name.removeprefix("-")
    return digits.isascii() and digits.isdigit()
