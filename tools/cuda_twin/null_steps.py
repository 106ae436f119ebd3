"""Real training steps of a rank on the null device.

The training loop is lightscale's own: store, loader, prefetching, engine, guard, optimizer, metrics, validation,
saves. Four things are not: weights are not drawn, as nothing is computed with them; a Triton kernel is checked in
place of its launch (``triton_checks.py``), unless the case asks for compiled ones; what kernels compute is not compared
at start; and other ranks are not there (``lone_rank.py``). A case that saves nothing is not asked for a disk on which
its checkpoints fit.
"""

import functools
import os
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from cuda_twin.computing import Computing
from cuda_twin.lone_rank import lone_rank
from cuda_twin.recorded import peak
from cuda_twin.recorded.accesses import Accesses, AccessNotes
from cuda_twin.recorded.kinds import WORK, Kind
from cuda_twin.recorded.records import Recorder, Recording, demangled
from cuda_twin.recorded.waits import forgetting, noted, waits_of
from cuda_twin.triton_checks import TritonChecks, checked_launches
from lightscale.config.files import load
from lightscale.config.layout import check_layout
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.loading.prefetch import Prefetcher
from lightscale.data_pipeline.store.token_store import StoreWriter
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.launch.doctor.examine import judge_kernels
from lightscale.models.kernel_check import Mismatch, check_kernels
from lightscale.parallel.device.settings import device_settings
from lightscale.planning.memory import rank_memory
from lightscale.runs.run_directory import RunDirectory
from lightscale.training import build, preflight
from lightscale.training import train as training
from lightscale.training.checkpoints.saving import Saver
from lightscale.training.health.heartbeat import Heartbeat

STEPS = 2
"""The first step fills caches, the second one is like all others."""
_LATE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class NullCase:
    """One rank's run."""

    config: str
    overrides: list[str] = field(default_factory=list)
    world_size: int = 1
    rank: int = 0
    micro_batches: int = 2
    """Of a step on this rank."""
    documents: int = 1
    """In a sequence."""
    steps: int = STEPS
    validate: bool = False
    save: bool = False
    """Save after each step, stop before the last two, and resume. Only in a world of one."""
    compiled: bool = False
    """Triton kernels are compiled and launched on the null device."""
    drawn: bool = False
    """Weights are drawn, which takes main memory and time."""
    kernels_only: bool = False
    """Nothing is trained: kernels are compared with their chunked forms, as ``lightscale doctor`` does."""
    waits_tried: bool = False
    """Each wait of a stream in the last step is left out of the records once, to see whether it is missed."""
    forgets: str = ""
    """What lightscale is made to forget: one of ``waits.FORGETTABLE``."""


def configuration(case: NullCase, store: Path) -> RunConfig:
    """The run of ``case``, on a store of its own."""
    config = load(Path(case.config), case.overrides)
    per_step = config.train.micro_batch_size * case.micro_batches
    ranks = config.parallel.tensor * config.parallel.pipeline * config.parallel.sequence
    changes: dict[str, dict[str, Any]] = {
        "data": {
            "store": str(store),
            "sources": {},
            "curriculum": [],
            "validation": {"held": {"source": "held", "sequences": config.train.micro_batch_size}},
        },
        "train": {
            "steps": case.steps,
            "tokens": None,
            "global_batch_size": per_step * (case.world_size // ranks),
            "validate_every": int(case.validate),
        },
        "metrics": {"sinks": ["jsonl"]},
        "optimizer": {"schedule": "constant", "warmup_steps": 0},
    }
    made = config.model_dump()
    for section, values in changes.items():
        made[section].update(values)
    if not case.validate:
        made["data"]["validation"] = {}
    made["checkpoint"]["every"] = 1 if case.save else 10**6
    return RunConfig.model_validate(made)


def write_store(path: Path, *, sequence_length: int, documents: int, vocab_size: int) -> None:
    """A few windows of random tokens, cut into documents of equal length."""
    eot = min(256, vocab_size - 1)
    ranks = {bytes([byte]): byte for byte in range(eot)}
    tokenizer = TiktokenTokenizer(
        name="bytes", pat_str=r"(?s:.+)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": eot}
    )
    generator = np.random.default_rng(0)
    length = max(2, sequence_length // documents)
    with StoreWriter(path, tokenizer, shard_tokens=1 << 20, chunk_tokens=1 << 16) as store:
        for name, windows in (("text", 4), ("held", 2)):
            source = store.source(name)
            for _ in range(windows * documents + 1):
                source.append(generator.integers(0, eot, length - 1, dtype=np.uint32), num_bytes=length - 1)
        store.finish({})


@contextmanager
def _alone(case: NullCase) -> Iterator[None]:
    """The environment of the rank, and what of the others it needs."""
    local = min(case.world_size, 8)
    variables = {
        "RANK": case.rank,
        "WORLD_SIZE": case.world_size,
        # A null device for each process: this one has its own, whichever of its node it would have.
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}))
        stack.enter_context(lone_rank(case.rank, case.world_size))
        if not case.drawn:
            stack.enter_context(mock.patch.object(build, "draw_weights"))
        if not case.save:
            # Would commit pinned memory of the size of the rank's state.
            stack.enter_context(mock.patch.object(Saver, "reserve"))
            stack.enter_context(mock.patch.object(training.SavePolicy, "contents_due", return_value=()))
            # A start is refused where no checkpoint fits: 83 GB of 7B, of which nothing will be written.
            stack.enter_context(mock.patch.object(preflight, "check_disk", return_value=[]))
        yield


@dataclass(kw_only=True)
class _Steps:
    """The steps of a run, each recorded as it is taken."""

    recorder: Recorder = field(default_factory=Recorder)
    notes: AccessNotes = field(default_factory=AccessNotes)
    last: Recording | None = None
    found: list[dict[str, Any]] = field(default_factory=list)
    began_us: list[int] = field(default_factory=list)
    second: threading.Event = field(default_factory=threading.Event)
    """Whether the second step has begun."""

    def recorded(self, step: Any) -> Any:
        """`Trainer._train_step`, recorded."""

        @functools.wraps(step)
        def take(trainer: training.Trainer, *words: Any) -> None:
            self.began_us.append(time.time_ns() // 1000)
            if len(self.began_us) > 1:
                self.second.set()
            torch.cuda.reset_peak_memory_stats()
            try:
                with self.recorder.record() as recording:
                    step(trainer, *words)
            except BaseException:
                self.second.set()  # it will not come, and the prefetcher is waited for
                raise
            most, now = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
            self.last = recording
            self.found.append({**summary(recording), "peak_bytes": most, "held_bytes": now})

        return take

    def read_late(self, read: Any) -> Any:
        """`Prefetcher._batches_after` on a slow disk: what is read ahead is not read before the second step.

        All that it allocates shows there.
        """

        @functools.wraps(read)
        def take(ahead: Prefetcher, tokens: int) -> Any:
            assert not tokens or self.second.wait(_LATE_S), "the second step did not start"
            return read(ahead, tokens)

        return take


def _mark(recorder: Recorder) -> Callable[..., None]:
    """In place of `Heartbeat.beat`: activities divide the recording."""

    def beat(_: Heartbeat, activity: str, **__: Any) -> None:
        recorder.mark(activity)

    return beat


def _stop_after(last: int, step: Any) -> Any:
    """`Trainer._train_step`, which after the step `last` stops the run as a cluster would; a start resumes it."""

    @functools.wraps(step)
    def take(trainer: training.Trainer, *words: Any) -> None:
        step(trainer, *words)
        if trainer.step == last:
            os.kill(os.getpid(), signal.SIGTERM)

    return take


def _those_that_do_not_run(checks: TritonChecks) -> Callable[..., list[Mismatch]]:
    """`check_kernels`, whose other findings do not count: no kernel has computed anything."""

    def refused(*words: Any, **options: Any) -> list[Mismatch]:
        found = [one for one in check_kernels(*words, **options) if one.result == "-"]
        checks.faults.update(map(str, found))
        return found

    return refused


@contextmanager
def _watched(case: NullCase, steps: _Steps, checks: TritonChecks) -> Iterator[None]:
    """The rank on the null device, with its steps and launches watched."""
    with ExitStack() as stack:
        stack.enter_context(_alone(case))
        step = steps.recorded(training.Trainer._train_step)
        # The first step of a start fills caches: the one that is looked at is the second one behind the resume.
        step = _stop_after(case.steps - STEPS, step) if case.save else step
        read = steps.read_late(Prefetcher._batches_after)
        stack.enter_context(mock.patch.object(training.Trainer, "_train_step", step))
        stack.enter_context(mock.patch.object(Prefetcher, "_batches_after", read))
        stack.enter_context(mock.patch.object(Heartbeat, "beat", _mark(steps.recorder)))
        stack.enter_context(mock.patch.object(training, "check_kernels", _those_that_do_not_run(checks)))
        if not case.compiled:
            stack.enter_context(checked_launches(checks, steps.recorder, steps.notes))
        # Tokens and documents are what the store has, wherever shapes depend on them; the guard sees a loss of 1.
        stack.enter_context(Computing(whole_numbers_only=True))
        stack.enter_context(noted(steps.notes))
        stack.enter_context(forgetting(case.forgets))
        yield


def _train(config: RunConfig, directory: RunDirectory, *, resumed: bool) -> None:
    """To the end, with `resumed` in two starts."""
    # As the command does. Not the allocator's: the null device does not map memory piece by piece.
    settings = device_settings(os.environ, tensor=config.parallel.tensor)
    os.environ.update({name: value for name, value in settings.items() if name.startswith("CUDA_")})
    peak.begin()
    for expected in ("resumable", "finished") if resumed else ("finished",):
        status = training.train(config, directory)
        assert status == expected, status


def run(case: NullCase, folder: Path) -> dict[str, Any]:
    """Train, and return what was asked of the device in each step."""
    store = folder / "store"
    plain = load(Path(case.config), case.overrides)
    if case.kernels_only:
        return _compare_kernels(plain, case)
    length, vocab_size = plain.data.sequence_length, plain.model.vocab_size
    write_store(store, sequence_length=length, documents=case.documents, vocab_size=vocab_size)
    config = configuration(case, store)
    directory = RunDirectory(folder / "run")
    directory.create(config)
    steps, checks = _Steps(), TritonChecks()
    # Warnings that a user would see, each once.
    with _watched(case, steps, checks), warnings.catch_warnings(record=True) as warned:
        _train(config, directory, resumed=case.save)
    assert steps.last is not None
    layout = check_layout(config, case.world_size)
    planned = rank_memory(config, layout, case.rank // (case.world_size // config.parallel.pipeline))
    return {
        "case": asdict(case),
        "layout": asdict(layout),
        "layers": config.model.num_layers,
        "ranks_of_a_replica": config.parallel.tensor * config.parallel.sequence,
        "planned": {**asdict(planned), "total_bytes": planned.total_bytes},
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "peak_by_line": peak.end(since_us=steps.began_us[0]),
        "faults": dict(checks.faults),
        "large": dict(checks.large),
        "warnings": sorted({f"{one.category.__name__}: {one.message}" for one in warned}),
        "waits": waits_of(steps.recorder, steps.notes, steps.last, tried=case.waits_tried),
        "steps": steps.found,
    }


def _compare_kernels(config: RunConfig, case: NullCase) -> dict[str, Any]:
    """What the doctor asks of a device to compare the kernels of `config`, as if it were the one step of a run."""
    recorder, notes, checks = Recorder(), AccessNotes(), TritonChecks()
    with ExitStack() as stack:
        if not case.compiled:
            stack.enter_context(checked_launches(checks, recorder, notes))
            stack.enter_context(Computing(whole_numbers_only=True))
            stack.enter_context(Accesses(notes))
        began = _cpu_s()
        with recorder.record() as recording:
            recorder.mark("kernels compared")
            found = judge_kernels(config, torch.device("cuda", 0)).found
        host_s = _cpu_s() - began
    return {
        "case": asdict(case),
        "faults": {**checks.faults, **({found: 1} if "does not run" in found else {})},
        "steps": [{**summary(recording), "peak_bytes": torch.cuda.max_memory_allocated()}],
        "accessed_bytes": recording.accessed_bytes,
        "host_s": host_s,
    }


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it has started and that have ended, such as compilers."""
    return sum(os.times()[:4])


def summary(recording: Recording) -> dict[str, Any]:
    """Of one step, as JSON takes it."""
    activities = {}
    for name, part in recording.sections():
        activities[name] = {kind.name.lower(): part.count(kind) for kind in Kind if part.count(kind)}
    kernels = recording.calls(Kind.LAUNCH)
    names = demangled(kernels)
    launches: Counter[str] = Counter()
    for name, count in kernels.items():
        launches[names[name]] += count
    return {
        "launches": {kind.name.lower(): recording.count(kind) for kind in WORK},
        "launches_in_all": recording.count(*WORK),
        "activities": activities,
        "kernels": dict(launches.most_common()),
        "triton": dict(recording.calls(Kind.TRITON).most_common()),
        "product_flops": recording.product_flops,
        "collectives": [
            {"group": group, "ranks": ranks, "call": call, "stream": stream, "calls": calls, "bytes": num_bytes}
            for (group, ranks, call, stream), (calls, num_bytes) in recording.collectives().items()
        ],
        "copies": {name: {"count": count, "bytes": size} for name, (count, size) in recording.copies().items()},
        "host_waits": [
            {"call": wait.call, "where": wait.where, "count": count}
            for wait, count in recording.host_waits.most_common()
        ],
        "host_waits_in_all": sum(recording.host_waits.values()),
        "allocations": dict(recording.calls(Kind.ALLOCATE)),
        "streams": {hex(stream): dict(counts) for stream, counts in recording.streams().items()},
        "unknown": dict(recording.calls(Kind.UNKNOWN)),
    }
