"""A file that is one document."""

from collections.abc import Iterator

from lightscale.data_pipeline.preparation.readers.interface import InputFormat, RawDocument, Reading
from lightscale.data_pipeline.preparation.readers.ranges import FileRange


class WholeText(InputFormat):
    """Plain text."""

    def read(self, file_range: FileRange, reading: Reading) -> Iterator[RawDocument]:
        """All of it."""
        file = file_range.file
        if file.size_bytes > reading.options.max_document_bytes:
            reading.too_long(file.id, file.size_bytes)
        else:
            data = file.path.read_bytes()
            yield RawDocument(id=file.id, data=data, num_bytes=len(data))
        reading.advance(file_range.num_bytes)
