"""Multi-query associative recall: pairs of a key and a value, and all keys again in another order, each with its value.

    [BOS] k3 v17 k9 v5 k0 v8 [SEP] k9 v5 k3 v17 k0 v8   and the end-of-text token

(Arora et al. 2023, arXiv 2312.04927, section 4.) Only the values behind [SEP] count as labels. The number of pairs is
the load of a state: a model of constant memory must keep all of them. Keys of a document differ; a value can come
twice. Queries follow one another without other tokens between them, where the paper leaves gaps.
"""

import argparse
from dataclasses import dataclass
from random import Random

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

_MOST_SYMBOLS = 10_000
_BEGIN, _SEPARATOR = "[BOS]", " [SEP]"


@dataclass(frozen=True, kw_only=True)
class MQAR(Generator):
    """``pairs`` of ``keys`` and ``values``."""

    pairs: int = 16
    keys: int = 64
    values: int = 64

    help = "generate associative recall (MQAR): pairs of keys and values; the loss counts the values of repeated keys"
    has_loss_mask = True

    def __post_init__(self) -> None:
        for name, value in (("pairs", self.pairs), ("keys", self.keys), ("values", self.values)):
            require_range(name, value, 1, _MOST_SYMBOLS)
        if self.pairs > self.keys:
            raise UserError(
                f"--pairs {self.pairs}: above --keys {self.keys}, of which each document has different ones"
            )

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """See ``Generator``."""
        add = parser.add_argument
        add("--pairs", type=int, default=16, metavar="N", help="pairs of a document (default: 16)")
        add("--keys", type=int, default=64, metavar="N", help="number of different keys (default: 64)")
        add("--values", type=int, default=64, metavar="N", help="number of different values (default: 64)")

    def tokenizer(self) -> TiktokenTokenizer:
        """Keys and values, with a blank before them, and two more for the beginning and the middle."""
        symbols = [
            f" {kind}{number}" for kind, most in (("k", self.keys), ("v", self.values)) for number in range(most)
        ]
        return symbol_tokenizer("mqar", (_BEGIN, _SEPARATOR, *symbols), r"\[BOS\]| \[SEP\]| [kv][0-9]+")

    def make(self, random: Random) -> MadeDocument:
        """See ``Generator``."""
        keys = _some(random, self.keys, self.pairs)
        pairs = [f" k{key} v{integer(random, 0, self.values - 1)}" for key in keys]
        asked = [pairs[number] for number in _some(random, self.pairs, self.pairs)]
        counts = np.zeros(2 + 4 * self.pairs, np.uint8)
        counts[2 + 2 * self.pairs + 1 :: 2] = 1
        return MadeDocument(text=f"{_BEGIN}{''.join(pairs)}{_SEPARATOR}{''.join(asked)}", counts=counts)


def _some(random: Random, most: int, count: int) -> list[int]:
    """``count`` different numbers below ``most``, in random order."""
    # Of Python's generator only `random()` gives the same numbers in every version.
    numbers = list(range(most))
    for first in range(count):
        other = integer(random, first, most - 1)
        numbers[first], numbers[other] = numbers[other], numbers[first]
    return numbers[:count]
