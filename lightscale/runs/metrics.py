"""The metrics of a run while it trains: metrics.jsonl, TensorBoard, and a progress line."""

import contextlib
import datetime
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch.utils.tensorboard import SummaryWriter

from lightscale.runs.full_disk import PendingRecords, is_full
from lightscale.runs.goodput import Goodput
from lightscale.runs.run_directory import LineWriter, timestamp

# The launcher's terminal, for the progress line: the ranks' own stderr is a log file.
TERMINAL_VARIABLE = "LIGHTSCALE_TERMINAL"

# Dense bf16 without sparsity, FLOP/s, of the SXM modules.
_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}
# The remaining time is estimated from this many last lines: enough to contain saves and validations.
_WINDOW_LINES = 100
_TENSORBOARD_FLUSH_S = 10


@dataclass(frozen=True, kw_only=True)
class ValidationLoss:
    """Mean loss per token on one validation set, in nats."""

    loss: float
    by_position: tuple[float, ...] = ()
    """The same for equal parts of the sequence, first to last."""


class MetricsLogger:
    """Writes the metrics of a run. Every rank may have one, but only one is `enabled`; the others do nothing.

    with MetricsLogger(…) as metrics:
        for step in …:
            metrics.begin_step()
            …
            if metrics.due(step):
                metrics.log_step(step, …)
    """

    def __init__(
        self,
        path: Path,
        *,
        enabled: bool,
        attempt: int,
        first_step: int,
        total_steps: int,
        tokens_per_step: int,
        log_every: int = 1,
        tensorboard: Path | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        """`path`: metrics.jsonl; `tensorboard`: the directory for TensorBoard, None for none.

        `first_step` (from 1) is the first of this attempt: what TensorBoard already has of it and of later steps is
        hidden. `flops_per_token`: FLOPs of training per token; `peak_flops`: FLOP/s
        of all devices together. Where one is None, so is `mfu`.
        """
        self._enabled = enabled
        self._attempt = attempt
        self._total_steps = total_steps
        self._tokens_per_step = tokens_per_step
        self._log_every = log_every
        self._logged_step: int | None = None
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._began = time.perf_counter()
        self._skipped_saves = 0
        if not enabled:
            return
        self._lines = LineWriter(path)
        self._pending = PendingRecords(self._lines.write)
        self._tensorboard = None if tensorboard is None else _Scalars(tensorboard, first_step)
        self._pace = _Pace(total_steps)
        self._progress = _progress(total_steps, first_step - 1)

    def begin_step(self) -> None:
        """Start the clock of a step; saves and validations before it are not part of its time."""
        self._began = time.perf_counter()

    def due(self, step: int) -> bool:
        """Whether `step` is one to log: every `log_every`-th and the last. The same on all ranks."""
        return step % self._log_every == 0 or step == self._total_steps

    def go_back(self, step: int, *, attempt: int) -> None:
        """The run rolls back to `step` and continues as another attempt, whose records replace those of later steps."""
        if not self._enabled:
            return
        self._attempt = attempt
        # The pace counts steps forward only; after a return the difference of steps would be negative.
        self._pace = _Pace(self._total_steps)
        if self._tensorboard is not None:
            self._tensorboard.go_back(step)

    def log_step(
        self,
        step: int,
        *,
        tokens: int,
        loss: float,
        grad_norm: float,
        lr: float,
        skipped: str | None = None,
        **more: float | int | None,
    ) -> None:
        """Record the step that now ends.

        `step` counts from 1, `tokens` from the run's beginning; `skipped`: why its gradients were not applied, if
        they were not; `more` are other scalars.
        """
        if not self._enabled:
            return
        step_s = time.perf_counter() - self._began
        tokens_per_s = self._tokens_per_step / step_s
        scalars: dict[str, float | int | None] = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "step_s": step_s,
            "tokens_per_s": tokens_per_s,
            "mfu": self._mfu(tokens_per_s),
            **more,
        }
        marks = {} if skipped is None else {"skipped": skipped}
        self._write(step, tokens, {**scalars, **marks})
        self._logged_step = step
        self._scalars("train", {**scalars, "tokens": tokens}, step)
        left = self._pace.time_left_s(step, time.monotonic())
        self._progress.show(
            step,
            f"{_short(tokens)} tokens  loss {loss:.4f}  grad norm {grad_norm:.3f}  lr {lr:.2e}  "
            f"{_short(tokens_per_s)} tokens/s  left {_duration(left)}{'' if skipped is None else '  skipped'}",
        )

    def log_validation(self, step: int, *, tokens: int, losses: Mapping[str, ValidationLoss]) -> None:
        """Record the losses of all validation sets, by name, as they are after `step`."""
        if not self._enabled:
            return
        sets = {name: {"loss": one.loss, "loss_by_position": one.by_position} for name, one in losses.items()}
        self._write(step, tokens, {"validation": sets})
        for name, one in losses.items():
            digits = len(str(len(one.by_position) - 1))
            buckets = {f"loss_by_position/{i:0{digits}}": loss for i, loss in enumerate(one.by_position)}
            self._scalars(f"validation/{name}", {"loss": one.loss, **buckets}, step)
        text = "  ".join(f"{name} {one.loss:.4f}" for name, one in losses.items())
        self._progress.say(f"step {step}/{self._total_steps}  validation loss  {text}")

    def log_save(
        self, step: int, *, tokens: int, saved_step: int, stall_s: float, write_s: float, num_bytes: int
    ) -> None:
        """Record, after ``step``, that the checkpoint of ``saved_step`` is durable.

        ``stall_s``: seconds that training waited for it; ``write_s``: seconds until it was written.
        """
        if not self._enabled:
            return
        scalars = {"stall_s": stall_s, "write_s": write_s, "bytes_per_s": num_bytes / write_s}
        fields = {"checkpoint_step": saved_step, **{f"checkpoint_{name}": value for name, value in scalars.items()}}
        self._write(step, tokens, fields)
        self._scalars("checkpoint", scalars, saved_step)

    def count_skipped_save(self, step: int) -> None:
        """Record that a checkpoint due at ``step`` was skipped, as the previous one was still being written."""
        if not self._enabled:
            return
        self._skipped_saves += 1
        self._scalars("checkpoint", {"skipped": self._skipped_saves}, step)

    def log_goodput(self, step: int, *, tokens: int, goodput: Goodput) -> None:
        """Record the goodput of the run up to `step`.

        In metrics.jsonl it is joined with this attempt's line of that step. Where there is none, as when an attempt
        starts, nothing is written: the new line would replace the previous attempt's line of that step.
        """
        if not self._enabled:
            return
        # ``read_metrics`` joins the lines of one attempt for a step, and of several attempts takes the last one's.
        if step == self._logged_step:
            self._write(step, tokens, {"goodput": goodput.record()})
        self._scalars("goodput", goodput.scalars(), step)
        self._progress.say(f"step {step}/{self._total_steps}  {goodput.sentence()}")

    def close(self) -> None:
        """Write what is buffered and end the progress line."""
        if not self._enabled:
            return
        self._progress.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        with contextlib.closing(self._lines):
            self._pending.flush()
            self._lines.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The error that ends the training matters more than that its last lines could not be written either.
        with contextlib.nullcontext() if error is None else contextlib.suppress(OSError):
            self.close()

    def _write(self, step: int, tokens: int, fields: Mapping[str, object]) -> None:
        self._pending.add({"step": step, "attempt": self._attempt, "time": timestamp(), "tokens": tokens, **fields})

    def _mfu(self, tokens_per_s: float) -> float | None:
        if self._flops_per_token is None or self._peak_flops is None:
            return None
        return tokens_per_s * self._flops_per_token / self._peak_flops

    def _scalars(self, group: str, values: Mapping[str, float | int | None], step: int) -> None:
        # While lines are held back, TensorBoard's disk is full too, and its writer thread dies of that.
        if self._tensorboard is not None and self._pending.is_empty:
            finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
            self._tensorboard.add({f"{group}/{name}": value for name, value in finite.items()}, step)


def device_peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of the GPU with the driver's name `device_name`; None: unknown, as for CPUs."""
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_name), None)


class _Pace:
    """Estimates the remaining time from the wall clock of the last lines, saves and validations included."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._seen: deque[tuple[int, float]] = deque(maxlen=_WINDOW_LINES)

    def time_left_s(self, step: int, now_s: float) -> float | None:
        """Seconds from `now_s`, the end of `step`, to the run's end; None before the second line."""
        self._seen.append((step, now_s))
        first_step, first_s = self._seen[0]
        if step <= first_step:
            return None
        return (self._total_steps - step) * (now_s - first_s) / (step - first_step)


class _PlainProgress:
    """Prints one line for each logged step, for logs and pipes."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def show(self, step: int, text: str) -> None:
        """`step` ended as `text` says."""
        self.say(f"step {step}/{self._total_steps}  {text}")

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to close."""


class _LiveProgress:
    """One line on a terminal, redrawn for every logged step."""

    def __init__(self, terminal: TextIO, total_steps: int, steps_done: int) -> None:
        self._terminal = terminal
        own = terminal is sys.stderr
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            console=Console(file=terminal, force_terminal=True, highlight=False, markup=False),
            # Drawn once a step: a refreshing thread would compete with training for the interpreter.
            auto_refresh=False,
            redirect_stdout=own,
            redirect_stderr=own,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=steps_done)

    def show(self, step: int, text: str) -> None:
        """`step` ended as `text` says."""
        # Not before the first step: the line would be mixed with what is printed while the run starts.
        self._progress.start()
        self._progress.update(self._task, completed=step, description=text, refresh=True)

    def say(self, text: str) -> None:
        """Print a line above the live one."""
        self._progress.console.print(text)

    def close(self) -> None:
        """Leave the line as it is, and the terminal as it was."""
        self._progress.stop()
        if self._terminal is not sys.stderr:
            self._terminal.close()


def _progress(total_steps: int, steps_done: int) -> _LiveProgress | _PlainProgress:
    terminal = _terminal()
    return _PlainProgress(total_steps) if terminal is None else _LiveProgress(terminal, total_steps, steps_done)


def _terminal() -> TextIO | None:
    """The terminal to draw on: the launcher's, or stderr if it is one."""
    name = os.environ.get(TERMINAL_VARIABLE)
    if name:
        # In another container, or after the terminal was closed, the name may not exist.
        with contextlib.suppress(OSError):
            return os.fdopen(os.open(name, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8")
    return sys.stderr if sys.stderr.isatty() else None


class _Scalars:
    """The scalars for TensorBoard, in `directory`. What a full disk does not accept is in metrics.jsonl only."""

    def __init__(self, directory: Path, first_step: int) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None
        self._open(first_step)

    def add(self, values: Mapping[str, float | int], step: int) -> None:
        try:
            if self._writer is None:
                self._open(step)
            assert self._writer is not None
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            # Its thread has ended with this error: a new writer is opened at the next scalar.
            self._writer = None
            if not is_full(error):
                raise

    def go_back(self, step: int) -> None:
        self.close()
        self._open(step + 1)

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            if not is_full(error):
                raise

    def _open(self, first_step: int) -> None:
        """Write from `first_step` on; what earlier writers have of it and of later steps is hidden (`purge_step`)."""
        self._writer = SummaryWriter(str(self._directory), purge_step=first_step, flush_secs=_TENSORBOARD_FLUSH_S)


def _duration(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(datetime.timedelta(seconds=round(seconds)))


def _short(number: float) -> str:
    """1234567 -> "1.23M"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
