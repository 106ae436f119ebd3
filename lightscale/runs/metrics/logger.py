"""Passes the measurements of rank 0 to the sinks and to the progress line."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.output.progress import start_progress
from lightscale.runs.goodput import Goodput
from lightscale.runs.metrics.pace import Pace, short, time_text
from lightscale.runs.metrics.sink import Measurement, Sink
from lightscale.runs.run_directory import timestamp

Scalar = float | int | None


@dataclass(frozen=True, kw_only=True)
class ValidationLoss:
    """Mean loss per token on one validation set, in nats."""

    loss: float
    by_position: tuple[float, ...] = ()
    """Mean loss for equal parts of the sequence, first to last."""
    accuracies: Mapping[int, float] = field(default_factory=dict)
    """Share of the predictions whose label is among the k most probable ones, by k; 1: accuracy."""

    @property
    def named_accuracies(self) -> dict[str, float]:
        """The same as in records: accuracy, top5_accuracy."""
        return {"accuracy" if k == 1 else f"top{k}_accuracy": share for k, share in self.accuracies.items()}


class MetricsLogger:
    """Passes on the metrics of a run. Every rank may have one, but only one is `enabled`; the others do nothing.

    with MetricsLogger(…) as metrics:
        for step in …:
            metrics.begin_step(tokens)
            …
            if metrics.due(step):
                metrics.log_step(step, …)
    """

    def __init__(
        self,
        sinks: Sequence[Sink] = (),
        *,
        enabled: bool,
        attempt: int,
        first_step: int,
        total_steps: int,
        step_tokens: StepTokens,
        log_every: int = 1,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        """`sinks`: as from `open_sinks`; they are closed with this.

        `first_step` (from 1) is the first of this attempt. `flops_per_token`: FLOPs of training per token;
        `peak_flops`: FLOP/s of all devices together. Where one is None, so is `mfu`.
        """
        self._enabled = enabled
        self._sinks = sinks
        self._attempt = attempt
        self._total_steps = total_steps
        self._step_tokens = step_tokens
        self._log_every = log_every
        self._logged_step: int | None = None
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._began, self._tokens_before = time.perf_counter(), 0
        self._skipped_saves = 0
        if not enabled:
            return
        self._pace = Pace()
        self._progress = start_progress("step", total_steps, done=first_step - 1)

    def begin_step(self, tokens: int) -> None:
        """Start the clock of the step that follows ``tokens``; earlier saves are not part of its time."""
        self._began, self._tokens_before = time.perf_counter(), tokens

    def due(self, step: int) -> bool:
        """Whether to log `step`: every `log_every`-th and the last. The same on all ranks."""
        return step % self._log_every == 0 or step == self._total_steps

    def go_back(self, step: int, *, attempt: int) -> None:
        """Roll back to `step`: records of the new attempt replace those of later steps."""
        if not self._enabled:
            return
        self._attempt = attempt
        # The pace counts tokens forward only; after a return the difference of tokens would be negative.
        self._pace = Pace()
        for sink in self._sinks:
            sink.go_back(step)

    def log_step(
        self,
        step: int,
        *,
        tokens: int,
        loss: float,
        grad_norm: float,
        lr: float,
        skipped: str | None = None,
        groups: Mapping[str, Mapping[str, Scalar]] | None = None,
        **more: Scalar,
    ) -> None:
        """Record the end of a step.

        `step` counts from 1, `tokens` from the start of the run; `skipped`: the reason why the gradients were not
        applied, if so; `groups`: groups of scalars, such as the loss of each source; `more`: other scalars.
        """
        if not self._enabled:
            return
        step_s = time.perf_counter() - self._began
        tokens_per_s = (tokens - self._tokens_before) / step_s
        scalars: dict[str, Scalar] = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "step_s": step_s,
            "tokens_per_s": tokens_per_s,
            "mfu": self._mfu(tokens_per_s),
            **more,
        }
        shown = {group: values for group, values in (groups or {}).items() if values}
        fields: dict[str, Any] = {"tokens": tokens, **scalars, **shown}
        if skipped is not None:
            fields["skipped"] = skipped
        if failures := sum(sink.failures for sink in self._sinks):
            fields["sink_failures"] = failures
        self._logged_step = step
        self._write(step, fields, {"train": {**scalars, "tokens": tokens}, **shown})
        left_tokens = self._step_tokens.after(self._total_steps - step, tokens) - tokens
        left = self._pace.time_left_s(tokens, left_tokens, time.monotonic())
        self._progress.show(
            step,
            f"{short(tokens)} tokens  loss {loss:.4f}  grad norm {grad_norm:.3f}  lr {lr:.2e}  "
            f"{short(tokens_per_s)} tokens/s  left {time_text(left)}{'' if skipped is None else '  skipped'}",
        )

    def log_validation(self, step: int, *, tokens: int, losses: Mapping[str, ValidationLoss]) -> None:
        """Record the losses of all validation sets, by name, after `step`."""
        if not self._enabled:
            return
        sets: dict[str, dict[str, Any]] = {}
        for name, one in losses.items():
            sets[name] = {"loss": one.loss, "loss_by_position": one.by_position, **one.named_accuracies}
        # Groups of their own: the losses of the sets stand side by side, and not between those of all parts.
        groups: dict[str, Mapping[str, Scalar]] = {"validation": {name: one.loss for name, one in losses.items()}}
        for name, one in losses.items():
            for kind, share in one.named_accuracies.items():
                groups[f"validation_{kind}"] = {**groups.get(f"validation_{kind}", {}), name: share}
            digits = len(str(len(one.by_position) - 1))
            buckets = {f"{i:0{digits}}": loss for i, loss in enumerate(one.by_position)}
            groups[f"validation_by_position/{name}"] = buckets
        self._write(step, {"tokens": tokens, "validation": sets}, groups)
        text = "  ".join(
            " ".join(
                [
                    f"{name} {one.loss:.4f}",
                    *(f"{kind.replace('_', ' ')} {share:.2%}" for kind, share in one.named_accuracies.items()),
                ]
            )
            for name, one in losses.items()
        )
        self._progress.say(f"step {step}/{self._total_steps}  validation loss  {text}")

    def log_evaluation(
        self, step: int, *, tokens: int, scores: Mapping[str, Mapping[str, Scalar]], seconds: float
    ) -> None:
        """Record the ``scores`` of each task, by name, after ``step``; nothing if no task ran.

        The evaluation of a resumed run's first step has no line in metrics.jsonl: see ``log_goodput``.
        """
        if not self._enabled or not scores:
            return
        fields = {"tokens": tokens, "evaluation": scores, "evaluation_s": seconds} if step == self._logged_step else {}
        self._write(step, fields, {f"evaluation/{task}": of for task, of in scores.items()})
        # The first score of a task is the one that tables show first.
        first = ((task, *next(iter(of.items()))) for task, of in scores.items() if of)
        text = "  ".join(
            f"{task} {name} {'-' if value is None else format(value, '.4g')}" for task, name, value in first
        )
        self._progress.say(f"step {step}/{self._total_steps}  evaluation  {text}  ({seconds:.1f} s)")

    def log_save(
        self, step: int, *, tokens: int, saved_step: int, stall_s: float, write_s: float, num_bytes: int
    ) -> None:
        """Record, after ``step``, that the checkpoint of ``saved_step`` is durable.

        ``stall_s``: seconds of training's wait for it; ``write_s``: seconds until it was written.
        """
        if not self._enabled:
            return
        scalars = {"stall_s": stall_s, "write_s": write_s, "bytes_per_s": num_bytes / write_s}
        fields = {"checkpoint_step": saved_step, **{f"checkpoint_{name}": value for name, value in scalars.items()}}
        self._write(step, {"tokens": tokens, **fields}, {"checkpoint": scalars}, scalars_step=saved_step)

    def count_skipped_save(self, step: int) -> None:
        """Record that the checkpoint due at ``step`` was skipped: the previous one was still being written."""
        if not self._enabled:
            return
        self._skipped_saves += 1
        self._write(step, {}, {"checkpoint": {"skipped": self._skipped_saves}})

    def log_goodput(self, step: int, *, tokens: int, goodput: Goodput) -> None:
        """Record the goodput of the run up to `step`.

        In metrics.jsonl it joins this attempt's line of that step. Without one, as at the start of an attempt, nothing
        is written: the new line would replace the previous attempt's line of that step.
        """
        if not self._enabled:
            return
        # ``read_metrics`` joins the lines of one attempt for a step, and of several attempts takes the last one's.
        fields = {"tokens": tokens, "goodput": goodput.record()} if step == self._logged_step else {}
        self._write(step, fields, {"goodput": goodput.scalars()})
        self._progress.say(f"step {step}/{self._total_steps}  {goodput.sentence()}")

    def close(self) -> None:
        """Flush and close the sinks, and end the progress line."""
        if not self._enabled:
            return
        self._progress.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(
        self,
        step: int,
        fields: Mapping[str, Any],
        groups: Mapping[str, Mapping[str, Scalar]],
        *,
        scalars_step: int | None = None,
    ) -> None:
        scalars = {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}
        measurement = Measurement(
            step=step,
            attempt=self._attempt,
            time=timestamp(),
            fields=fields,
            scalars={tag: value for tag, value in scalars.items() if value is not None and math.isfinite(value)},
            scalars_step=scalars_step,
        )
        for sink in self._sinks:
            sink.write(measurement)

    def _mfu(self, tokens_per_s: float) -> float | None:
        if self._flops_per_token is None or self._peak_flops is None:
            return None
        return tokens_per_s * self._flops_per_token / self._peak_flops
