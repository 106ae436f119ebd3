"""Profiles of chosen steps: a trace of operations over time, and a snapshot of allocated memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from lightscale.parallel.mesh import Mesh
from lightscale.training.health.memory import peak_memory_bytes

_TABLE_ROWS = 50


class StepProfiler:
    """Records the steps ``first`` … ``last`` of every rank into ``directory``.

    rank-RRRRR.trace.json     a trace for chrome://tracing or Perfetto
    rank-RRRRR.memory.pickle  on GPUs: the allocator's history, for pytorch.org/memory_viz
    rank-RRRRR.memory.txt     on CPUs: the operators that allocated most, and the peak of the process
    """

    def __init__(self, steps: tuple[int, int] | None, directory: Path, mesh: Mesh) -> None:
        self._steps, self._directory, self._mesh = steps, directory, mesh
        self._profile: profile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._profile is not None:
            self._finish()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surrounds step ``number`` (from 1)."""
        # "<=" and not "==": a run that was stopped between the two continues recording when it is resumed.
        if self._profile is None and self._steps is not None and self._steps[0] <= number <= self._steps[1]:
            self._start()
        yield
        if self._profile is not None and self._steps is not None and number == self._steps[1]:
            self._finish()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._mesh.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history()
        self._profile = profile(
            activities=activities,
            profile_memory=True,
            record_shapes=True,
            # On CPUs the states of sequence ranks are exchanged on a thread of their own.
            experimental_config=_ExperimentalConfig(profile_all_threads=self._mesh.device.type == "cpu"),
        )
        self._profile.start()

    def _finish(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        stem = str(self._directory / f"rank-{self._mesh.rank:05d}")
        self._profile.export_chrome_trace(f"{stem}.trace.json")
        if self._mesh.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(f"{stem}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            table = self._profile.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=_TABLE_ROWS)
            text = f"{table}\npeak of the process: {peak_memory_bytes():,} bytes\n"
            Path(f"{stem}.memory.txt").write_text(text, "utf-8")
        self._profile = None
