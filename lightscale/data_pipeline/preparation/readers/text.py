"""A file that is one document, of the class that its folder is named after, where classes are read by folder."""

import os
from collections.abc import Iterator
from pathlib import PurePath

from lightscale.data_pipeline.preparation.readers.inputs import MISSING
from lightscale.data_pipeline.preparation.readers.interface import InputFormat, RawDocument, Reading
from lightscale.data_pipeline.preparation.readers.ranges import FileRange

FOLDER = "folder"
"""The only field of a text file, beside its text."""


class WholeText(InputFormat):
    """Plain text."""

    def read(self, file_range: FileRange, reading: Reading) -> Iterator[RawDocument]:
        """All of it."""
        file = file_range.file
        if file.size_bytes > reading.options.max_document_bytes:
            reading.too_long(file.id, file.size_bytes)
        else:
            data = file.path.read_bytes()
            folder = ""
            if reading.options.label_field == FOLDER:
                # Without resolving links, whose folders are those that the user sees.
                folder = PurePath(os.path.abspath(str(file.path))).parent.name  # noqa: PTH100
            yield RawDocument(id=file.id, data=data, num_bytes=len(data), label=folder or MISSING)
        reading.advance(file_range.num_bytes)
