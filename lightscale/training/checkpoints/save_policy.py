"""When a run is saved, and how each save ended: due by steps or by time, one save at a time, failures counted.

    contents_due -> save (begins it)    at the end of a step
    collect -> finish (records it)      at the end of each later step, until it is durable

``saving.py`` writes; this module adds events, metrics, heartbeats, and the limit of failures.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightscale.config.schema import CheckpointConfig
from lightscale.parallel.engine import Engine
from lightscale.runs.followers import needed
from lightscale.runs.journal import Journal
from lightscale.runs.metrics.logger import MetricsLogger
from lightscale.runs.run_directory import RunDirectory, read_lines
from lightscale.runs.save_interval import SaveInterval
from lightscale.training.checkpoints.directories import Contents, Retention
from lightscale.training.checkpoints.exports import Exports
from lightscale.training.checkpoints.saving import NotFinite, SaveError, Saver
from lightscale.training.health.heartbeat import Heartbeat

# Of the events, which name the directories.
_FIELDS: dict[Contents, str] = {"full": "checkpoint", "weights": "weights"}

Largest = Callable[[int], int]
"""Maximum over the ranks of a number of each; collective."""


class SavePolicy:
    """Saves the run of ``engine``; every method is collective over its ranks, at the end of a step."""

    def __init__(
        self,
        config: CheckpointConfig,
        directory: RunDirectory,
        journal: Journal,
        heartbeat: Heartbeat,
        *,
        engine: Engine,
        largest: Largest,
        only_finite: bool,
        parent_steps: int = 0,
        export_options: Sequence[str] = (),
    ) -> None:
        self._config, self._journal, self._heartbeat, self._engine = config, journal, heartbeat, engine
        self._largest = largest
        is_first = engine.mesh.rank == 0
        every = config.export_every if is_first else None
        self.exports = Exports(directory, journal, every=every, after=parent_steps, options=export_options)
        """Those of rank 0."""
        followed = partial(needed, directory)
        self.saver = Saver(
            directory.checkpoints,
            engine.mesh,
            needed=lambda steps: followed(steps) | self.exports.needed(steps),
            only_finite=only_finite,
        )
        # Costs of earlier attempts, so that a restarted run need not begin with the first guess of the interval.
        events = read_lines(directory.events)
        self._interval = SaveInterval(
            mtbf_s=3600 * config.mtbf_hours,
            now_s=time.monotonic(),
            stalls_s=[
                event["stall_s"]
                for event in events
                if event["event"] == "checkpoint" and event.get("stall_s") is not None
            ],
        )
        # In a row, of this attempt.
        self._failures = 0
        self.not_finite: str | None = None
        """Why the last save was refused, if the state was not finite: the run must go back."""

    def contents_due(self, step: int, *, leaving: bool) -> tuple[Contents, ...]:
        """The contents to save after ``step``; ``leaving``: it is the last one."""
        every = self._config.keep_weights_every
        is_full = leaving or self._is_exported(step) or self.is_due(step)
        full: tuple[Contents, ...] = ("full",) if is_full else ()
        return (*full, "weights") if every is not None and step % every == 0 else full

    def _is_exported(self, step: int) -> bool:
        every = self._config.export_every
        return every is not None and step % every == 0

    def is_due(self, step: int) -> bool:
        """Whether a full checkpoint is due after ``step``."""
        if self._config.every is not None:
            return step % self._config.every == 0
        # By the clock of rank 0: clocks differ, and all ranks must save after the same step. Not while a save is being
        # written: the disk is then slower than the interval expects.
        is_first = self._engine.mesh.rank == 0
        return not self.saver.is_writing and bool(self._largest(is_first and self._interval.due(time.monotonic())))

    def collect(self, step: int, metrics: MetricsLogger, tokens: int) -> None:
        """Record how the save in flight ended, once it has ended on all ranks."""
        self.exports.poll()
        # Finishing on one rank alone would let it continue to a collective (retention, the next save) that others miss.
        if self.saver.is_writing and not self._largest(not self.saver.is_written):
            self.finish(step, metrics, tokens)

    def skips(self, step: int, metrics: MetricsLogger, contents: Sequence[Contents], *, leaving: bool) -> bool:
        """Whether there is no save after ``step`` because the one before is still being written; counts and notes it.

        The last state, and steps whose weights or exports were asked for, are saved in any case, however long the save
        before them still takes.
        """
        if not self.saver.is_writing or leaving or "weights" in contents or self._is_exported(step):
            return False
        # The disk is slower than saves are due. Steps do not wait for it; the skipped save is counted.
        metrics.count_skipped_save(step)
        self._journal.note("checkpoint_skipped", step=step, reason="the previous save is still being written")
        return True

    def save(
        self,
        step: int,
        metrics: MetricsLogger,
        tokens: int,
        *,
        state: Mapping[str, Any],
        facts: Mapping[str, Any],
        about: Mapping[str, Any],
        contents: Sequence[Contents],
        checks_s: float,
        prune: bool,
        leaving: bool,
    ) -> None:
        """Begin a checkpoint of ``step``; with ``leaving``, the last one, also wait until it is durable.

        Args:
            tokens: trained on so far.
            state, facts, about, contents: see ``Saver.begin``.
            checks_s: seconds that comparisons before this save took: they are part of what it costs.
            prune: whether older checkpoints may be removed.
        """
        if self.saver.is_writing:
            self.finish(step, metrics, tokens)
        self._heartbeat.beat("saving", step=step)
        retention = Retention(keep=self._config.keep, keep_every=self._config.keep_every) if prune else None
        stall_s = self.saver.begin(
            self._engine,
            step=step,
            common=state,
            facts=facts,
            about=about,
            retention=retention,
            contents=contents,
            stalled_s=checks_s,
        )
        if leaving or not self._config.asynchronous:
            stall_s = self.finish(step, metrics, tokens, leaving=leaving)
        # Also after a failed save: the next one is due after an interval, not at the next step. Weights alone save no
        # progress, and cost less.
        if "full" in contents:
            self._interval.saved(time.monotonic(), stall_s)

    def finish(self, step: int, metrics: MetricsLogger, tokens: int, *, leaving: bool = False) -> float:
        """Wait for the save in flight and record how it ended.

        A failure stops the training only after ``checkpoint.max_failures`` in a row, or when the run is ``leaving``.
        Returns the seconds that training has waited for the save, from its copy to now.
        """
        # The wait may be as long as the disk is slow; the watchdog allows this activity more time than a step.
        self._heartbeat.beat("saving", step=step)
        began = time.perf_counter()
        try:
            saved = self.saver.finish()
        except NotFinite as error:
            # No fault of the disk: more saves of this state would fail too, and are not waited for.
            self.not_finite = str(error)
            self._journal.event("state_not_finite", step=step, reason=str(error))
            return time.perf_counter() - began
        except SaveError as error:
            self._failures += 1
            self._journal.note("checkpoint_failed", step=step, reason=str(error), in_a_row=self._failures)
            # A full disk may pass, and the checkpoints before are intact: one failed save costs nothing yet.
            if leaving or self._failures >= self._config.max_failures:
                raise
            self._journal.say(f"{error}; training continues")
            return time.perf_counter() - began
        self._failures = 0
        # The checks, the copy, and what training has just waited for the write: about 0 for a save in the background.
        stall_s = saved.stall_s + time.perf_counter() - began
        costs: dict[str, Any] = {"stall_s": stall_s, "write_s": saved.write_s, "num_bytes": saved.num_bytes}
        metrics.log_save(step, tokens=tokens, saved_step=saved.step, **costs)
        where: dict[str, Any] = {"step": saved.step, "tokens": saved.facts["tokens"]}
        where |= {_FIELDS[contents]: path.name for contents, path in saved.paths.items()}
        if "full" in saved.paths:
            self._journal.note("checkpoint", **where, removed=saved.removed, **costs)
            self.exports.saved(saved.step)
        else:
            # By another name: whoever counts checkpoints means those that a run continues from.
            self._journal.note("weights", **where, **costs)
        if saved.problem is not None:
            self._journal.say(saved.problem)
        return stall_s
