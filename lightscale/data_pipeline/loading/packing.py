"""Windows that leave documents whole: ``[data] packing = "whole"``.

A document is cut only where it is longer than a window of n tokens: into as many full windows as it has, and a
rest, which restarts positions and states like a document of its own. Documents and rests are put together so that
little padding is needed:

- **Groups.** The documents that begin in the tokens g S … (g + 1) S - 1 of the source, S = 64 n, are group g. They
  are packed for themselves, so that a group's windows follow from its documents alone.
- **In a group**, what is longer than n / 16 is packed best-fit decreasing: the longest first, each into the window
  with the least room that still holds it, or a new one. The rest fills the room that is left, in the order of the
  text; that takes time by the window, not by the document, and wastes less than n / 16 a window.

**How a window is found.** The index holds, for every group, the number of windows in the groups before: window w is
in the last group with at most w, found by bisection; the group's document ends are read (a range of ``doc_ends``)
and packed again, which is the work of a moment and is kept for the last few groups. So the index takes 8 bytes for
64 windows' tokens: for 300B tokens 18.3 MB at n = 2,048, 4.6 MB at 8,192, 0.3 MB at 131,072, whatever the number of
documents. It is made by packing every group once and kept in a file, so that a resumed run reads it.
"""

import bisect
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.loading.windows import PADDING, Pieces
from lightscale.data_pipeline.store.token_store import TokenSource
from lightscale.data_pipeline.whole_files import write_array

INDEX_DIR = "packing"
"""In a run's directory: the indices of its windows."""

GROUP_WINDOWS = 64
SMALL_SHARE = 16
PACKING_VERSION = 1
"""Of the algorithm: part of fingerprints and of the names of index files."""
_KEPT_GROUPS = 64
_BLOCK_DOCUMENTS = 2**20


class PackedGroup(NamedTuple):
    """What the windows of a group hold."""

    window_starts: NDArray[np.int64]
    """(windows + 1,): the number of each window's first piece; at the end, the number of pieces."""
    documents: NDArray[np.int64]
    """(pieces,): which document of the group a piece is from."""
    offsets: NDArray[np.int64]
    """(pieces,): where in its document it begins."""
    lengths: NDArray[np.int64]
    """(pieces,) tokens."""

    @property
    def num_windows(self) -> int:
        """Windows of the group."""
        return len(self.window_starts) - 1


def pack_group(lengths: NDArray[np.int64], capacity: int) -> PackedGroup:
    """Pack documents of (m,) ``lengths`` ≥ 1 tokens into windows of ``capacity`` tokens; see the module's text.

    First come the full windows of the long documents, in the order of the text, then the others as they were opened.
    In a window, pieces are in the order of the text.
    """
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
    return PackedGroup(
        window_starts=np.concatenate([np.arange(len(full_documents)), len(full_documents) + packed_starts]),
        documents=np.concatenate([full_documents, rested[order]]),
        offsets=np.concatenate([full_offsets, (lengths - rests)[rested[order]]]),
        lengths=np.concatenate([np.full(len(full_documents), capacity), sizes[order]]),
    )


def _best_fit(sizes: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """(m,): the window of each piece of (m,) ``sizes`` from 1 to ``capacity`` - 1."""
    windows = np.empty(len(sizes), dtype=np.int64)
    is_small = sizes * SMALL_SHARE <= capacity
    large, small = np.flatnonzero(~is_small), np.flatnonzero(is_small)
    large = large[np.argsort(-sizes[large], kind="stable")]
    # tokens left · 2^32 + window, ascending: the first that has enough left fits best, the older one of two equals.
    room: list[int] = []
    num_windows = 0
    chosen = []
    for size in sizes[large].tolist():
        place = bisect.bisect_left(room, size << 32)
        if place < len(room):
            left = room.pop(place)
        else:
            left = (capacity << 32) + num_windows
            num_windows += 1
        chosen.append(left & 0xFFFF_FFFF)
        bisect.insort(room, left - (size << 32))
    windows[large] = chosen
    left_in = [left >> 32 for left in sorted(room, key=lambda left: left & 0xFFFF_FFFF)]
    _fill_up(windows, small, np.cumsum(sizes[small]), left_in, capacity)
    return windows


def _fill_up(
    windows: NDArray[np.int64], small: NDArray[np.int64], ends: NDArray[np.int64], left_in: list[int], capacity: int
) -> None:
    """Put the pieces ``small``, which end at ``ends`` when laid one after another, into what is left in the windows."""
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

    is_stretch: ClassVar[bool] = False

    def __init__(self, source: TokenSource, sequence_length: int, *, index_dir: Path | None = None) -> None:
        """``index_dir``: where the index is read from or, once made, kept; none: it is made anew every time."""
        self.source = source
        self.sequence_length = sequence_length
        self._group_tokens = GROUP_WINDOWS * sequence_length
        num_groups = -(-source.num_tokens // self._group_tokens)
        path = index_dir / self._index_name() if index_dir else None
        index = _load_index(path, num_groups) if path else None
        if index is None:
            index = self._make_index(num_groups)
            if path:
                write_array(path, index)  # by every rank that had to make it, all the same: the last rename wins
        self._first_window = index
        """(groups + 1,): the windows of all groups before each."""
        self.num_windows = int(self._first_window[-1])
        # The cache belongs to the object: one on the method would keep every source alive.
        cache = functools.lru_cache(maxsize=_KEPT_GROUPS)
        self._packed: Callable[[int], tuple[NDArray[np.int64], PackedGroup]] = cache(self._pack)

    def pieces(self, window: int, first: int, last: int) -> Pieces:
        """See ``Windows``."""
        group = int(self._first_window.searchsorted(window, side="right")) - 1
        starts, packed = self._packed(group)
        number = window - int(self._first_window[group])
        here = slice(packed.window_starts[number], packed.window_starts[number + 1])
        lengths = packed.lengths[here]
        ends = np.cumsum(lengths)
        slots, tokens = ends - lengths, starts[packed.documents[here]] + packed.offsets[here]
        if ends[-1] < self.sequence_length:
            slots, tokens = np.append(slots, ends[-1]), np.append(tokens, PADDING)
        wanted = slice(int(slots.searchsorted(first, side="right")) - 1, int(slots.searchsorted(last)))
        return Pieces(slots[wanted], tokens[wanted])

    def description(self) -> str:
        """See ``Windows``."""
        padding = 1 - self.source.num_tokens / (self.num_windows * self.sequence_length)
        return f"{self.num_windows:,} sequences of {self.sequence_length:,} tokens, {padding:.2%} of them padding"

    def _pack(self, group: int) -> tuple[NDArray[np.int64], PackedGroup]:
        """(starts of the group's documents, how they are packed)."""
        first, last = (self._first_document(edge) for edge in (group, group + 1))
        ends = self.source.document_ends(first, last)
        starts = np.concatenate([self.source.document_ends(first - 1, first) if first else [0], ends[:-1]])
        return starts, pack_group(ends - starts, self.sequence_length)

    def _first_document(self, group: int) -> int:
        """The first document that begins at or after the group's first token."""
        token = group * self._group_tokens
        if token >= self.source.num_tokens:
            return self.source.num_documents
        # The document that holds the token before it begins earlier, and the next one does not.
        return self.source.document_at(token - 1) + 1 if token else 0

    def _make_index(self, num_groups: int) -> NDArray[np.int64]:
        counts = np.zeros(num_groups + 1, dtype=np.int64)
        for group, lengths in self._groups():
            counts[group + 1] = pack_group(lengths, self.sequence_length).num_windows
        return np.cumsum(counts)

    def _groups(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(group, lengths of its documents) of all groups that have some; reads the document ends in large blocks."""
        waiting = np.empty(0, dtype=np.int64)  # ends of the documents of a group that may go on in the next block
        start = 0
        for first in range(0, self.source.num_documents, _BLOCK_DOCUMENTS):
            last = min(first + _BLOCK_DOCUMENTS, self.source.num_documents)
            ends = np.concatenate([waiting, self.source.document_ends(first, last)])
            starts = np.concatenate([[start], ends[:-1]])
            groups = starts // self._group_tokens
            goes_on = last < self.source.num_documents
            edges = np.flatnonzero(np.diff(groups, prepend=-1, append=groups[-1] if goes_on else -1))
            for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                yield int(groups[begin]), ends[begin:end] - starts[begin:end]
            if goes_on:
                waiting, start = ends[edges[-1] :], int(starts[edges[-1]])

    def _index_name(self) -> str:
        return f"{self.source.name}-{self.source.content_hash}-{self.sequence_length}-{PACKING_VERSION}.npy"


def _load_index(path: Path, num_groups: int) -> NDArray[np.int64] | None:
    """The index in ``path``; None if there is none that can be used: it is then made anew."""
    try:
        index: NDArray[np.int64] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return index if index.shape == (num_groups + 1,) and index.dtype == np.int64 else None
