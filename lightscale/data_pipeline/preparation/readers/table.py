"""The formats of input files: their suffixes, and where each is implemented.

Entries are import strings: reading a corpus file waits for no package of a format.
"""

import importlib
from dataclasses import dataclass

from lightscale.data_pipeline.preparation.readers.inputs import ReadOptions, SourceFile
from lightscale.data_pipeline.preparation.readers.interface import Format
from lightscale.errors import UserError

TEXT = "text"


@dataclass(frozen=True, kw_only=True)
class FormatEntry:
    """What is said of a format without importing it."""

    suffixes: tuple[str, ...]
    """Ends of the names of its files, without those of compression."""
    cls: str
    """As "module:name" below this package, a ``Format``."""
    extra: str = "corpus"
    """The extra of lightscale that brings the packages it needs."""
    is_stream: bool = True
    """Read from front to back, and so it may be compressed."""
    holds_many: bool = True
    """A file of it holds many documents."""
    in_directories: bool = True
    """Read in directories unless the source says otherwise."""

    def load(self, file: SourceFile) -> Format:
        """The format. ``UserError``: a package that it needs to read ``file`` is missing."""
        module, name = self.cls.split(":")
        try:
            made: Format = getattr(importlib.import_module(f"{__package__}.{module}"), name)()
        except ImportError as error:
            package = (error.name or "?").partition(".")[0]
            raise UserError(
                f"{file.path}: {package} is needed to read it; pip install 'lightscale[{self.extra}]'"
            ) from error
        return made


FORMATS: dict[str, FormatEntry] = {
    TEXT: FormatEntry(suffixes=(".txt", ".md", ".rst", ".py"), cls="text:Text", is_stream=False, holds_many=False),
    "jsonl": FormatEntry(suffixes=(".jsonl",), cls="jsonl:JsonLines"),
    "parquet": FormatEntry(suffixes=(".parquet",), cls="parquet:Parquet", is_stream=False),
}
PACKED_SUFFIXES = (".gz", ".zst")
_OTHER_PACKED_SUFFIXES = (".bz2", ".xz", ".zip", ".7z", ".tar", ".tgz")
# Their texts are inside of something: trained on as they are, a model would learn the format.
_OTHER_SUFFIXES = (
    *(".json", ".csv", ".tsv", ".arrow", ".feather", ".orc", ".avro", ".warc", ".wet", ".wat"),
    *(".pdf", ".docx", ".epub", ".sqlite", ".db", ".npy", ".npz", ".pkl", ".bin", ".idx"),
)


def _suffixes(entry: FormatEntry) -> list[str]:
    packed = ("", *PACKED_SUFFIXES) if entry.is_stream else ("",)
    return [suffix + ending for suffix in entry.suffixes for ending in packed]


_BY_SUFFIX = {suffix: name for name, entry in FORMATS.items() for suffix in _suffixes(entry)}
DEFAULT_SUFFIXES = tuple(suffix for suffix, name in _BY_SUFFIX.items() if FORMATS[name].in_directories)


def format_of(file: SourceFile, options: ReadOptions) -> FormatEntry | str:
    """The format of ``file``, by its suffix; or why it is of none."""
    name = file.path.name.lower()
    for suffix, kind in _BY_SUFFIX.items():
        if name.endswith(suffix):
            return FORMATS[kind]
    if name.endswith((*PACKED_SUFFIXES, *_OTHER_PACKED_SUFFIXES)):
        return "compressed files are read as .jsonl.gz and .jsonl.zst only"
    if name.endswith(_OTHER_SUFFIXES) and not name.endswith(options.suffixes):
        advice = "write its documents as .jsonl, or name its suffix in suffixes to read all of it as one text"
        return f"neither text, jsonl nor parquet; {advice}"
    return FORMATS[TEXT]
