"""Windows: the rows that a source is cut into, and how they become the tensors of a batch.

A window has n = ``sequence_length`` slots, one for each input token. It is described by document ranges: consecutive
tokens of one document each, or padding, which belongs to no document. ``concat`` windows are neighbours in the stream
of documents, ``joined`` ones the same without resets between documents. ``whole`` windows (``packing.py``) keep
documents whole. Reading, labels and the segment of a sequence rank are the same for all three.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lightscale.data_pipeline.loading.buffers import Buffers
from lightscale.data_pipeline.loading.images import ImageAt, Images
from lightscale.data_pipeline.loading.targets import PADDING, DocumentRanges, RowDocuments, Targets, WholeRows
from lightscale.data_pipeline.store.token_store import TokenSource
from lightscale.errors import UserError

Shift = Literal[0, 1]
"""Distance in tokens from an input to its label."""


_ON_HOST = ("host_starts", "tokens_after")
"""Fields of a batch that do not move to its device."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The part of a micro-batch that one rank holds; tensors are (b, n / sequence_size) unless said otherwise."""

    tokens: torch.Tensor
    """int32 inputs, int64 behind ``to``; padding is the end-of-text token. Of images (b, n / sequence_size, p) uint8:
    the p bytes of the token's patch."""
    labels: torch.Tensor
    """As the inputs: the token after each input, or the text itself where ``Targets`` hide some of it. Shifted before
    the sequence is cut over ranks, so that no rank needs a token of the next one. After a document's last token that is
    the end-of-text token, with which documents begin."""
    loss_mask: torch.Tensor
    """fp32: 1 where the label counts, 0 in padding and where the mask of the source is 0."""
    start_slots: torch.Tensor
    """(m,) int64 ascending: the slots where document ranges start, over the rows laid one after another; every row
    starts one."""
    start_positions: torch.Tensor
    """(m,) int64: the position there; above 0 where a document range continues that of the sequence rank before."""
    sources: torch.Tensor
    """(b,) int64: which source each row is from, all of its tokens: its number in the loader's mixture."""
    host_starts: tuple[torch.Tensor, torch.Tensor] | None = None
    """``start_slots`` and ``start_positions`` as they were made; None where they have not moved."""
    soft_labels: torch.Tensor | None = None
    """(b, classes) fp32: the distribution that the label of each row's one document stands for; None: the label."""
    conditions: torch.Tensor | None = None
    """(b, 2) int32: timestep and class of each row's one image, whose inputs are noised pixels:
    (b, n / sequence_size, p) fp32. None: images and texts are read as they are."""
    wanted: torch.Tensor | None = None
    """(b, n / sequence_size, p) fp32: what is predicted of noised pixels."""
    label_values: torch.Tensor | None = None
    """fp32: of each label the value of an array of the store, 0 in padding; None: none was asked for."""
    places: torch.Tensor | None = None
    """(b,) int64: tokens of the run's data before each row, in no epoch the same; None: nobody asked for them."""
    tokens_after: torch.Tensor | None = None
    """(b,) int64 on the host: tokens of each row's last document range behind the segment; None where only earlier
    tokens are read."""

    @property
    def document_starts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """``start_slots``, ``start_positions`` and ``tokens_after`` on the host, which need not ask the device."""
        slots, positions = self.host_starts or (self.start_slots, self.start_positions)
        return slots, positions, self.tokens_after

    @property
    def lengths(self) -> None:
        """Sequence ranks hold equal parts."""
        return None

    @property
    def positions(self) -> torch.Tensor:
        """int64: tokens since the document's or, if later, the window's start; 0 exactly where one starts.

        Padding counts as a separate document, so that no state reaches or leaves it. Computed from ``start_slots`` at
        the first access, on their device: these are fewer bytes to move there.
        """
        return self._positions

    @functools.cached_property
    def _positions(self) -> torch.Tensor:
        # A sum of steps instead of a loop over documents, so that a GPU does it in a few kernels. Each step is one, but
        # for the first slot of a range: from the last position of the range before.
        steps = torch.ones(self.labels.numel(), dtype=torch.int64, device=self.start_slots.device)
        last = self.start_positions[:-1] + self.start_slots.diff() - 1
        steps[self.start_slots] = self.start_positions
        steps[self.start_slots[1:]] -= last
        return steps.cumsum(0).view(self.labels.shape)

    def to(self, device: torch.device) -> "Batch":
        """The same on ``device``, where ids become int64: they move, and are read, with half the bytes.

        The host does not wait for the copies to a GPU.
        """
        # Only from pinned memory do they run by themselves.
        batch = self.pinned() if device.type == "cuda" else self
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch._tensors().items()}
        ids = [name for name in ("tokens", "labels") if moved[name].dtype not in (torch.uint8, torch.float32)]
        moved |= {name: moved[name].long() for name in ids}
        return Batch(**moved, host_starts=self.document_starts[:2], tokens_after=self.tokens_after)

    def pinned(self) -> "Batch":
        """The same in pinned memory, from which a GPU copies asynchronously; pinned tensors are not copied."""
        # Contiguous: anything else would be copied once more, from memory that is not pinned.
        pinned = {name: tensor.contiguous().pin_memory() for name, tensor in self._tensors().items()}
        return Batch(**pinned, host_starts=self.host_starts, tokens_after=self.tokens_after)

    def _tensors(self) -> dict[str, torch.Tensor]:
        # Positions are not among them: they are made on the device, of the few numbers that start the ranges.
        moving = ((field.name, getattr(self, field.name)) for field in fields(self) if field.name not in _ON_HOST)
        return {name: tensor for name, tensor in moving if tensor is not None}


class Windows(Protocol):
    """A source cut into windows."""

    is_contiguous: ClassVar[bool]
    """Whether window w is the tokens w n … (w + 1) n of the source, without padding."""
    is_one_document: ClassVar[bool]
    """Whether a batch counts positions through the window, whatever documents begin in it."""
    source: TokenSource
    sequence_length: int
    num_windows: int

    def document_ranges(self, window: int, first: int, last: int) -> DocumentRanges:
        """Those with slots in ``first`` … ``last`` - 1. The first may begin before ``first``."""

    def description(self) -> str:
        """Number of windows and of lost tokens, for a message."""


class ConcatWindows:
    """Neighbouring windows over the stream of documents, document boundaries being ignored.

    Window w has the tokens w n … (w + 1) n - 1 as inputs; one token more is its last label. The rest at the end of a
    source, less than a window, is never read. A window is found by arithmetic; there is no index.
    """

    is_contiguous: ClassVar[bool] = True
    is_one_document: ClassVar[bool] = False

    def __init__(self, source: TokenSource, sequence_length: int) -> None:
        """``UserError`` for a source shorter than one window."""
        self.source = source
        self.sequence_length = sequence_length
        # One token less: the last window's last label is the token behind its inputs.
        self.num_windows = (source.num_tokens - 1) // sequence_length
        if self.num_windows < 1:
            raise UserError(
                f"source {source.name}: {source.num_tokens} tokens are fewer than the {sequence_length + 1} of one "
                f"sequence (sequence_length {sequence_length} + 1)"
            )

    def document_ranges(self, window: int, first: int, last: int) -> DocumentRanges:
        """See ``Windows``."""
        # Only documents that begin in these slots are looked up, so a sequence rank reads no more than its segment.
        row_start = window * self.sequence_length
        starts = self.source.document_starts(row_start + first, row_start + last)
        if starts[0] < row_start:
            starts[0] = row_start  # of the first document only what is in the window
        return DocumentRanges(starts - row_start, starts)

    def description(self) -> str:
        """See ``Windows``."""
        num_dropped = self.source.num_tokens - 1 - self.num_windows * self.sequence_length
        return (
            f"{self.num_windows:,} sequences of {self.sequence_length:,} tokens, "
            f"{num_dropped:,} tokens at its end skipped"
        )


class JoinedWindows(ConcatWindows):
    """The same windows, in which states and positions run on from document to document.

    One reading of papers that do not mention resetting states. ``document_ranges`` still lists a window's documents.
    """

    is_one_document = True


Row = tuple[Windows, int]
"""(windows, number of the window)."""


class RangeStarts(NamedTuple):
    """Where document ranges start, over rows laid one after another: a batch's ``start_slots``, ``start_positions``."""

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]

    def cut(self, num_slots: int) -> list["RangeStarts"]:
        """Of every ``num_slots`` slots, each as if there were no others; all together whole rows."""
        parts = self.slots // num_slots
        slots = self.slots - parts * num_slots
        edges = np.flatnonzero(np.diff(parts, prepend=-1, append=-1)).tolist()
        return [RangeStarts(slots[begin:end], self.positions[begin:end]) for begin, end in itertools.pairwise(edges)]


def read_batch(
    rows: Sequence[Row],
    first: int,
    last: int,
    *,
    buffers: Buffers,
    shift: Shift = 1,
    padding_id: int = 0,
    range_starts: RangeStarts | None = None,
    source_numbers: Mapping[str, int] | None = None,
    label_array: str | None = None,
) -> Batch:
    """The slots ``first`` … ``last`` - 1 of each of ``rows``, whose windows are all of one kind.

    ``shift``: 1, the label of a token is the next one; 0, itself.

    ``padding_id``: the end-of-text token; ``ConcatWindows`` do not use it. ``range_starts``: an earlier result of
    ``find_range_starts`` for ``rows``. ``source_numbers``: of each source by its name, for ``Batch.sources``; None:
    there is one source. ``label_array``: of values per token of the sources, for ``Batch.label_values``; windows are
    then of whole documents.
    """
    shape = (len(rows), last - first)
    values: NDArray[np.float32] | None = None
    if rows[0][0].is_contiguous:
        slots, positions = range_starts or find_range_starts(rows, first, last)
        # Inputs and labels are one text, shifted, and the whole mask is one value: half the memory to write.
        text = buffers.take(shape[0], shape[1] + shift)
        for out, (windows, window) in zip(text, rows, strict=True):
            windows.source.read_into(window * windows.sequence_length + first, out)
        tokens, labels = torch.from_numpy(text[:, : shape[1]]), torch.from_numpy(text[:, shift:])
        mask = _mask(rows, first + shift, shape)
    else:
        ranges = [windows.document_ranges(window, first, last) for windows, window in rows]
        slots, positions = _range_starts_of(ranges, first, shape[1])
        arrays = buffers.take(*shape), buffers.take(*shape)
        counted = np.zeros(shape, dtype=np.float32)
        # Buffers come with the content of an earlier batch. Padding is a valid id, because embeddings look it up too.
        for array in arrays:
            array.fill(padding_id)
        for row, ((windows, _), one) in enumerate(zip(rows, ranges, strict=True)):
            _read_ranges(windows.source, one, first, arrays[0][row], arrays[1][row], counted[row], shift)
        if label_array is not None:
            values = np.zeros(shape, dtype=np.float32)
            for out, ((windows, _), one) in zip(values, zip(rows, ranges, strict=True), strict=True):
                _read_label_values(windows.source, label_array, one, first, out)
        tokens, labels, mask = (*map(torch.from_numpy, arrays), torch.from_numpy(counted))
    return Batch(
        tokens=tokens,
        labels=labels,
        loss_mask=mask,
        start_slots=torch.from_numpy(slots),
        start_positions=torch.from_numpy(positions),
        sources=torch.tensor([(source_numbers or {}).get(windows.source.name, 0) for windows, _ in rows]),
        label_values=None if values is None else torch.from_numpy(values),
    )


def read_predicted(
    rows: Sequence[Row],
    first: int,
    last: int,
    targets: Targets,
    places: Sequence[int],
    *,
    buffers: Buffers,
    padding_id: int = 0,
    range_starts: RangeStarts | None = None,
    source_numbers: Mapping[str, int] | None = None,
) -> Batch:
    """``read_batch`` with inputs and a mask made by ``targets``; ``places``: of each row, see there."""
    length = rows[0][0].sequence_length
    own = read_batch(
        rows,
        first,
        last,
        shift=0,
        buffers=buffers,
        padding_id=padding_id,
        range_starts=range_starts,
        source_numbers=source_numbers,
    )
    # What is predicted may hang on tokens of other sequence ranks, such as the beginning of a word.
    is_whole = (first, last) == (0, length)
    whole = own if is_whole else read_batch(rows, 0, length, shift=0, buffers=buffers, padding_id=padding_id)

    def documents() -> list[RowDocuments]:
        return [RowDocuments(windows.source, *windows.document_ranges(window, 0, length)) for windows, window in rows]

    whole_rows = WholeRows(whole.tokens.numpy(), whole.loss_mask.numpy(), np.array(places, dtype=np.int64), documents)
    made = targets(whole_rows)
    cut = (torch.from_numpy(np.ascontiguousarray(array[:, first:last])) for array in made)
    inputs, labels, counted = cut
    # Tokens read their whole document: where it ends, other ranks need not be asked.
    after = _tokens_after(whole.start_slots.numpy(), len(rows), length, last)
    return replace(own, tokens=inputs, labels=labels, loss_mask=counted, tokens_after=torch.from_numpy(after))


def read_images(
    rows: Sequence[Row],
    first: int,
    last: int,
    images: Images,
    places: Sequence[int],
    *,
    row_at: Callable[[int], Row] | None = None,
    range_starts: RangeStarts | None = None,
    source_numbers: Mapping[str, int] | None = None,
) -> Batch:
    """The slots ``first`` … ``last`` - 1 of each of ``rows``, which are images; arguments as of ``read_batch``.

    ``places``: of each row, see ``WholeRows``; ``row_at``: that of a sample, for mixed images; None: none are mixed.
    """
    length = rows[0][0].sequence_length
    slots, positions = range_starts or find_range_starts(rows, first, last)

    def image_at(turn: int) -> ImageAt:
        assert row_at is not None, "images are mixed in training"
        windows, number = row_at(turn)
        return ImageAt(windows.source, number)

    turns = [place // length for place in places]
    found = {turn: ImageAt(windows.source, number) for turn, (windows, number) in zip(turns, rows, strict=True)}
    made = images(turns, found, image_at)
    patches, labels, counted = (torch.from_numpy(np.ascontiguousarray(array[:, first:last])) for array in made[:3])
    return Batch(
        tokens=patches,
        labels=labels,
        loss_mask=counted,
        start_slots=torch.from_numpy(slots),
        start_positions=torch.from_numpy(positions),
        sources=torch.tensor([(source_numbers or {}).get(windows.source.name, 0) for windows, _ in rows]),
        soft_labels=None if made.soft_labels is None else torch.from_numpy(made.soft_labels),
        conditions=None if made.conditions is None else torch.from_numpy(made.conditions),
        wanted=None if made.wanted is None else torch.from_numpy(np.ascontiguousarray(made.wanted[:, first:last])),
        tokens_after=torch.full((len(rows),), length - last),
    )


def _tokens_after(start_slots: NDArray[np.int64], rows: int, length: int, last: int) -> NDArray[np.int64]:
    """Of each row, from slot ``last`` on, up to the next of ``start_slots``, those of the whole rows."""
    ends = np.arange(rows) * length + last
    starts = np.append(start_slots, rows * length)
    after: NDArray[np.int64] = starts[np.searchsorted(starts, ends)] - ends
    return after


def find_range_starts(rows: Sequence[Row], first: int, last: int) -> RangeStarts:
    """Where documents begin in the slots ``first`` … ``last`` - 1 of ``rows``, all of them contiguous in their sources.

    The rows of a source are looked up together: many take hardly longer than one.
    """
    found = [_range_starts_in(windows, rows, first, last) for windows in dict.fromkeys(windows for windows, _ in rows)]
    if len(found) == 1:
        return found[0]
    slots, positions = map(np.concatenate, zip(*found, strict=True))
    order = np.argsort(slots)
    return RangeStarts(slots[order], positions[order])


def _range_starts_in(windows: Windows, rows: Sequence[Row], first: int, last: int) -> RangeStarts:
    """In those of ``rows`` that are of ``windows``."""
    n = last - first
    chosen = [(row * n, window) for row, (other, window) in enumerate(rows) if other is windows]
    row_slots, numbers = np.array(chosen).T
    if windows.is_one_document:
        return RangeStarts(row_slots, np.full_like(row_slots, first))
    window_starts = numbers * windows.sequence_length
    starts = window_starts + first
    document_starts, counts = windows.source.document_starts_each(starts, n)
    slots = document_starts + np.repeat(row_slots - starts, counts)
    positions = np.zeros_like(slots)
    # Of every row's first document only what is in the window, and of that what is from ``first`` on.
    firsts = np.cumsum(counts) - counts
    slots[firsts] = row_slots
    positions[firsts] = starts - np.maximum(document_starts[firsts], window_starts)
    return RangeStarts(slots, positions)


def _range_starts_of(ranges: Sequence[DocumentRanges], first: int, n: int) -> RangeStarts:
    """Of rows with these ``ranges``, of which n slots from ``first`` on are wanted."""
    counts = [len(one.slots) for one in ranges]
    rows = np.arange(len(ranges)) * n
    slots = np.concatenate([one.slots for one in ranges]) + np.repeat(rows - first, counts)
    positions = np.zeros_like(slots)
    # Of every row's first range only what is from ``first`` on.
    firsts = np.cumsum(counts) - counts
    positions[firsts] = rows - np.minimum(slots[firsts], rows)
    slots[firsts] += positions[firsts]
    return RangeStarts(slots, positions)


def _mask(rows: Sequence[Row], first: int, shape: tuple[int, int]) -> torch.Tensor:
    """Which of the tokens from slot ``first`` on of ``rows`` count as labels; all are contiguous in their sources."""
    if not any(windows.source.has_loss_mask for windows, _ in rows):
        return _all_counted(shape)
    counted = np.empty(shape, dtype=np.float32)
    for out, (windows, window) in zip(counted, rows, strict=True):
        begin = window * windows.sequence_length + first
        out[:] = windows.source.loss_mask(begin, begin + shape[1])
    return torch.from_numpy(counted)


@functools.lru_cache(maxsize=8)
def _all_counted(shape: tuple[int, int]) -> torch.Tensor:
    """A mask of ones, expanded from one element: no memory, and nobody can write into it."""
    return torch.ones(()).expand(shape)


def _read_ranges(
    source: TokenSource,
    ranges: DocumentRanges,
    first: int,
    tokens: NDArray[np.int32],
    labels: NDArray[np.int32],
    counted: NDArray[np.float32],
    shift: Shift,
) -> None:
    """Inputs, labels and where they count, into (n,) arrays for the slots from ``first`` on that hold padding so far.

    The label after a document's last token is the next one's first, the end-of-text token. At the end of the source
    the padding already stands for it.
    """
    shifts = ranges.starts - ranges.slots
    # Ranges that are neighbours in the source too are read at once: one pread instead of one a document.
    edges = np.flatnonzero(shifts[1:] != shifts[:-1]) + 1
    begins = [first, *ranges.slots[edges].tolist()]
    ends = [*begins[1:], first + len(tokens)]
    for index, begin, end in zip([0, *edges.tolist()], begins, ends, strict=True):
        if ranges.starts[index] == PADDING:
            continue
        start, stop = begin + int(shifts[index]), end + int(shifts[index])
        text = source.read(start, min(stop + shift, source.num_tokens))
        tokens[begin - first : end - first] = text[: stop - start]
        labels[begin - first : begin - first + len(text) - shift] = text[shift:]
        counted[begin - first : end - first] = (
            _mask_of_labels(source, start, stop) if shift else source.loss_mask(start, stop)
        )


def label_slices(ranges: DocumentRanges, first: int, last: int, num_tokens: int) -> Iterator[tuple[slice, slice]]:
    """Of each document range in the slots ``first`` … ``last`` - 1: slots behind ``first``, and tokens of the source
    that are their labels. The end of the source is the label of no slot."""
    begins = np.maximum(ranges.slots, first)
    ends = np.append(ranges.slots[1:], last)
    for slot, start, begin, end in zip(
        *(one.tolist() for one in (ranges.slots, ranges.starts, begins, ends)), strict=True
    ):
        if start != PADDING:
            token = start + begin - slot + 1
            stop = min(token + end - begin, num_tokens)
            yield slice(begin - first, begin - first + stop - token), slice(token, stop)


def _read_label_values(
    source: TokenSource, array: str, ranges: DocumentRanges, first: int, out: NDArray[np.float32]
) -> None:
    """The values of labels into (n,) ``out``, for the slots from ``first`` on."""
    for slots, tokens in label_slices(ranges, first, first + len(out), source.num_tokens):
        if tokens.start < tokens.stop:
            out[slots] = source.token_values(array, tokens.start, tokens.stop)


def _mask_of_labels(source: TokenSource, start: int, stop: int) -> NDArray[np.uint8] | int:
    """Which of the labels of the tokens ``start`` … ``stop`` - 1 count, the end of the source being one."""
    if not source.has_loss_mask:
        return 1
    if stop < source.num_tokens:
        return source.loss_mask(start + 1, stop + 1)
    # As with every end of a document, the end of the last one counts where the token before it does; never one of a
    # conversation, whose template has its own.
    mask = source.loss_mask(start, stop)
    return np.append(mask[1:], mask[-1:] if source.chat is None else np.zeros(1, np.uint8))
