"""Checks of the machines of a run by all ranks together, in a second or less, at every start.

Every rank reads facts (`Machine.read`), the facts of all ranks go to all, and each rank draws the same conclusions. The
checks therefore detect a machine that differs from the others, and no rank waits for one that has left. A check with
the outcome `failed` stops the start; a `warning` is logged. `lightscale doctor` shows all results, with measurements.

    check_ranks      machines, equal versions, clocks, shared directory, disk      needs all ranks
    check_machine    the checks that need one machine only
"""

import contextlib
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.files import existing_part, size_text
from lightscale.models.adapters import trained_shapes
from lightscale.parallel.agreement import Agreement
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import directory_name, list_steps
from lightscale.training.checkpoints.manifest import read_manifest
from lightscale.training.checkpoints.reading import DamagedCheckpoint
from lightscale.training.health.check_result import CheckResult, Outcome, describe, merged
from lightscale.training.health.limits import Needs, check_limits
from lightscale.training.health.machine import Machine, host_name, judge_machine
from lightscale.training.optimizer.registry import full_checkpoint_bytes

_BYTES_PER_WEIGHT = 4
_BYTES_PER_EXPORTED = 2
"""In bf16."""
# What small files and other writers need meanwhile.
_SPARE_BYTES = 16 << 20
_CLOCK_LIMITS_S: dict[Outcome, float] = {"failed": 60.0, "warning": 2.0}
# Checkpoints on disk at once, where there is no configuration to say.
_KEEP = 2


def check_before_training(config: RunConfig, run: RunDirectory, ranks: Agreement, local_rank: int) -> list[str]:
    """The warnings, one line each. Raises UserError, on every rank, for faults that stop the run."""
    results = check_ranks(config, run.path, ranks, local_rank)
    hosts = ranks.on_all(host_name)
    failed, warned = (
        [f"{one.check}: {describe(one, hosts)}" for one in results if one.result == result]
        for result in ("failed", "warning")
    )
    if failed:
        raise UserError("\n".join(failed))
    return warned


def check_ranks(config: RunConfig | None, directory: Path, ranks: Agreement, local_rank: int) -> list[CheckResult]:
    """The quick checks of all `ranks` together; the same results on every rank.

    `directory`: of the run, existing or not; `config` gives the size of its checkpoints.
    """
    machines = ranks.on_all(lambda: Machine.read(local_rank))
    local_ranks = ranks.on_all(lambda: local_rank)
    device = "auto" if config is None else config.train.device
    results = []
    for rank, (machine, local) in enumerate(zip(machines, local_ranks, strict=True)):
        # Local ranks count from 0, so that this one alone proves that its machine has `local + 1` of them.
        own = judge_machine(machine, processes=local + 1, device=device)
        results += [replace(one, ranks=(rank,)) for one in own]
    local_size = max(local_ranks) + 1
    on_gpu = bool(machines[0].gpus) and device != "cpu"
    needs = Needs.of(config, local_ranks=local_size, num_ranks=ranks.size, on_gpu=on_gpu, are_running=True)
    limits = ranks.on_all(lambda: check_limits(needs))
    results += [replace(one, ranks=(rank,)) for rank, own in enumerate(limits) for one in own]
    results = merged(results, ranks.size)
    if ranks.size > 1:
        results += [*judge_alike(machines), *check_clocks(ranks), *check_shared(ranks, directory)]
    # The directory is shared (just checked): one rank's view of its free space is enough.
    results += ranks.on_first(lambda: check_disk(config, directory))
    return results


def check_machine(config: RunConfig | None, directory: Path, processes: int | None = None) -> list[CheckResult]:
    """The quick checks of this machine alone. `processes`: ranks that will run here, if known."""
    device = "auto" if config is None else config.train.device
    machine = Machine.read()
    on_gpu = bool(machine.gpus) and device != "cpu"
    # As `lightscale train` starts them: one for each GPU, or those of one replica of the model.
    parts = 1 if config is None else config.parallel.tensor * config.parallel.pipeline * config.parallel.sequence
    local_ranks = processes or (len(machine.gpus) if on_gpu else parts)
    needs = Needs.of(config, local_ranks=local_ranks, num_ranks=max(local_ranks, parts), on_gpu=on_gpu)
    return [
        *judge_machine(machine, processes=processes or 1, device=device),
        *check_limits(needs),
        *check_disk(config, directory),
    ]


def judge_alike(machines: Sequence[Machine]) -> list[CheckResult]:
    """Versions and GPUs that are not the same on all ranks; by rank."""
    results = []
    names = sorted({name for machine in machines for name in machine.versions})
    of_all = {name: [machine.versions.get(name, "none") for machine in machines] for name in names}
    of_all["GPU"] = [machine.gpus[0].name if machine.gpus else "none" for machine in machines]
    of_all["driver"] = [machine.driver or "none" for machine in machines]
    for name, values in of_all.items():
        # No version is right by itself: the most common one is, and who differs from it is named.
        usual = Counter(values).most_common(1)[0][0]
        for value in sorted(set(values) - {usual}):
            ranks = tuple(rank for rank, one in enumerate(values) if one == value)
            results.append(
                CheckResult(
                    check="all alike",
                    # Other versions compute other numbers, or cannot talk to each other; other GPUs are only slower.
                    result="warning" if name in ("driver", "GPU") else "failed",
                    found=f"{name} {value}, on most ranks {usual}",
                    right="one environment for all ranks" if name in machines[0].versions else "equal nodes",
                    ranks=ranks,
                    blames_host=2 * len(ranks) < len(machines),
                )
            )
    return results or [CheckResult(check="all alike", result="ok", found=f"versions and GPUs of {len(machines)} ranks")]


def check_clocks(ranks: Agreement, clock: Callable[[], float] = time.time) -> list[CheckResult]:
    """Clocks that differ from most others.

    An exchange cannot have ended anywhere before it began everywhere. Where the clocks say so, they differ by at least
    that much; a busy machine or a slow network is never taken for a difference.
    """
    # The first exchange opens connections: without it the two below would be far apart, and hide small differences.
    ranks.on_all(lambda: None)
    began = ranks.on_all(clock)
    ended = ranks.on_all(clock)
    # A lower bound for each pair of clocks; `apart[a][b]` is how far a is ahead of b.
    everyone = range(ranks.size)
    apart = [[_apart(began[a], ended[a], began[b], ended[b]) for b in everyone] for a in everyone]
    results: list[CheckResult] = []
    for result, limit_s in _CLOCK_LIMITS_S.items():
        named = {rank for one in results for rank in one.ranks}
        # From at least half of the ranks: right clocks differ from the wrong ones too, but those are fewer.
        wrong = [rank for rank in everyone if 2 * sum(abs(one) > limit_s for one in apart[rank]) >= ranks.size]
        for rank in sorted({*wrong} - named):
            least_s = max(apart[rank], key=abs)
            results.append(
                CheckResult(
                    check="clocks",
                    result=result,
                    found=f"at least {abs(least_s):.0f} s {'ahead of' if least_s > 0 else 'behind'} others",
                    right="less than 2 s; synchronize all hosts with one time server (chrony, NTP)",
                    ranks=(rank,),
                    blames_host=2 * len(wrong) < ranks.size,
                )
            )
    ok = f"less than {_CLOCK_LIMITS_S['warning']:.0f} s apart, within measurement error"
    return results or [CheckResult(check="clocks", result="ok", found=ok)]


def _apart(began: float, ended: float, others_began: float, others_ended: float) -> float:
    """Lower bound of how far one clock is ahead of another; negative: behind; 0: no difference can be proven."""
    return max(0.0, began - others_ended) - max(0.0, others_began - ended)


def check_shared(ranks: Agreement, directory: Path) -> list[CheckResult]:
    """Whether all ranks see one and the same `directory`, or the part of its path that exists.

    All ranks try to create a file of one name, which only one of them can, and then read it: a rank that does not see
    what most others see sees another directory.
    """
    existing = ranks.on_first(lambda: existing_part(directory))
    name = ranks.on_first(lambda: f".preflight-{uuid.uuid4().hex}")
    # A file of each rank's own, linked to the common name: what is read there is complete.
    draft = existing / f"{name}-{ranks.rank}"
    seen = ranks.on_all(lambda: _offer(draft, existing / name, str(ranks.rank)))
    # Only the rank that created the common file removes it, and all have read it by now.
    with contextlib.suppress(OSError):
        draft.unlink()
        if seen[ranks.rank] == str(ranks.rank):
            (existing / name).unlink()
    usual = Counter(seen).most_common(1)[0][0]
    results = []
    for other in sorted(set(seen) - {usual}):
        own = tuple(rank for rank, one in enumerate(seen) if one == other)
        what = "is a different directory than on the other ranks" if other.isdecimal() else other
        results.append(
            CheckResult(
                check="shared directory",
                result="failed",
                found=f"{existing} {what}",
                right="one file system, mounted and writable on all hosts, for the run directory",
                ranks=own,
                blames_host=2 * len(own) < ranks.size,
            )
        )
    # A number is the rank whose file was read; anything else is an error, here that of most ranks.
    if usual.isdecimal():
        return results or [
            CheckResult(check="shared directory", result="ok", found=f"all ranks see the same {existing}")
        ]
    return [
        *results,
        CheckResult(
            check="shared directory", result="failed", found=f"{existing} {usual}", right="a writable directory"
        ),
    ]


def check_disk(config: RunConfig | None, directory: Path) -> list[CheckResult]:
    """Whether the next checkpoints fit on the disk of the run."""
    existing = existing_part(directory)
    free = shutil.disk_usage(existing).free
    size, origin = checkpoint_bytes(config, RunDirectory(directory))
    if size is None:
        return [CheckResult(check="disk", result="ok", found=f"{size_text(free)} free in {existing}; {origin}")]
    # One more than are kept: a new one is whole before an old one is removed.
    newest = 1 + (_KEEP if config is None else config.checkpoint.keep)
    most = newest if config is None else max(newest, config.num_kept(newest))
    missing = max(1, most - len(list_steps(RunDirectory(directory).checkpoints)))
    found = f"{size_text(free)} free in {existing}; a checkpoint is {size_text(size)} ({origin})"
    needed, right = missing * size, f"for {missing} more"
    next_save = size
    if config is not None and (left := weights_left(config, RunDirectory(directory))):
        weights = weights_bytes(config)
        found += f", a weights-only checkpoint {size_text(weights)}"
        needed, right = needed + left * weights, f"{right}, and {left} weights-only until the end of the run"
        next_save += weights
    if config is not None and (left := exports_left(config, RunDirectory(directory))):
        found += f", an export {size_text(export_bytes(config))}"
        needed, right = needed + left * export_bytes(config), f"{right}, and {left} exports until the end of the run"
    if free >= needed:
        return [CheckResult(check="disk", result="ok", found=found)]
    outcome: Outcome = "failed" if free < next_save else "warning"
    return [CheckResult(check="disk", result=outcome, found=found, right=f"{size_text(needed)} free, {right}")]


def weights_left(config: RunConfig, run: RunDirectory) -> int:
    """Number of remaining checkpoints of the weights alone of `run`, which are never removed."""
    due = config.own_multiples(config.checkpoint.keep_weights_every)
    return max(0, due - len(list_steps(run.checkpoints, "weights")))


def exports_left(config: RunConfig, run: RunDirectory) -> int:
    """Number of remaining exports of `run`, which are never removed either."""
    written = sum(step > config.parent_steps for step in list_steps(run.exports))
    return max(0, config.own_multiples(config.checkpoint.export_every) - written)


def export_bytes(config: RunConfig) -> int:
    """Bytes of one of them."""
    return _num_parameters(config) * _BYTES_PER_EXPORTED


def weights_bytes(config: RunConfig) -> int:
    """Bytes of one checkpoint of the weights alone."""
    return _num_parameters(config) * _BYTES_PER_WEIGHT


def checkpoint_bytes(config: RunConfig | None, run: RunDirectory) -> tuple[int | None, str]:
    """Bytes of one checkpoint of `run`, and where the number comes from."""
    # A checkpoint of this run is the best measure; before the first one, its parameters.
    for step in reversed(list_steps(run.checkpoints)):
        path = run.checkpoints / directory_name(step)
        try:
            files = read_manifest(path).files
        except DamagedCheckpoint:
            continue
        return sum(record.num_bytes for record in files.values()) + _SPARE_BYTES, f"as {path.name}"
    if config is None:
        return None, "no configuration given; the checkpoint size is unknown"
    return full_checkpoint_bytes(config) + _SPARE_BYTES, f"{_num_parameters(config):,} parameters"


def _num_parameters(config: RunConfig) -> int:
    return sum(prod(shape) for shape in trained_shapes(config).values())


def _offer(draft: Path, path: Path, text: str) -> str:
    """Write `text` to `path` unless another rank has; what `path` holds then, or the system's error."""
    try:
        draft.write_text(text, encoding="ascii")
        # A link is made by only one process, on all file systems, and with its content in place.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        return path.read_text(encoding="ascii")
    except OSError as error:
        return f"cannot be written to ({error.strerror})" if draft.parent.is_dir() else "does not exist on this host"


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
