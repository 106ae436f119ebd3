"""From token stores to batches: which tokens a rank holds at a step, as a pure function of (seed, sample
index).

    sample index ─Mixture─▶ source, its n-th sample ─Permutation─▶ window ─pread─▶ tokens, positions
    step ─▶ global_batch_size consecutive sample indices ─Layout, last─▶ this rank's micro-batches

A window is ``sequence_length`` + 1 tokens of one source; neighbours share one token, which is the last label
of the first and the first input of the second. What is left at the end of a source, less than a window, is
never read. No part of the layout, nor the length of the run, enters the order: any number of ranks reads the
same samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightscale.data_pipeline.order import Mixture, Permutation
from lightscale.data_pipeline.store import TokenSource, TokenStore
from lightscale.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """This rank's place on the two axes that share the data."""

    data_rank: int = 0
    data_size: int = 1
    sequence_rank: int = 0
    sequence_size: int = 1

    def __post_init__(self) -> None:
        for axis, rank, size in (
            ("data", self.data_rank, self.data_size),
            ("sequence", self.sequence_rank, self.sequence_size),
        ):
            if not 0 <= rank < size:
                raise ValueError(f"{axis}_rank {rank} of {axis}_size {size}: ranks are 0 … size - 1")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The part of a micro-batch that one rank holds; every tensor is (b, n / sequence_size)."""

    tokens: torch.Tensor
    """int64 inputs."""
    labels: torch.Tensor
    """int64: the token after each input, shifted before the sequence is cut over ranks."""
    loss_mask: torch.Tensor
    """fp32: 1 where the label counts, 0 in sequences that only fill up the last validation batch."""
    positions: torch.Tensor
    """int64: tokens since the document's or, if later, the window's start; 0 exactly where one starts."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a sample comes from."""

    source: str
    epoch: int
    """How often the source was read through before."""
    window: int
    start: int
    """First token of the window in the source."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """A sample: n + 1 tokens with the positions of the first n."""

    tokens: NDArray[np.uint32]
    positions: NDArray[np.int64]


class Windows:
    """A source cut into windows of ``sequence_length`` + 1 tokens."""

    def __init__(self, source: TokenSource, sequence_length: int) -> None:
        """``UserError`` for a source shorter than one window."""
        self.source = source
        self.sequence_length = sequence_length
        self.num_windows = (source.num_tokens - 1) // sequence_length
        self.num_dropped_tokens = source.num_tokens - 1 - self.num_windows * sequence_length
        if self.num_windows < 1:
            raise UserError(
                f"source {source.name}: {source.num_tokens} tokens make no sequence of "
                f"sequence_length {sequence_length}; {sequence_length + 1} are needed"
            )

    def read(self, window: int, span: tuple[int, int], positions: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Inputs ``span`` = (first, last + 1) of a window and the token after; fills in ``positions``."""
        row_start = window * self.sequence_length
        start, stop = row_start + span[0], row_start + span[1]
        _fill_positions(positions, self.source, row_start, start, stop)
        return self.source.read(start, stop + 1)


class TokenLoader:
    """Training batches of one rank, and the place in the data that a checkpoint keeps."""

    def __init__(
        self,
        store: TokenStore,
        *,
        sequence_length: int,
        global_batch_size: int,
        micro_batch_size: int,
        sources: Mapping[str, float] | None = None,
        seed: int = 0,
        layout: Layout | None = None,
    ) -> None:
        """``sources``: source to weight in any unit; none: every training source, by its tokens.

        ``global_batch_size``: sequences in a step, over all ranks; ``micro_batch_size``: in one ``Batch``.
        Raises ``UserError`` for sizes that do not divide and sources that are not there or hold validation
        data.
        """
        self.store = store
        self.sequence_length = sequence_length
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.layout = layout or Layout()
        self.tokens = 0
        """Tokens consumed: the inputs of all samples before the next step's, over all ranks."""
        divisor_name = f"micro_batch_size {micro_batch_size} × {self.layout.data_size} data ranks"
        _check_divides("global_batch_size", global_batch_size, divisor_name, self._round_size)
        weights = dict(sources) if sources else _by_tokens(store)
        self._windows = {name: Windows(_training_source(store, name), sequence_length) for name in weights}
        self._slice = _sequence_slice(sequence_length, self.layout)
        self.mixture = Mixture(weights)
        self._orders: dict[str, tuple[int, Permutation]] = {}

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step; moves ``tokens`` on."""
        batches = self._batches(self.tokens // self.sequence_length)
        self.tokens += self.global_batch_size * self.sequence_length
        return batches

    def micro_batches(self, step_index: int) -> list[Batch]:
        """This rank's micro-batches of a step, if every step before it had ``global_batch_size`` sequences.

        A step's samples are dealt to the data ranks in turn, b = ``micro_batch_size`` at a time: micro-batch m
        of data rank r of R holds the samples (m R + r) b … (m R + r + 1) b - 1 of the step.
        """
        return self._batches(step_index * self.global_batch_size)

    def locate(self, sample_index: int) -> Location:
        """Which window sample ``sample_index`` ≥ 0 is."""
        name, count = self.mixture(sample_index)
        num_windows = self._windows[name].num_windows
        epoch, place = divmod(count, num_windows)
        if name not in self._orders or self._orders[name][0] != epoch:
            order = Permutation(num_windows, seed=self.seed, epoch=epoch, source=name)
            self._orders[name] = (epoch, order)
        window = self._orders[name][1](place)
        return Location(source=name, epoch=epoch, window=window, start=window * self.sequence_length)

    def sample(self, sample_index: int) -> Window:
        """The whole of sample ``sample_index``, whatever the layout."""
        location = self.locate(sample_index)
        positions = np.empty(self.sequence_length, dtype=np.int64)
        whole = (0, self.sequence_length)
        tokens = self._windows[location.source].read(location.window, whole, positions)
        return Window(tokens=tokens, positions=positions)

    def fingerprint(self) -> dict[str, str]:
        """What decides the tokens of every sample, by name. Neither layout nor batch size is in it."""
        parts = {
            "store": self.store.fingerprint(),
            "tokenizer": self.store.tokenizer.sha256,
            "sequence_length": str(self.sequence_length),
            "seed": str(self.seed),
        }
        for name, share in zip(self.mixture.names, self.mixture.parts, strict=True):
            parts[f"source {name}"] = self._windows[name].source.content_hash
            parts[f"weight of {name}"] = f"{share}/{self.mixture.period}"
        return parts

    def state_dict(self) -> dict[str, Any]:
        """The place in the data: plain values, the same on every rank."""
        return {"tokens": self.tokens, "fingerprint": self.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, under any layout and batch size; ``UserError`` names what differs."""
        saved, current = state["fingerprint"], self.fingerprint()
        differing = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
        if differing:
            changes = "; ".join(f"{key}: {saved.get(key)} then, {current.get(key)} now" for key in differing)
            raise UserError(f"{self.store.path}: the data is not what this run was trained on ({changes})")
        tokens = int(state["tokens"])
        if tokens < 0 or tokens % self.sequence_length:
            raise UserError(f"the state's {tokens} tokens are no multiple of sequence_length {self.sequence_length}")
        self.tokens = tokens

    def description(self) -> list[str]:
        """A line for every source: what of it is read, how often, and what is left out."""
        lines = []
        for name, share in zip(self.mixture.names, self.mixture.parts, strict=True):
            windows = self._windows[name]
            lines.append(
                f"{name}: {windows.num_windows:,} sequences of {self.sequence_length:,} tokens, "
                f"{share / self.mixture.period:.2%} of the samples, "
                f"{windows.num_dropped_tokens:,} tokens at its end left out"
            )
        return lines

    @property
    def _round_size(self) -> int:
        """Sequences that all data ranks hold at once."""
        return self.micro_batch_size * self.layout.data_size

    def _batches(self, first_sample: int) -> list[Batch]:
        mine = range(
            first_sample + self.layout.data_rank * self.micro_batch_size,
            first_sample + self.global_batch_size,
            self._round_size,
        )
        return [self._batch(range(start, start + self.micro_batch_size)) for start in mine]

    def _batch(self, samples: range) -> Batch:
        locations = [self.locate(sample) for sample in samples]
        rows = [(self._windows[location.source], location.window) for location in locations]
        return _assemble(rows, self._slice)


def validation_batches(
    source: TokenSource, *, sequence_length: int, num_sequences: int, micro_batch_size: int, layout: Layout
) -> Iterator[Batch]:
    """The first ``num_sequences`` windows of a source (fewer where it has fewer) in order, cut over the ranks.

    Every data rank gets the same number of batches of the same shape: micro-batch m of data rank r of R holds
    the windows (m R + r) b …, and rows beyond the last window repeat the first one with ``loss_mask`` 0.
    """
    windows = Windows(source, sequence_length)
    num_windows = min(num_sequences, windows.num_windows)
    span = _sequence_slice(sequence_length, layout)
    for first in range(0, num_windows, micro_batch_size * layout.data_size):
        start = first + layout.data_rank * micro_batch_size
        numbers = range(start, start + micro_batch_size)
        batch = _assemble([(windows, number if number < num_windows else 0) for number in numbers], span)
        for row, number in enumerate(numbers):
            if number >= num_windows:
                batch.loss_mask[row] = 0
        yield batch


def _assemble(rows: Sequence[tuple[Windows, int]], span: tuple[int, int]) -> Batch:
    """A batch of the inputs ``span`` of each (windows, number of the window)."""
    shape = (len(rows), span[1] - span[0])
    tokens, labels, positions = (np.empty(shape, dtype=np.int64) for _ in range(3))
    for row, (windows, number) in enumerate(rows):
        part = windows.read(number, span, positions[row])
        tokens[row] = part[:-1]
        labels[row] = part[1:]
    return Batch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        loss_mask=torch.ones(shape, dtype=torch.float32),
        positions=torch.from_numpy(positions),
    )


def _fill_positions(out: NDArray[np.int64], source: TokenSource, row_start: int, start: int, stop: int) -> None:
    """Tokens since the later of the document's start and ``row_start``, into (stop - start,) ``out``."""
    starts = np.maximum(source.document_starts(start, stop), row_start)
    # Steps of one, except where a document starts: there the step goes back to 0.
    out.fill(1)
    out[0] = start - starts[0]
    out[starts[1:] - start] = 1 - (starts[1:] - starts[:-1])
    np.cumsum(out, out=out)


def _sequence_slice(sequence_length: int, layout: Layout) -> tuple[int, int]:
    """First and last + 1 input of a window on this sequence rank."""
    _check_divides("sequence_length", sequence_length, "the number of sequence ranks", layout.sequence_size)
    size = sequence_length // layout.sequence_size
    return layout.sequence_rank * size, (layout.sequence_rank + 1) * size


def _check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value < 1 or divisor < 1 or value % divisor:
        raise UserError(f"{name} {value} cannot be divided by {divisor_name} ({divisor})")


def _by_tokens(store: TokenStore) -> dict[str, float]:
    training = [source for source in store.sources.values() if source.split == "train"]
    weights = {source.name: float(source.num_tokens) for source in training}
    if not weights:
        raise UserError(f"{store.path}: all its sources ({', '.join(store.sources)}) hold validation data")
    return weights


def _training_source(store: TokenStore, name: str) -> TokenSource:
    source = store.source(name)
    if source.split != "train":
        raise UserError(f"{store.path}: source {name} holds validation data, which is never trained on")
    return source
