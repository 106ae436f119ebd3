"""Extents of the kernels of relations, and the division of pairs among launches."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

BLOCK_D = 32
"""Channels of a program that sums pairs."""

UNROLL = 2
"""Tokens whose data is loaded together."""

BLOCK = 32
"""Tokens per side in a tile of a program that sums pairs."""

PRODUCT_BLOCK, PRODUCT_BLOCK_D = 64, 32
"""Tokens of either side, and channels of a step, of the product for the norm's statistics."""

SHARE_BLOCK_Q, SHARE_BLOCK_K, SHARE_BLOCK_D = 16, 32, 4
"""Queries, keys, and channels of a step, for the sum of pairs over channels."""

CENTER_BLOCK_T, MOST_CENTER_BLOCK_D = 8, 64
"""Tokens, and channels of a step, for the centering of tokens."""

BAND_PAIRS = 2**23
"""Most pairs of a launch, whose statistics are kept: 32 MiB for each of two numbers, for any length."""


class Band(NamedTuple):
    """The queries and keys that a launch computes."""

    query_0: int
    num_queries: int
    key_0: int
    num_keys: int


def bands(first: Tensor, end: Tensor) -> Iterator[Band]:
    """Bands that hold all pairs of ranges (B, T) on the host, each tile once.

    A band has neighbouring queries and about as many keys, or all their keys where these are few.
    """
    rows, num_queries = first.shape
    if not first.numel():
        return
    pairs = max(PRODUCT_BLOCK**2, BAND_PAIRS // rows)
    read = first < end
    low, high = first.where(read, end.max()).amin(0), end.where(read, 0).amax(0)
    size = PRODUCT_BLOCK
    while size * size * 4 <= pairs:
        size *= 2
    for query_0 in range(0, num_queries, size):
        queries = slice(query_0, min(query_0 + size, num_queries))
        begin, stop = int(low[queries].min()), int(high[queries].max())
        of_queries = queries.stop - query_0
        at_once = max(PRODUCT_BLOCK, pairs // of_queries // PRODUCT_BLOCK * PRODUCT_BLOCK)
        for key_0 in range(begin, stop, at_once):
            yield Band(query_0, of_queries, key_0, min(at_once, stop - key_0))
