"""Documents out of files: one file for each format here, one line for each in ``table.py``."""

from lightscale.data_pipeline.executors import Advance
from lightscale.data_pipeline.preparation.readers.file_parts import FIRST, FilePart, PartBegin
from lightscale.data_pipeline.preparation.readers.interface import InputFormat, RawDocument, Reading
from lightscale.data_pipeline.preparation.readers.ranges import FileRange
from lightscale.data_pipeline.preparation.readers.read import cut_into_ranges, has_parts, read

__all__ = [
    "FIRST",
    "Advance",
    "FilePart",
    "FileRange",
    "InputFormat",
    "PartBegin",
    "RawDocument",
    "Reading",
    "cut_into_ranges",
    "has_parts",
    "read",
]
