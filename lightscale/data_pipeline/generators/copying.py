"""The copying task: a string of random symbols, and the same string again.

    [BOS] 3 17 5 [SEP] 3 17 5   and the end-of-text token, which is [EOS]

(Jelassi et al. 2024, arXiv 2402.01032; CausalRN, sections 4.1 and 4.4.) Only the second string counts as labels: the
first cannot be foreseen. The lengths are all as likely, and so are the symbols.
"""

import argparse
from dataclasses import dataclass
from random import Random
from typing import Self

import numpy as np

from lightscale.data_pipeline.generators.interface import (
    Generator,
    MadeDocument,
    integer,
    require_range,
)
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.data_pipeline.tokenizers.symbols import symbol_tokenizer
from lightscale.errors import UserError

_MOST_SYMBOLS, _MOST_LENGTH = 10_000, 2**20
_BEGIN, _SEPARATOR = "[BOS]", " [SEP]"


@dataclass(frozen=True, kw_only=True)
class Copying(Generator):
    """Strings of ``min_length`` to ``max_length`` symbols, twice."""

    min_length: int = 16
    max_length: int = 16
    symbols: int = 26
    """From which the strings are drawn."""

    help = "generate the copying task: random strings written twice; the loss counts the second copy"
    has_loss_mask = True

    def __post_init__(self) -> None:
        for name, value, most in (
            ("min-length", self.min_length, _MOST_LENGTH),
            ("max-length", self.max_length, _MOST_LENGTH),
            ("symbols", self.symbols, _MOST_SYMBOLS),
        ):
            require_range(name, value, 1, most)
        if self.min_length > self.max_length:
            raise UserError(f"--min-length {self.min_length}: above --max-length {self.max_length}")

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """See ``Generator``."""
        add = parser.add_argument
        add("--min-length", type=int, metavar="N", help="minimum symbols of a string (default: --max-length)")
        add("--max-length", type=int, default=16, metavar="N", help="maximum symbols of a string (default: 16)")
        add("--symbols", type=int, default=26, metavar="N", help="number of different symbols (default: 26)")

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """See ``Generator``."""
        least = args.max_length if args.min_length is None else args.min_length
        return cls(min_length=least, max_length=args.max_length, symbols=args.symbols)

    def tokenizer(self) -> TiktokenTokenizer:
        """The symbols, numbers with a blank before them, and two more for the beginning and the middle."""
        symbols = (_BEGIN, _SEPARATOR, *(f" {number}" for number in range(self.symbols)))
        return symbol_tokenizer("copying", symbols, r"\[BOS\]| \[SEP\]| [0-9]+")

    def make(self, random: Random) -> MadeDocument:
        """See ``Generator``."""
        length = integer(random, self.min_length, self.max_length)
        string = "".join(f" {integer(random, 0, self.symbols - 1)}" for _ in range(length))
        counts = np.zeros(2 + 2 * length, np.uint8)
        counts[2 + length :] = 1
        return MadeDocument(text=f"{_BEGIN}{string}{_SEPARATOR}{string}", counts=counts)
