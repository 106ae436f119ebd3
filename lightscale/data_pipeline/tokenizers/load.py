"""Find a tokenizer by its path."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightscale.data_pipeline.tokenizers.ascii_characters import ASCII, load_ascii
from lightscale.data_pipeline.tokenizers.huggingface_file import HuggingFaceTokenizer, load_huggingface
from lightscale.data_pipeline.tokenizers.interface import DESCRIPTION_FILE, Tokenizer, read_file
from lightscale.data_pipeline.tokenizers.no_text import NO_TEXT, load_no_text
from lightscale.data_pipeline.tokenizers.sentencepiece_model import SentencePieceTokenizer, load_sentencepiece
from lightscale.data_pipeline.tokenizers.tiktoken_encoding import load_saved_tiktoken
from lightscale.errors import UserError, shortened

_LOADERS: dict[str, Callable[[Path, dict[str, Any]], Tokenizer]] = {
    "sentencepiece": load_sentencepiece,
    "tiktoken": load_saved_tiktoken,
    "huggingface": load_huggingface,
    ASCII: load_ascii,
    NO_TEXT: load_no_text,
}


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a store or a run, or of a file: a sentencepiece model, or a Hugging Face ``.json``.

    Raises ``UserError`` that names the file if it is missing, or differs from the store's tokenizer.
    """
    if path.is_file() and path.suffix == ".json":
        return HuggingFaceTokenizer(read_file(path), origin=str(path))
    if path.is_file():
        return SentencePieceTokenizer(read_file(path), origin=str(path))
    directory = path / "tokenizer"
    try:
        description = json.loads(read_file(directory / DESCRIPTION_FILE))
        tokenizer = _LOADERS[description["kind"]](directory, description)
        sha256 = description["sha256"]
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{directory}: damaged tokenizer files ({shortened(repr(error))})") from error
    if tokenizer.sha256 != sha256:
        raise UserError(
            f"{directory}: the files have sha256 {tokenizer.sha256}, {DESCRIPTION_FILE} has {sha256}; the files "
            "changed after the store was written"
        )
    return tokenizer
