"""ListOps: nested operations on lists of digits, whose result, a digit, is the class of the document.

    [MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]   is 5

(Nangia and Bowman 2018, arXiv 1804.06028; in the long form of Tay et al. 2020, arXiv 2011.04006, section 3.1.) MAX and
MIN are the largest and the smallest, MED the median, rounded down where it is between two digits, and SM the sum modulo
10. Brackets are tokens like all else, so that the nesting is in the text.

An argument is an operation with ``OPERATION_SHARE``, as long as it is not ``max_depth`` deep, otherwise a digit; the
root is an operation. An expression outside the length limits is drawn again.
"""

import argparse
from dataclasses import dataclass
from random import Random
from typing import Any

from lightscale.data_pipeline.generators.interface import (
    Generator,
    MadeDocument,
    integer,
    require_range,
)
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.data_pipeline.tokenizers.symbols import symbol_tokenizer
from lightscale.errors import UserError

OPERATION_SHARE = 0.25
_OPERATORS = ("[MAX", "[MIN", "[MED", "[SM")
_SYMBOLS = (*_OPERATORS, *(f" {symbol}" for symbol in (*_OPERATORS, "]", *"0123456789")))
# A blank belongs to the symbol behind it; nothing stands before the first.
_PATTERN = r" ?\[(?:MAX|MIN|MED|SM)| \]| [0-9]"
_MOST_TRIES = 20_000
_MOST_DEPTH, _MOST_ARGUMENTS, _MOST_TOKENS = 100, 1000, 2**20


class _TooLong(Exception):
    """More symbols than wanted."""


@dataclass(frozen=True, kw_only=True)
class ListOps(Generator):
    """Expressions of ``min_tokens`` to ``max_tokens`` symbols."""

    max_depth: int = 10
    """Operations inside of one another."""
    max_arguments: int = 10
    """Of an operation, which has 2 or more."""
    min_tokens: int = 500
    max_tokens: int = 2000

    help = "generate ListOps: nested operations on digits, classified by their result"
    classes = tuple("0123456789")

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("max-depth", self.max_depth, 1, _MOST_DEPTH),
            ("max-arguments", self.max_arguments, 2, _MOST_ARGUMENTS),
            ("min-tokens", self.min_tokens, 4, _MOST_TOKENS),
            ("max-tokens", self.max_tokens, 4, _MOST_TOKENS),
        ):
            require_range(name, value, least, most)
        if self.min_tokens > self.max_tokens:
            raise UserError(f"--min-tokens {self.min_tokens}: above --max-tokens {self.max_tokens}")
        longest = 1
        for _ in range(self.max_depth):
            longest = min(2 + self.max_arguments * longest, _MOST_TOKENS)
        if longest < self.min_tokens:
            raise UserError(
                f"--min-tokens {self.min_tokens}: --max-depth {self.max_depth} and --max-arguments "
                f"{self.max_arguments} give at most {longest} symbols; use a smaller minimum, or more depth or "
                f"arguments"
            )

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """See ``Generator``."""
        add = parser.add_argument
        add("--max-depth", type=int, default=10, metavar="N", help="maximum nesting depth of operations (default: 10)")
        add("--max-arguments", type=int, default=10, metavar="N",
            help="maximum arguments of an operation, at least 2 (default: 10)")  # fmt: skip
        add("--min-tokens", type=int, default=500, metavar="N", help="symbols of a document (default: 500)")
        add("--max-tokens", type=int, default=2000, metavar="N", help="symbols of a document (default: 2000)")

    def tokenizer(self) -> TiktokenTokenizer:
        """19 symbols: the operators with a blank before them and without, the bracket and the digits."""
        return symbol_tokenizer("listops", _SYMBOLS, _PATTERN)

    def settings(self) -> dict[str, Any]:
        """See ``Generator``."""
        return super().settings() | {"operation_share": OPERATION_SHARE}

    def make(self, random: Random) -> MadeDocument:
        """See ``Generator``. ``UserError`` where hardly any expression has a length that is wanted."""
        for _ in range(_MOST_TRIES):
            symbols: list[str] = []
            try:
                label = self._operation(random, symbols, depth=1)
            except _TooLong:
                continue
            if len(symbols) >= self.min_tokens:
                return MadeDocument(text=" ".join(symbols), label=label)
        raise UserError(
            f"--min-tokens {self.min_tokens}, --max-tokens {self.max_tokens}: none of {_MOST_TRIES:,} expressions of "
            f"--max-depth {self.max_depth} and --max-arguments {self.max_arguments} fits; use a wider range or "
            f"another depth"
        )

    def _operation(self, random: Random, symbols: list[str], *, depth: int) -> int:
        """Append an operation to ``symbols``; its value."""
        operator = _OPERATORS[integer(random, 0, len(_OPERATORS) - 1)]
        symbols.append(operator)
        values = []
        for _ in range(integer(random, 2, self.max_arguments)):
            if depth < self.max_depth and random.random() < OPERATION_SHARE:
                values.append(self._operation(random, symbols, depth=depth + 1))
            else:
                values.append(integer(random, 0, 9))
                symbols.append(str(values[-1]))
            # At least the brackets that are open must follow.
            if len(symbols) + depth > self.max_tokens:
                raise _TooLong
        symbols.append("]")
        return _value(operator, values)


def _value(operator: str, values: list[int]) -> int:
    match operator:
        case "[MAX":
            return max(values)
        case "[MIN":
            return min(values)
        case "[MED":
            middle, ordered = len(values) // 2, sorted(values)
            return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
        case _:
            return sum(values) % 10
