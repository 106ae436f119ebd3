"""The formats of input files: their suffixes, and where each is implemented.

Entries are import strings: reading a corpus file waits for no package of a format.
"""

import importlib
from dataclasses import dataclass

from lightscale.data_pipeline.preparation.readers.inputs import ReadOptions, SourceFile
from lightscale.data_pipeline.preparation.readers.interface import InputFormat
from lightscale.errors import UserError

TEXT = "text"


@dataclass(frozen=True, kw_only=True)
class InputFormatEntry:
    """Properties of a format, known without importing it."""

    suffixes: tuple[str, ...]
    """Ends of the names of its files, without those of compression."""
    cls: str
    """As "module:name" below this package, a ``InputFormat``."""
    extra: str = "corpus"
    """The extra of lightscale that brings the packages it needs."""
    is_stream: bool = True
    """Read from front to back, and so it may be compressed; then it is read in parts (``file_parts.py``)."""
    divides: bool = False
    """A file that is not compressed is read in ranges."""
    holds_many: bool = True
    """A file of it holds many documents."""
    in_directories: bool = True
    """Whether files of the format in directories are read by default."""

    def load(self, file: SourceFile) -> InputFormat:
        """The format. ``UserError``: a package that it needs to read ``file`` is missing."""
        module, name = self.cls.split(":")
        try:
            made: InputFormat = getattr(importlib.import_module(f"{__package__}.{module}"), name)()
        except ImportError as error:
            package = (error.name or "?").partition(".")[0]
            raise UserError(
                f"{file.path}: {package} is needed to read it; pip install 'lightscale[{self.extra}]'"
            ) from error
        return made


FORMATS: dict[str, InputFormatEntry] = {
    TEXT: InputFormatEntry(
        suffixes=(".txt", ".md", ".rst", ".py"), cls="text:WholeText", is_stream=False, holds_many=False
    ),
    "jsonl": InputFormatEntry(suffixes=(".jsonl", ".ndjson"), cls="jsonl:JsonLines", divides=True),
    # In directories of code and of data sets these are settings and lists more often than documents.
    "json": InputFormatEntry(suffixes=(".json",), cls="json_values:JsonValues", in_directories=False),
    "csv": InputFormatEntry(suffixes=(".csv",), cls="separated:Csv", in_directories=False),
    "tsv": InputFormatEntry(suffixes=(".tsv",), cls="separated:Tsv", in_directories=False),
    "parquet": InputFormatEntry(suffixes=(".parquet",), cls="parquet:Parquet", is_stream=False, divides=True),
    "arrow": InputFormatEntry(suffixes=(".arrow", ".feather"), cls="arrow:Arrow", is_stream=False, divides=True),
    "warc": InputFormatEntry(suffixes=(".warc", ".wet"), cls="warc:Warc", extra="web"),
}
CHAT, PREFERENCE = "chat", "preference"
"""In place of a format: conversations, or preferences, in files of these formats, by suffix."""
RECORD_FORMATS = ("jsonl", "json", "csv", "tsv", "parquet", "arrow")
PACKED_SUFFIXES = (".gz", ".zst", ".bz2")
_OTHER_PACKED_SUFFIXES = (".xz", ".zip", ".7z", ".tar", ".tgz")
# Their texts are inside of something: trained on as they are, a model would learn the format.
_OTHER_SUFFIXES = (
    *(".orc", ".avro", ".wat", ".pdf", ".docx", ".epub", ".sqlite", ".db"),
    *(".npy", ".npz", ".pkl", ".bin", ".idx", ".pt", ".safetensors"),
    *(".mp3", ".mp4", ".ogg", ".wav"),
)
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def suffixes_of(entry: InputFormatEntry) -> list[str]:
    """The ends of the names of its files, compressed ones too."""
    packed = ("", *PACKED_SUFFIXES) if entry.is_stream else ("",)
    return [suffix + ending for suffix in entry.suffixes for ending in packed]


_BY_SUFFIX = {suffix: name for name, entry in FORMATS.items() for suffix in suffixes_of(entry)}
DEFAULT_SUFFIXES = tuple(suffix for suffix, name in _BY_SUFFIX.items() if FORMATS[name].in_directories)


def format_of(file: SourceFile, options: ReadOptions) -> InputFormatEntry | str:
    """The format of ``file``: the requested one, or by its suffix; or the reason that it has none."""
    name = file.path.name.lower()
    is_record = options.has_records or options.text_pair_field is not None
    if options.format is not None:
        entry = FORMATS[options.format]
        if name.endswith(PACKED_SUFFIXES) and not entry.is_stream:
            return f"a compressed file of format {options.format} cannot be read in parts; unpack it"
        return entry
    for suffix, kind in _BY_SUFFIX.items():
        if name.endswith(suffix):
            if is_record and kind not in RECORD_FORMATS:
                break
            return FORMATS[kind]
    if is_record:
        what = "conversations" if options.has_records else "pairs of texts"
        return f"{what} are records of {', '.join(RECORD_FORMATS)} files; convert it to one of them"
    if name.endswith((*PACKED_SUFFIXES, *_OTHER_PACKED_SUFFIXES)):
        names = ", ".join(kind for kind, entry in FORMATS.items() if entry.is_stream)
        return f"compressed files can be {names}, with suffix {', '.join(PACKED_SUFFIXES)}; or set format"
    if name.endswith(_OTHER_SUFFIXES):
        return f'none of {", ".join(FORMATS)}; convert it to one of them, or set format = "text"'
    if name.endswith(IMAGE_SUFFIXES):
        return "an image; `lightscale data prepare --images HEIGHTxWIDTHxCHANNELS` reads images"
    return FORMATS[TEXT]
