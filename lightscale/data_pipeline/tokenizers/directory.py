"""The files of a tokenizer in one directory: copied whole, and checked without the package that runs it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightscale.data_pipeline.tokenizers.ascii_characters import ASCII, ascii_sha256
from lightscale.data_pipeline.tokenizers.huggingface_file import huggingface_sha256
from lightscale.data_pipeline.tokenizers.interface import DESCRIPTION_FILE, read_file
from lightscale.data_pipeline.tokenizers.no_text import NO_TEXT, no_text_sha256
from lightscale.data_pipeline.tokenizers.sentencepiece_model import sentencepiece_sha256
from lightscale.data_pipeline.tokenizers.tiktoken_encoding import tiktoken_sha256
from lightscale.data_pipeline.whole_files import TEMPORARY_SUFFIX, whole_directory
from lightscale.errors import UserError, shortened

_HASHES: dict[str, Callable[[Path, dict[str, Any]], str]] = {
    "sentencepiece": sentencepiece_sha256,
    "tiktoken": tiktoken_sha256,
    "huggingface": huggingface_sha256,
    ASCII: ascii_sha256,
    NO_TEXT: no_text_sha256,
}


def files_sha256(directory: Path) -> str:
    """The ``sha256`` of the tokenizer whose files ``Tokenizer.save`` wrote to ``directory``, computed from the files.

    Raises ``UserError`` naming a file that is missing, or the directory where its description makes no sense.
    """
    try:
        description = json.loads(read_file(directory / DESCRIPTION_FILE))
        return _HASHES[description["kind"]](directory, description)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{directory}: damaged tokenizer files ({shortened(repr(error))})") from error


def copy_tokenizer(source: Path, target: Path, *, sha256: str) -> None:
    """Copy the files in ``source`` to ``target``, which appears whole and on disk or not at all.

    An existing ``target`` is replaced, and incomplete files of an earlier process are removed. Only one process may
    call this at a time. Raises ``UserError`` if the files are not those of the tokenizer ``sha256``.
    """
    for draft in target.parent.glob(f"{target.name}.*{TEMPORARY_SUFFIX}"):
        _remove(draft)
    with whole_directory(target) as draft:
        for file in sorted(path for path in source.iterdir() if path.is_file()):
            shutil.copyfile(file, draft / file.name)
        # Of the copy: what was read is then right too.
        if (found := files_sha256(draft)) != sha256:
            raise UserError(
                f"{source}: expected the tokenizer with sha256 {sha256}, found {found}; the store is damaged"
            )
        # Whatever it is: a link that leads nowhere is in the way too.
        if os.path.lexists(target):
            target.rename(target.with_name(f"{target.name}.replaced{TEMPORARY_SUFFIX}"))
    _remove(target.with_name(f"{target.name}.replaced{TEMPORARY_SUFFIX}"))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
