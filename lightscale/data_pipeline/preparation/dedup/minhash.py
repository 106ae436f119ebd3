"""MinHash signatures of token ids, and the keys of their bands.

A document is the set of its 5-grams of token ids. A signature keeps, for each of 112 hash functions, the lowest
value over the set; two signatures agree in one value with probability J, the Jaccard similarity of the two sets
(Broder 1997). They are cut into 14 bands of 8; two documents with one equal band or more are candidates, which
happens with probability 1 - (1 - J^8)^14 (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4). Token
ids need no word boundaries, so Chinese and code are treated like English.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.splitmix import mixed

SHINGLE_TOKENS = 5
NUM_BANDS = 14
ROWS_PER_BAND = 8
NUM_HASHES = NUM_BANDS * ROWS_PER_BAND

# Fills up documents of fewer than 5 tokens; no vocabulary has this id.
_PADDING = np.uint32(2**32 - 1)
# So many tokens, or shingles of a long document, are worked on at a time: few enough for the processor's second cache,
# enough that the calls themselves cost nothing. Bounds the memory for any number of documents.
_SHINGLES_AT_ONCE = 2**16
_SEED = 0x6C69676874  # part of what signatures are: another seed gives other signatures


def signatures(token_ids: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """MinHash signatures of documents, (docs, 112).

    ``token_ids``: one (n,) array a document, without end-of-text tokens. A document of fewer than 5 tokens, an
    empty one too, is one shingle: its tokens filled up with a value that no token has. So it agrees with exactly
    its equals. Depends on nothing but the ids; beside the result, the memory is bounded by the longest document.
    """
    result = np.empty((len(token_ids), NUM_HASHES), dtype=np.uint32)
    for start, stop in _batches(token_ids):
        result[start:stop] = _minima(*_shingles(token_ids[start:stop]))
    return result


def band_keys(signatures: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """(docs, 14): one 64-bit key for every band of (docs, 112) ``signatures``.

    Keys are equal if the 8 values of the same band are equal; other keys collide with probability 2^-64. Different
    bands do not share keys. Keys are spread evenly over 0 ... 2^64 - 1, so ranges of keys are equal shares of the work.
    """
    rows = signatures.astype(np.uint64).reshape(len(signatures), NUM_BANDS, ROWS_PER_BAND)
    keys = np.broadcast_to(mixed(np.arange(1, NUM_BANDS + 1, dtype=np.uint64)), rows.shape[:2]).copy()
    for row in range(ROWS_PER_BAND):
        keys = mixed(keys ^ rows[:, :, row])
    return keys


def _batches(token_ids: Sequence[NDArray[np.uint32]]) -> Iterator[tuple[int, int]]:
    start, num_tokens = 0, 0
    for index, ids in enumerate(token_ids):
        if num_tokens and num_tokens + len(ids) > _SHINGLES_AT_ONCE:
            yield start, index
            start, num_tokens = index, 0
        num_tokens += len(ids)
    if start < len(token_ids):
        yield start, len(token_ids)


def _shingles(token_ids: Sequence[NDArray[np.uint32]]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Hashes of all documents' shingles, one after the other, and (docs,) where each document's begin."""
    padding = [np.full(max(SHINGLE_TOKENS - len(ids), 0), _PADDING) for ids in token_ids]
    tokens = np.concatenate([part for pair in zip(token_ids, padding, strict=True) for part in pair])
    lengths = np.array([max(len(ids), SHINGLE_TOKENS) for ids in token_ids])
    num_windows = len(tokens) - SHINGLE_TOKENS + 1
    # One polynomial over all documents at once; the few shingles that reach over a boundary are removed after.
    hashes = np.full(num_windows, _SEED, dtype=np.uint64)
    for offset in range(SHINGLE_TOKENS):
        hashes *= _MULTIPLIER
        hashes += tokens[offset : offset + num_windows]
    # The windows that begin in a document's last 4 tokens reach into the next one.
    ends = np.cumsum(lengths)
    within = np.ones(num_windows, dtype=bool)
    for offset in range(1, SHINGLE_TOKENS):
        within[ends[:-1] - offset] = False
    counts = lengths - SHINGLE_TOKENS + 1
    return (mixed(hashes[within]) >> np.uint64(32)).astype(np.uint32), np.cumsum(counts) - counts


def _minima(hashes: NDArray[np.uint32], starts: NDArray[np.int64]) -> NDArray[np.uint32]:
    """(docs, 112): the lowest value of each function a·h + b (mod 2^32) over each document's ``hashes``.

    a is odd, so each function permutes the 2^32 values.
    """
    result = np.full((len(starts), NUM_HASHES), 2**32 - 1, dtype=np.uint32)
    buffer = np.empty(_SHINGLES_AT_ONCE, dtype=np.uint32)
    for begin in range(0, len(hashes), _SHINGLES_AT_ONCE):
        some = hashes[begin : begin + _SHINGLES_AT_ONCE]
        values = buffer[: len(some)]
        # The documents with shingles here; the first may have begun before and the last may end after.
        first = int(np.searchsorted(starts, begin, side="right")) - 1
        last = int(np.searchsorted(starts, begin + len(some), side="left"))
        cuts = np.maximum(starts[first:last] - begin, 0)
        minima = np.empty((NUM_HASHES, last - first), dtype=np.uint32)
        for index in range(NUM_HASHES):
            np.multiply(some, _FACTORS[index], out=values)
            np.add(values, _OFFSETS[index], out=values)
            np.minimum.reduceat(values, cuts, out=minima[index])
        np.minimum(result[first:last], minima.T, out=result[first:last])
    return result


_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def _constants() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Factors (odd) and offsets of the 112 functions: SplitMix64 of their number, the same for ever."""
    counters = np.arange(1, 2 * NUM_HASHES + 1, dtype=np.uint64) * _MULTIPLIER + np.uint64(_SEED)
    values = (mixed(counters) >> np.uint64(32)).astype(np.uint32)
    return values[:NUM_HASHES] | np.uint32(1), values[NUM_HASHES:]


_FACTORS, _OFFSETS = _constants()
