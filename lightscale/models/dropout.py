"""Dropout whose draws are a function of what they are drawn for: the same on every layout, device and repetition.

Each number is kept by 32 bits of a hash of (seed and name, row, token, column): of an integer hash with two rounds of
multiplication and shifts ("lowbias32", Wellons 2018), which has next to no bias in any bit.
"""

import zlib

import torch
from torch import Tensor

_MASK = 0xFFFF_FFFF
_NUMBERS_AT_ONCE = 1 << 24
"""Hashed together: 128 MiB each time that they are written."""


def hash32(values: Tensor) -> Tensor:
    """A permutation of int64 ``values`` in 0 … 2^32 - 1 whose every output bit depends on every input bit."""
    values = values ^ (values >> 16)
    values = (values * 0x7FEB_352D) & _MASK
    values = values ^ (values >> 15)
    values = (values * 0x846C_A68B) & _MASK
    return values ^ (values >> 16)


class Dropout:
    """Dropout of the input of the map ``name``: of the share ``p`` of its numbers, in training."""

    def __init__(self, p: float, *, seed: int, name: str) -> None:
        self.p = p
        self._key = zlib.crc32(f"{seed} {name}".encode())

    def __call__(self, x: Tensor, places: Tensor, first_token: int, first_column: int) -> Tensor:
        """(n, b, columns): 0 or x / (1 - p) of ``x``, tokens and columns of whole rows from the first ones on.

        places: (b,) int64, what tells each row from all others.
        """
        # The scalar is exact: of a factor rounded to bf16 the mean would be off, by up to 0.4 %, always to one side.
        return torch.where(self.kept(x, places, first_token, first_column), x * (1 / (1 - self.p)), 0)

    def kept(self, x: Tensor, places: Tensor, first_token: int, first_column: int) -> Tensor:
        """(n, b, columns) bool."""
        n, _, columns = x.shape
        tokens = torch.arange(first_token, first_token + n, device=x.device)
        own = torch.arange(first_column, first_column + columns, device=x.device)
        rows = hash32((places >> 32 & _MASK) ^ self._key)
        rows = hash32(rows ^ (places & _MASK))
        of_tokens = hash32(rows[None, :] ^ hash32(tokens)[:, None])
        # Another constant than that of tokens: (token, column) and (column, token) differ.
        of_columns = hash32(own ^ 0x9E37_79B9)
        least = round(self.p * 2**32)
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        # A hash takes 8 bytes a number, and more than one of them while it is computed.
        at_once = max(1, _NUMBERS_AT_ONCE // (places.numel() * columns))
        for some, out in zip(of_tokens.split(at_once), kept.split(at_once), strict=True):
            torch.ge(hash32(some[:, :, None] ^ of_columns), least, out=out)
        return kept
