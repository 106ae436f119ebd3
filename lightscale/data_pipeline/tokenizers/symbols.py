"""Tokenizers of given symbols: those of generated texts, the bytes alone, and shades of grey.

A pixel is a token of 256 shades. Its character is the Braille pattern of its value, so that a text shows something.
"""

from collections.abc import Sequence

from lightscale.data_pipeline.tokenizers.interface import END_OF_TEXT
from lightscale.data_pipeline.tokenizers.tiktoken_encoding import TiktokenTokenizer

FIRST_SYMBOL = 256
"""The id of the first symbol, behind those of bytes."""
_FIRST_SHADE = 0x2800
"""Of 256 Braille patterns."""
SHADES = tuple(chr(_FIRST_SHADE + value) for value in range(256))
"""The characters of grey values 0 to 255, whose ids are ``FIRST_SYMBOL`` and those behind."""


def symbol_tokenizer(name: str, symbols: Sequence[str], pattern: str) -> TiktokenTokenizer:
    """A tokenizer whose tokens are ``symbols``, which ``pattern`` finds in a text, and bytes for all other text.

    Ids are 0 to 255 for bytes, then the symbols in order, then the end-of-text token.
    """
    ranks = {bytes([byte]): byte for byte in range(FIRST_SYMBOL)}
    ranks |= {symbol.encode(): FIRST_SYMBOL + number for number, symbol in enumerate(symbols)}
    return TiktokenTokenizer(
        name=name,
        pat_str=rf"{pattern}|(?s:.)" if symbols else "(?s:.)",
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
    )


def byte_tokenizer() -> TiktokenTokenizer:
    """A token for each byte of a text in UTF-8, and the end-of-text token, 256."""
    return symbol_tokenizer("bytes", (), "")


def shade_tokenizer(name: str) -> TiktokenTokenizer:
    """A token for each of 256 shades of grey."""
    return symbol_tokenizer(name, SHADES, f"[{SHADES[0]}-{SHADES[-1]}]")
