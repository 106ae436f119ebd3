"""The corpus on a command line: a corpus file, or paths and a few options."""

import argparse
import re
from pathlib import Path
from typing import Any

from lightscale.config.arguments import path_argument
from lightscale.data_pipeline.preparation.corpus import (
    DEFAULT_VOCAB_SIZE,
    TRAINED_TOKENIZER,
    Corpus,
    load_corpus,
    make_corpus,
)
from lightscale.data_pipeline.preparation.readers.remote import RemotePath, is_remote
from lightscale.data_pipeline.preparation.readers.table import DEFAULT_SUFFIXES
from lightscale.data_pipeline.preparation.sources import STDLIB, STDLIB_PATH
from lightscale.errors import UserError

_CORPUS_SUFFIX = ".toml"
DEFAULT_VALIDATION = 0.02
"""Share of the documents that is held out."""
# With a corpus file these are keys of the file.
_SOURCE_OPTIONS = ("text_field", "text_pair_field", "max_tokens", "label_field", "language")
_PATH_OPTIONS = ("name", "tokenizer", "vocab_size", "validation", "suffixes", *_SOURCE_OPTIONS)


def add_corpus(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that `read_corpus` reads."""
    add = parser.add_argument
    paths = "a corpus file, or files, directories and URLs (s3://, http://, https://)"
    add("paths", nargs="*", default=[], type=text_path, metavar="CORPUS.toml | PATH", help=paths)
    add(
        "--corpus",
        choices=[STDLIB],
        help="a corpus available on every machine: the sources of Python's standard library",
    )
    own = parser.add_argument_group("for PATHs and --corpus (in a corpus file, these are its keys)")
    add = own.add_argument
    add("--name", help="name of the source (default: name of the corpus or of the first path)")
    tokenizers = (
        "sentencepiece (trained here), tiktoken:ENCODING, ascii (a token for each character), bytes, "
        "or the path of a store or a tokenizer's file"
    )
    add("--tokenizer", help=f"{tokenizers} (default: {TRAINED_TOKENIZER})")
    add("--vocab-size", type=int, help=f"vocabulary size of a tokenizer trained here (default: {DEFAULT_VOCAB_SIZE})")
    validation = f"share of the documents to hold out (default: {DEFAULT_VALIDATION})"
    add("--validation", type=float, metavar="SHARE", help=validation)
    suffixes = f"suffixes of the files to read in directories (default: {','.join(DEFAULT_SUFFIXES)})"
    add("--suffixes", help=suffixes)
    add("--text-field", help="field of the text in jsonl and parquet files (default: text)")
    second = "field of a second text: documents are pairs, with one class for both"
    add("--text-pair-field", help=f"{second} (default: single texts)")
    cut = "with --text-pair-field: length at which each text is cut, in tokens (default: whole texts)"
    add("--max-tokens", type=int, metavar="N", help=cut)
    label = "field of the documents' classes in jsonl and parquet files; folder: of text files that of their folder"
    add("--label-field", help=f"{label} (default: no classes)")
    add("--language", help="filter documents by the rules of this language (default: keep all)")


def text_path(given: str) -> Path | RemotePath:
    """A path or a URL of texts on a command line, as argparse's `type`."""
    path = path_argument(given)
    return RemotePath(given) if is_remote(given) else path


def is_corpus_file(args: argparse.Namespace) -> bool:
    """Whether the corpus is given as a file."""
    return bool(_corpus_files(args))


def _corpus_files(args: argparse.Namespace) -> list[Path]:
    return [path for path in args.paths if isinstance(path, Path) and path.suffix == _CORPUS_SUFFIX]


def read_corpus(args: argparse.Namespace) -> Corpus:
    """The corpus of the command line, in either form. Raises UserError for any other form."""
    files = _corpus_files(args)
    if bool(args.paths) == (args.corpus is not None) or (files and len(args.paths) > 1):
        raise UserError(f"the corpus is one CORPUS.toml, or PATHs, or --corpus {STDLIB}: use exactly one of these")
    if not files:
        return _corpus_of_paths(args)
    given = [name for name in _PATH_OPTIONS if getattr(args, name) is not None]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"{options}: not possible with a corpus file; set the key in {files[0]}")
    return load_corpus(files[0])


def source_name(args: argparse.Namespace) -> str:
    """The default name of the source of PATHs: that of the first."""
    first = args.paths[0].resolve() if isinstance(args.paths[0], Path) else Path(args.paths[0].name)
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", first.name if first.is_dir() else first.stem).strip("-.") or "corpus"


def _corpus_of_paths(args: argparse.Namespace) -> Corpus:
    """One source. Every document is kept, unless a language is given."""
    if args.corpus == STDLIB:
        paths, name = [STDLIB_PATH], STDLIB
    else:
        paths, name = [str(path) for path in args.paths], source_name(args)
    source: dict[str, Any] = {"paths": paths}
    if args.suffixes is not None:
        source["suffixes"] = [suffix.strip() for suffix in args.suffixes.split(",") if suffix.strip()]
    for key in _SOURCE_OPTIONS:
        if (value := getattr(args, key)) is not None:
            source[key] = value
    tokenizer = args.tokenizer or TRAINED_TOKENIZER
    table: dict[str, Any] = {
        "tokenizer": tokenizer,
        "validation": DEFAULT_VALIDATION if args.validation is None else args.validation,
        "duplicates": {"exact": False, "near": False},
        "sources": {args.name or name: source},
    }
    if args.vocab_size is not None:
        table["vocab_size"] = args.vocab_size
    return make_corpus(table, origin="command line")
