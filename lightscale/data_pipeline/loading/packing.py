"""Windows that leave documents whole: ``[data] packing = "whole"``.

Only documents longer than a window of n tokens are cut: into full windows and a rest, which restarts positions and
states like a separate document. Documents and rests are combined so that little padding is needed:

- **Regions.** The documents that begin in the tokens r S … (r + 1) S - 1 of the source, S = 64 n, are region r. Each
  region is packed separately, so that its windows follow from its documents alone. Finding a window does not pack the
  windows before it.
- **In a region**, pieces longer than n / 16 are packed best-fit decreasing: the longest first, each into the window
  with the least room that still holds it, or a new one. Shorter pieces fill the remaining room in the order of the
  text. That takes time per window, not per document, and wastes less than n / 16 tokens per window.

- **Pairs.** Two documents that belong together (``TokenSource.holds_pairs``) are packed as one, and never cut.

**Index.** For every region it holds the number of windows in the regions before. Bisection finds the region of window
w. The loader then reads the region's document ends (a range of ``doc_ends``) and packs the region again; it caches the
last few regions. The index takes 8 bytes per region: for 300B tokens 18.3 MB at n = 2,048, 4.6 MB at 8,192, 0.3 MB at
131,072, for any number of documents. It is made by packing every region once, and kept in a file for resumed runs.
"""

import bisect
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.loading.windows import PADDING, DocumentRanges
from lightscale.data_pipeline.store.token_store import TokenSource
from lightscale.data_pipeline.whole_files import write_array
from lightscale.errors import UserError

INDEX_DIR = "packing"
"""In a run's directory: the indices of its windows."""

REGION_WINDOWS = 64
SMALL_SHARE = 16
PACKING_VERSION = 1
"""Of the algorithm: part of fingerprints and of the names of index files."""
_CACHED_REGIONS = 64
_DOCUMENTS_AT_ONCE = 2**20


class PackedRegion(NamedTuple):
    """The content of the windows of a region."""

    window_starts: NDArray[np.int64]
    """(windows + 1,): index of each window's first document range; at the end, the number of ranges."""
    documents: NDArray[np.int64]
    """(ranges,): which document of the region a range is from."""
    offsets: NDArray[np.int64]
    """(ranges,): where in its document it begins."""
    lengths: NDArray[np.int64]
    """(ranges,) tokens."""

    @property
    def num_windows(self) -> int:
        """Windows of the region."""
        return len(self.window_starts) - 1


def pack_region(lengths: NDArray[np.int64], capacity: int) -> PackedRegion:
    """Pack documents of (m,) ``lengths`` ≥ 1 tokens into windows of ``capacity`` tokens; see the module's text.

    First come the full windows of the long documents, in the order of the text, then the others as they were opened.
    In a window, ranges are in the order of the text.
    """
    # Everything by arrays but the best fit itself: a resumed run packs a region before its first step.
    num_full, rests = np.divmod(lengths, capacity)
    rested = np.flatnonzero(rests)
    sizes = rests[rested]
    windows = _best_fit(sizes, capacity)
    order = np.argsort(windows, kind="stable")
    full_documents = np.repeat(np.arange(len(lengths)), num_full)
    before = np.cumsum(num_full) - num_full
    full_offsets = (np.arange(len(full_documents)) - np.repeat(before, num_full)) * capacity
    num_packed = int(windows.max()) + 1 if len(windows) else 0
    packed_starts = np.searchsorted(windows[order], np.arange(num_packed + 1))
    return PackedRegion(
        window_starts=np.concatenate([np.arange(len(full_documents)), len(full_documents) + packed_starts]),
        documents=np.concatenate([full_documents, rested[order]]),
        offsets=np.concatenate([full_offsets, (lengths - rests)[rested[order]]]),
        lengths=np.concatenate([np.full(len(full_documents), capacity), sizes[order]]),
    )


def _best_fit(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """(m,): the window of each range of (m,) ``sizes`` from 1 to ``capacity`` - 1."""
    windows = np.empty(len(sizes), dtype=np.int64)
    is_small = sizes * SMALL_SHARE <= capacity
    large, small = np.flatnonzero(~is_small), np.flatnonzero(is_small)
    large = large[np.argsort(-sizes[large], kind="stable")]
    # tokens left · 2^32 + window, ascending: one bisection finds the window that fits best, and of two with as much
    # left the older one. One sorted list of integers, because packing spends its time in this loop.
    room: list[int] = []
    num_windows = 0
    chosen = []
    # Longest first: a long range finds room only while windows are empty enough, a short one later too.
    for size in sizes[large].tolist():
        best = bisect.bisect_left(room, size << 32)
        if best < len(room):
            left = room.pop(best)
        else:
            left = (capacity << 32) + num_windows
            num_windows += 1
        chosen.append(left & 0xFFFF_FFFF)
        bisect.insort(room, left - (size << 32))
    windows[large] = chosen
    # Small ranges are many: by the window and not by the range, they take one search each window.
    left_in = [left >> 32 for left in sorted(room, key=lambda left: left & 0xFFFF_FFFF)]
    _fill_up(windows, small, np.cumsum(sizes[small]), left_in, capacity)
    return windows


def _fill_up(
    windows: NDArray[np.int64], small: NDArray[np.int64], ends: NDArray[np.int64], left_in: list[int], capacity: int
) -> None:
    """Put the ranges ``small``, which end at ``ends`` when laid one after another, into what is left in the windows."""
    done, window, laid = 0, 0, 0
    while done < len(small):
        left = left_in[window] if window < len(left_in) else capacity
        upto = int(ends.searchsorted(laid + left, side="right"))
        if upto > done:
            windows[small[done:upto]] = window
            done, laid = upto, int(ends[upto - 1])
        window += 1


class WholeWindows:
    """The windows of a source in which documents are whole."""

    is_contiguous: ClassVar[bool] = False
    is_one_document: ClassVar[bool] = False

    def __init__(self, source: TokenSource, sequence_length: int, *, index_dir: Path | None = None) -> None:
        """``index_dir``: where the index is read from or, once made, kept; none: it is made every time.

        ``UserError`` for a pair longer than a window.
        """
        self.source = source
        # Documents that are packed as one.
        self._together = 2 if source.holds_pairs else 1
        self.sequence_length = sequence_length
        self._region_tokens = REGION_WINDOWS * sequence_length
        num_regions = -(-source.num_tokens // self._region_tokens)
        path = index_dir / self._index_name() if index_dir else None
        index = _load_index(path, num_regions) if path else None
        if index is None:
            index = self._make_index(num_regions)
            if path:
                # Every rank that does not find the file makes it and writes it. That needs no agreement between ranks:
                # all write the same bytes, each under a name of its own, and the last rename wins.
                write_array(path, index)
        self._first_window = index
        """(regions + 1,): the windows of all regions before each."""
        self.num_windows = int(self._first_window[-1])
        # The cache belongs to the object: one on the method would keep every source alive.
        # Several regions, because shuffled samples jump between them: each would be packed again for every window.
        cache = functools.lru_cache(maxsize=_CACHED_REGIONS)
        self._packed: Callable[[int], tuple[NDArray[np.int64], NDArray[np.int64], PackedRegion]] = cache(self._pack)

    def document_ranges(self, window: int, first: int, last: int) -> DocumentRanges:
        """See ``Windows``."""
        region = int(self._first_window.searchsorted(window, side="right")) - 1
        starts, firsts, packed = self._packed(region)
        number = window - int(self._first_window[region])
        here = slice(packed.window_starts[number], packed.window_starts[number + 1])
        lengths, documents = packed.lengths[here], packed.documents[here]
        ends = np.cumsum(lengths)
        slots, tokens = ends - lengths, starts[documents] + packed.offsets[here]
        if self._together > 1:
            # The second document of each pair begins where the first ends.
            between = firsts[documents] - starts[documents]
            slots = np.stack([slots, slots + between], axis=1).ravel()
            tokens = np.stack([tokens, tokens + between], axis=1).ravel()
        # Padding is a range too, so that what reads a window needs no case for it.
        if ends[-1] < self.sequence_length:
            slots, tokens = np.append(slots, ends[-1]), np.append(tokens, PADDING)
        wanted = slice(int(slots.searchsorted(first, side="right")) - 1, int(slots.searchsorted(last)))
        return DocumentRanges(slots[wanted], tokens[wanted])

    def description(self) -> str:
        """See ``Windows``."""
        padding = 1 - self.source.num_tokens / (self.num_windows * self.sequence_length)
        return f"{self.num_windows:,} sequences of {self.sequence_length:,} tokens, {padding:.2%} of them padding"

    def _pack(self, region: int) -> tuple[NDArray[np.int64], NDArray[np.int64], PackedRegion]:
        """(starts of the region's documents, or of its pairs; ends of these, of pairs of the first; how they are
        packed)."""
        first, last = (self._first_document(edge) for edge in (region, region + 1))
        ends = self.source.document_ends(first, last)
        starts = np.concatenate([self.source.document_ends(first - 1, first) if first else [0], ends[:-1]])
        step = self._together
        starts, firsts, ends = starts[::step], ends[::step], ends[step - 1 :: step]
        return starts, firsts, pack_region(ends - starts, self.sequence_length)

    def _first_document(self, region: int) -> int:
        """The first document that begins at or after the region's first token."""
        token = region * self._region_tokens
        if token >= self.source.num_tokens:
            return self.source.num_documents
        # The document that holds the token before it begins earlier, and the next one does not.
        found = self.source.document_at(token - 1) + 1 if token else 0
        return -(-found // self._together) * self._together

    def _make_index(self, num_regions: int) -> NDArray[np.int64]:
        counts = np.zeros(num_regions + 1, dtype=np.int64)
        for region, lengths in self._regions():
            if self._together > 1 and (fault := self.source.pair_fault(int(lengths.max()), self.sequence_length)):
                raise UserError(f"source {self.source.name}: {fault}")
            counts[region + 1] = pack_region(lengths, self.sequence_length).num_windows
        return np.cumsum(counts)

    def _regions(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(region, lengths of its documents) of all regions that have some; reads many document ends at once."""
        waiting = np.empty(0, dtype=np.int64)  # ends of the documents of a region that may continue in the next read
        start = 0
        for first in range(0, self.source.num_documents, _DOCUMENTS_AT_ONCE):
            last = min(first + _DOCUMENTS_AT_ONCE, self.source.num_documents)
            own = self.source.document_ends(first, last)[self._together - 1 :: self._together]
            ends = np.concatenate([waiting, own])
            starts = np.concatenate([[start], ends[:-1]])
            regions = starts // self._region_tokens
            goes_on = last < self.source.num_documents
            edges = np.flatnonzero(np.diff(regions, prepend=-1, append=regions[-1] if goes_on else -1))
            for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                yield int(regions[begin]), ends[begin:end] - starts[begin:end]
            if goes_on:
                waiting, start = ends[edges[-1] :], int(starts[edges[-1]])

    def _index_name(self) -> str:
        name = self.source.name.replace("/", "+")  # of several stores
        return f"{name}-{self.source.content_hash}-{self.sequence_length}-{PACKING_VERSION}.npy"


def _load_index(path: Path, num_regions: int) -> NDArray[np.int64] | None:
    """The index in ``path``; None if there is none that can be used: it is then made again."""
    try:
        index: NDArray[np.int64] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return index if index.shape == (num_regions + 1,) and index.dtype == np.int64 else None
