"""From token stores to batches: the tokens of a rank at a step, a pure function of (seed, tokens consumed).

    tokens consumed ─curriculum.py─▶ curriculum stage, sample indices of the step
    sample index ─order.py─▶ source, epoch, window ─windows.py─▶ ranges of documents ─pread─▶ tokens, labels, positions
    samples of the step ─LoaderLayout─▶ this rank's micro-batches

The layout is applied last; neither it nor the length of the run enters the order. Any number of ranks therefore reads
the same samples, and a run resumes on another number of ranks. The loader's state is the number of consumed tokens.
"""

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.config.schema import CurriculumStage, RunConfig
from lightscale.data_pipeline.loading.buffers import Buffers
from lightscale.data_pipeline.loading.curriculum import Curriculum, LengthStage, SkippedRanges
from lightscale.data_pipeline.loading.images import Images, ImageWindows
from lightscale.data_pipeline.loading.order import Location, Mixture, Order, PartOrder, SampleOrder
from lightscale.data_pipeline.loading.packing import PACKING_VERSION, WholeWindows
from lightscale.data_pipeline.loading.targets import Targets
from lightscale.data_pipeline.loading.windows import (
    Batch,
    ConcatWindows,
    DocumentRanges,
    JoinedWindows,
    RangeStarts,
    Row,
    Windows,
    find_range_starts,
    read_batch,
    read_images,
    read_predicted,
)
from lightscale.data_pipeline.store.token_store import TokenSource, TokenStore
from lightscale.errors import UserError

Packing = Literal["concat", "joined", "whole"]
# So many samples are found together: a hundred take about as long as one. A run that resumes waits for it.
_SAMPLES_AT_ONCE = 256
_MicroBatch = tuple[list[Row], RangeStarts | None]
"""The windows of a micro-batch and, where they were looked up, the starts of the documents in them."""


@dataclass(frozen=True, kw_only=True)
class LoaderLayout:
    """This rank's coordinates on the two axes that divide the data; the ranks of all others read the same."""

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
class StepSamples:
    """The samples of a step, over all ranks."""

    stage: LengthStage
    samples: range
    """Their indices in the order of the curriculum stage."""
    locations: list[Location]
    """Where each comes from."""
    ranges: list[DocumentRanges]
    """The documents that each holds."""


@dataclass(frozen=True, kw_only=True)
class _StageOrder:
    """How the samples of a curriculum stage are found."""

    stage: LengthStage
    first_sample: int
    """The index of its first sample in ``order``."""
    order: Order
    windows: Mapping[str, Windows]

    @property
    def stop(self) -> int:
        """The index after that of its last sample."""
        stage = self.stage
        return sys.maxsize if stage.stop is None else (stage.stop - stage.start) // stage.sequence_length

    def place_of(self, sample: int) -> int:
        """Tokens of the run's data before the sample of that index; what was skipped counts."""
        return self.stage.start + (sample - self.first_sample) * self.stage.sequence_length


class TokenLoader:
    """Training batches of one rank, and the position in the data that a checkpoint keeps."""

    def __init__(
        self,
        store: TokenStore,
        *,
        sequence_length: int,
        global_batch_size: int,
        micro_batch_size: int,
        packing: Packing = "concat",
        curriculum: Sequence[CurriculumStage] = (),
        ramp: Sequence[tuple[int, int]] = (),
        sources: Mapping[str, float] | None = None,
        seed: int = 0,
        layout: LoaderLayout | None = None,
        index_dir: Path | None = None,
        targets: Targets | Images | None = None,
        label_array: str | None = None,
        tells_places: bool = False,
    ) -> None:
        """``sources``: source to weight in any unit; none: every training source, by its tokens.

        ``global_batch_size``: sequences in a step, over all ranks; ``micro_batch_size``: in one ``Batch``; both
        for the last curriculum stage, that of ``sequence_length``. ``ramp``: (end in tokens, sequences in a step) of
        smaller batches before ``global_batch_size``, by end. ``index_dir``: where the indices of
        ``packing`` = "whole" are kept. ``targets``: makes the labels; None: the next token. ``label_array``: for
        ``Batch.label_values``, see ``read_batch``. ``tells_places``: whether batches have ``places``. Raises
        ``UserError`` for sizes that do not divide, unknown sources, and sources of validation data.
        """
        self.store = store
        self.sequence_length = sequence_length
        self.seed = seed
        self.targets, self.label_array, self.tells_places = targets, label_array, tells_places
        self.packing = packing
        self.layout = layout or LoaderLayout()
        self.step_tokens = StepTokens.of(sequence_length, global_batch_size, ramp)
        self.curriculum = Curriculum(
            curriculum,
            sequence_length=sequence_length,
            step_tokens=self.step_tokens,
            micro_batch_size=micro_batch_size,
        )
        self.tokens = 0
        """Tokens consumed: the inputs of all samples before the next step's, padding included, over all ranks."""
        self.skips = SkippedRanges()
        """The data that a recovery skipped."""
        divisor_name = f"micro_batch_size {micro_batch_size} × {self.layout.data_size} data ranks"
        # Every data rank has the same number of micro-batches: ranks that had fewer would wait in the next collective.
        round_size = micro_batch_size * self.layout.data_size
        for batch in (*(sequences for _, sequences in ramp), global_batch_size):
            _check_divides("global_batch_size", batch, divisor_name, round_size)
        for stage in self.curriculum.stages:
            _sequence_slice(stage.sequence_length, self.layout)  # refused now, not in the middle of the run
        weights = dict(sources) if sources else store.training_weights()
        self._sources = {name: _training_source(store, name) for name in weights}
        self.mixture = Mixture(weights)
        self._source_numbers = {name: number for number, name in enumerate(self.mixture.names)}
        self._buffers = Buffers()
        self._upcoming: dict[tuple[int, int], _MicroBatch] = {}
        self._stages = self._whole_stages(index_dir) if packing == "whole" else self._concat_stages()

    @classmethod
    def of(
        cls,
        config: RunConfig,
        store: TokenStore,
        *,
        layout: LoaderLayout | None = None,
        index_dir: Path | None = None,
        targets: Targets | Images | None = None,
        label_array: str | None = None,
    ) -> "TokenLoader":
        """The loader of a run."""
        return cls(
            store,
            sequence_length=config.data.sequence_length,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            packing=config.data.packing,
            curriculum=config.data.curriculum,
            ramp=[(part.until_tokens, part.sequences) for part in config.train.ramp],
            sources=config.data.sources,
            seed=config.data.seed,
            layout=layout,
            index_dir=index_dir,
            targets=targets,
            label_array=label_array,
            tells_places=config.adapter.lora_dropout > 0,
        )

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step; moves ``tokens`` on."""
        batches = self.batches_after(self.tokens)
        self.tokens = self.step_tokens.after(1, self.tokens)
        return batches

    def batches_after(self, tokens: int, step_tokens: int | None = None) -> list[Batch]:
        """This rank's micro-batches of the step that follows ``tokens`` consumed ones; changes nothing.

        ``step_tokens``: those of the step; None: as configured.

        The data ranks take the step's samples in turn, b = ``micro_batch_size`` of the curriculum stage at a time:
        micro-batch m of data rank r of R holds the samples (m R + r) b … (m R + r + 1) b - 1 of the step.
        """
        here, samples = self._samples_after(tokens, step_tokens)
        b = here.stage.micro_batch_size
        first, last = _sequence_slice(here.stage.sequence_length, self.layout)
        padding_id = self.store.tokenizer.eot_id
        batches = []
        for start in range(samples.start + self.layout.data_rank * b, samples.stop, b * self.layout.data_size):
            rows, range_starts = self._rows(here, start)
            places = [here.place_of(sample) for sample in range(start, start + b)]
            batches.append(
                _read(
                    rows,
                    first,
                    last,
                    self.targets,
                    places,
                    buffers=self._buffers,
                    padding_id=padding_id,
                    range_starts=range_starts,
                    source_numbers=self._source_numbers,
                    row_at=functools.partial(self._row_at, here),
                    label_array=self.label_array,
                )
            )
            if self.tells_places:
                batches[-1] = replace(batches[-1], places=torch.tensor(places))
        return batches

    def step_after(self, tokens: int, step_tokens: int | None = None) -> StepSamples:
        """The samples of the step that follows ``tokens`` consumed ones, whatever the layout; reads no tokens.

        ``step_tokens``: those of the step; None: as configured.
        """
        here, samples = self._samples_after(tokens, step_tokens)
        locations = here.order(np.array(samples)).each(self.mixture.names)
        length = here.stage.sequence_length
        ranges = [here.windows[found.source].document_ranges(found.window, 0, length) for found in locations]
        return StepSamples(stage=here.stage, samples=samples, locations=locations, ranges=ranges)

    def stage_after(self, tokens: int) -> LengthStage:
        """The curriculum stage, and so the shape of the batches, of the step that follows ``tokens`` consumed ones."""
        return self._samples_after(tokens)[0].stage

    def skip(self, at_tokens: int, skip_tokens: int) -> None:
        """Skip for ever the ``skip_tokens`` of data that would come when ``at_tokens`` are consumed.

        ``UserError`` unless both are whole sequences and, with a curriculum, ``at_tokens`` whole steps.
        """
        for tokens in (at_tokens, skip_tokens):
            if tokens % self.sequence_length:
                raise UserError(
                    f"{tokens} tokens: only whole sequences of {self.sequence_length} tokens can be skipped"
                )
        self._require_step(at_tokens)
        self.skips = self.curriculum.fit(self.skips.adding(at_tokens, skip_tokens))

    def fingerprint(self) -> dict[str, str]:
        """All inputs that decide the tokens of every sample, by name; neither layout nor batch size is one."""
        # Compared on resume: another value of any of these would give other tokens for the same number consumed.
        parts = {
            "store": self.store.fingerprint(),
            "tokenizer": self.store.tokenizer.sha256,
            "sequence_length": str(self.sequence_length),
            "packing": f"{self.packing} {PACKING_VERSION}" if self.packing == "whole" else self.packing,
            "seed": str(self.seed),
        }
        if self.targets is not None:
            parts["task"] = self.targets.description()
        if len(self._stages) > 1:
            parts["curriculum"] = self.curriculum.description()
        for name, share in zip(self.mixture.names, self.mixture.parts, strict=True):
            parts[f"source {name}"] = self._sources[name].content_hash
            parts[f"weight of {name}"] = f"{share}/{self.mixture.period}"
        return parts

    def state_dict(self) -> dict[str, Any]:
        """The position in the data: plain values, the same on every rank."""
        skips = [list(record) for record in self.skips.records]
        position = self.skips.position(self.tokens)
        return {"tokens": self.tokens, "skips": skips, "position": position, "fingerprint": self.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, under any layout and batch size. Raises ``UserError`` that names each difference."""
        saved, current = state["fingerprint"], self.fingerprint()
        differing = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
        if differing:
            changes = "; ".join(f"{key}: {saved.get(key)} before, {current.get(key)} now" for key in differing)
            raise UserError(f"{self.store.title}: the data differs from the data of the earlier steps ({changes})")
        tokens, skips = int(state["tokens"]), SkippedRanges.of(state.get("skips", []))
        if tokens < 0 or skips.position(tokens) % self.sequence_length:
            raise UserError(f"the state's {tokens} tokens are not a multiple of sequence_length {self.sequence_length}")
        self._require_step(tokens)
        skips = self.curriculum.fit(skips)
        position = skips.position(tokens)
        # Steps decide what is left of a curriculum stage behind skipped data: with other batches it is something else.
        if state.get("position", position) != position:
            raise UserError(
                f"the state's {tokens} tokens end at position {state['position']} of the data, and at {position} with "
                "the batches of now; keep train.global_batch_size and train.rampup_batch_size"
            )
        self.tokens, self.skips = tokens, skips

    def description(self) -> list[str]:
        """A line for every source and curriculum stage: tokens read, number of epochs, tokens skipped."""
        lines = []
        for name, share in zip(self.mixture.names, self.mixture.parts, strict=True):
            what = self._stages[-1].windows[name].description()
            if self._sources[name].has_loss_mask:
                what += "; its loss mask selects the labels that count"
            lines.append(f"{name}: {share / self.mixture.period:.2%} of the samples; {what}")
        lines += [
            f"{store.path}: format {store.format_version} has no block hashes, so data is read unverified; "
            f"`lightscale data upgrade {store.path}` adds them"
            for store in self.store.parts
            if not store.is_checked
        ]
        for here in self._stages[:-1]:
            stage = here.stage
            per_step = self.step_tokens.full // stage.sequence_length
            up_to = "up to " if self.step_tokens.ramp else ""
            lines.append(
                f"sequences of {stage.sequence_length:,} tokens until {stage.stop:,} tokens: "
                f"{up_to}{per_step:,} per step, {stage.micro_batch_size:,} per micro-batch"
            )
        if ramp := self.step_tokens.ramp:
            sizes = " → ".join(
                f"{size // self.sequence_length:,}" for size in (*(size for _, size in ramp), self.step_tokens.full)
            )
            lines.append(f"batches grow until {ramp[-1][0]:,} tokens: {sizes} sequences per step")
        return lines

    def _require_step(self, tokens: int) -> None:
        """With a curriculum a step must begin where it did before: it must not reach from one stage into the next.

        Without one, whole sequences do: the batch size may change at a resume.
        """
        if len(self._stages) > 1 and not self.step_tokens.begins_step(tokens):
            raise UserError(
                f"{tokens} tokens are no whole number of steps with these batches, which data.curriculum needs; keep "
                "train.global_batch_size and train.rampup_batch_size, or start a new run with these weights "
                "(train.init_from)"
            )

    def _samples_after(self, tokens: int, step_tokens: int | None = None) -> tuple[_StageOrder, range]:
        position = self.skips.position(tokens)
        here = self._stages[self.curriculum.number_at(position)]
        # Whole sequences are consumed and skipped, so the position begins one, and its index is a division.
        first = here.first_sample + (position - here.stage.start) // here.stage.sequence_length
        size = self.step_tokens.of_next(tokens) if step_tokens is None else step_tokens
        return here, range(first, first + size // here.stage.sequence_length)

    def _rows(self, here: _StageOrder, start: int) -> _MicroBatch:
        """This rank's micro-batch from sample ``start`` on.

        The next ones are looked up with it: looking up many samples takes hardly longer than one.
        """
        key = (here.stage.start, start)
        # The prefetch thread and the trainer may both ask: each replaces the dictionary whole and reads its own.
        upcoming = self._upcoming
        if key not in upcoming:
            upcoming = self._upcoming = self._find_rows(here, start)
        return upcoming[key]

    def _row_at(self, here: _StageOrder, sample: int) -> Row:
        """The window of one sample, of this rank or of another."""
        (location,) = here.order(np.array([sample])).each(self.mixture.names)
        return here.windows[location.source], location.window

    def _find_rows(self, here: _StageOrder, start: int) -> dict[tuple[int, int], _MicroBatch]:
        """(start of the curriculum stage, first sample) to micro-batch, for this rank's next ones from ``start`` on."""
        b = here.stage.micro_batch_size
        starts = range(start, here.stop, b * self.layout.data_size)[: -(-_SAMPLES_AT_ONCE // b)]
        samples = np.array(starts)[:, None] + np.arange(b)  # (micro-batches, b)
        locations = here.order(samples.ravel()).each(self.mixture.names)
        rows = [(here.windows[location.source], location.window) for location in locations]
        range_starts: Sequence[RangeStarts | None] = [None] * len(starts)
        if self.packing != "whole":
            first, last = _sequence_slice(here.stage.sequence_length, self.layout)
            range_starts = find_range_starts(rows, first, last).cut(b * (last - first))
        return {
            (here.stage.start, first_sample): (rows[number * b : (number + 1) * b], range_starts[number])
            for number, first_sample in enumerate(starts)
        }

    def _concat_stages(self) -> list[_StageOrder]:
        """All curriculum stages go through one order of the longest windows; the earlier ones read theirs in parts.

        So a curriculum changes when a token is read and in how long a sequence, but not which tokens are read.
        """
        longest = self._concat_windows(self.sequence_length)
        order = SampleOrder(self.mixture, _counts(longest), seed=self.seed)
        *earlier, last = self.curriculum.stages
        stages = []
        for stage in earlier:
            assert stage.stop is not None
            parts = PartOrder(
                order,
                # Exact: curriculum stages begin and end with whole steps, which are whole windows of the last length.
                first=stage.start // self.sequence_length,
                num_windows=(stage.stop - stage.start) // self.sequence_length,
                num_parts=stage.num_parts,
                seed=self.seed,
            )
            windows = self._concat_windows(stage.sequence_length)
            stages.append(_StageOrder(stage=stage, first_sample=0, order=parts, windows=windows))
        # It goes on behind the windows that the earlier curriculum stages read in parts: none is read twice.
        first_sample = last.start // self.sequence_length
        return [*stages, _StageOrder(stage=last, first_sample=first_sample, order=order, windows=longest)]

    def _whole_stages(self, index_dir: Path | None) -> list[_StageOrder]:
        """Each curriculum stage packs and orders the documents for itself, from the first epoch on.

        Windows of whole documents have no parts: packing for another length gives other windows.
        """
        stages = []
        for stage in self.curriculum.stages:
            windows = {
                name: WholeWindows(source, stage.sequence_length, index_dir=index_dir)
                for name, source in self._sources.items()
            }
            order = SampleOrder(self.mixture, _counts(windows), seed=self.seed)
            stages.append(_StageOrder(stage=stage, first_sample=0, order=order, windows=windows))
        return stages

    def _concat_windows(self, sequence_length: int) -> dict[str, Windows]:
        kind = JoinedWindows if self.packing == "joined" else _concat_windows
        return {name: kind(source, sequence_length) for name, source in self._sources.items()}


def validation_batches(
    source: TokenSource,
    *,
    sequence_length: int,
    num_sequences: int,
    micro_batch_size: int,
    layout: LoaderLayout,
    targets: Targets | Images | None = None,
    whole_documents: bool = False,
    padding_id: int = 0,
    label_array: str | None = None,
) -> Iterator[Batch]:
    """The first ``num_sequences`` windows of a source (fewer where it has fewer) in order, cut over the ranks.

    The windows are those of ``concat``, however training packs; with ``whole_documents`` those of ``whole``, which
    pad with ``padding_id``, the end-of-text token. Every data rank gets the same number of batches of the same shape:
    micro-batch m of data rank r of R holds the windows (m R + r) b …, and rows beyond the last window repeat the
    first one with ``loss_mask`` 0. ``targets``: makes the labels; None: the next token. ``label_array``: see
    ``read_batch``.
    """
    # One kind of window for every run: losses of runs that pack differently can be compared.
    windows = WholeWindows(source, sequence_length) if whole_documents else _concat_windows(source, sequence_length)
    buffers = Buffers()
    num_windows = min(num_sequences, windows.num_windows)
    bounds = _sequence_slice(sequence_length, layout)
    for first in range(0, num_windows, micro_batch_size * layout.data_size):
        start = first + layout.data_rank * micro_batch_size
        # Rows that repeat a window and count for nothing keep the shape: all ranks run the same collectives.
        numbers = range(start, start + micro_batch_size)
        rows = [(windows, number if number < num_windows else 0) for number in numbers]
        places = [window * sequence_length for _, window in rows]
        how: dict[str, Any] = {"buffers": buffers, "padding_id": padding_id, "label_array": label_array}
        batch = _read(rows, *bounds, targets, places, **how)
        counted = torch.tensor([[float(number < num_windows)] for number in numbers])
        yield replace(batch, loss_mask=batch.loss_mask * counted)


def _concat_windows(source: TokenSource, sequence_length: int) -> ConcatWindows | ImageWindows:
    return (ImageWindows if source.image_shape else ConcatWindows)(source, sequence_length)


def _read(
    rows: Sequence[Row],
    first: int,
    last: int,
    targets: Targets | Images | None,
    places: Sequence[int],
    *,
    buffers: Buffers,
    padding_id: int = 0,
    **how: Any,
) -> Batch:
    label_array = how.pop("label_array", None)
    if isinstance(targets, Images):
        return read_images(rows, first, last, targets, places, **how)
    how.pop("row_at", None)
    how |= {"buffers": buffers, "padding_id": padding_id}
    if targets is None:
        return read_batch(rows, first, last, label_array=label_array, **how)
    return read_predicted(rows, first, last, targets, places, **how)


def _counts(windows: Mapping[str, Windows]) -> dict[str, int]:
    return {name: one.num_windows for name, one in windows.items()}


def _sequence_slice(sequence_length: int, layout: LoaderLayout) -> tuple[int, int]:
    """First and last + 1 input of a window on this sequence rank."""
    _check_divides("sequence_length", sequence_length, "the number of sequence ranks", layout.sequence_size)
    size = sequence_length // layout.sequence_size
    return layout.sequence_rank * size, (layout.sequence_rank + 1) * size


def _check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value < 1 or divisor < 1 or value % divisor:
        raise UserError(f"{name} {value} is not a multiple of {divisor_name} ({divisor})")


def _training_source(store: TokenStore, name: str) -> TokenSource:
    source = store.source(name)
    if source.split != "train":
        raise UserError(f"{store.title}: source {name} holds validation data; use a training source")
    return source
