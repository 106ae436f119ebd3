"""What a run needs of its machines, looked at by all ranks together in a second or less, at every start.

Every rank reads facts (`Machine.read`), all ranks get those of all, and each draws the same conclusions: so a machine
that differs from the others is seen, and no rank waits for one that has left. What `failed` keeps a run from starting.
`lightscale doctor` shows all findings, and measures in addition.
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
from lightscale.models.accounting import parameter_shapes
from lightscale.parallel.agreement import Agreement
from lightscale.runs.run_directory import RunDirectory
from lightscale.training.checkpoints.directories import directory_name, list_steps
from lightscale.training.checkpoints.manifest import DamagedCheckpoint, read_manifest
from lightscale.training.health.check_result import Finding, Result, describe, merged, size_text
from lightscale.training.health.machine import Machine, host_name, judge_machine

# fp32 weights and two moments, and what small files and other writers need meanwhile.
_BYTES_PER_PARAMETER = 12
_SPARE_BYTES = 16 << 20
_CLOCK_LIMITS_S: dict[Result, float] = {"failed": 60.0, "warning": 2.0}
# Checkpoints on disk at once, where no configuration says it.
_KEEP = 2


def check_before_training(config: RunConfig, run: RunDirectory, ranks: Agreement, local_rank: int) -> list[str]:
    """What was warned of, in words. Raises UserError, on every rank, for what keeps the run from working."""
    findings = check_ranks(config, run.path, ranks, local_rank)
    hosts = ranks.on_all(host_name)
    failed, warned = (
        [f"{one.check}: {describe(one, hosts)}" for one in findings if one.result == result]
        for result in ("failed", "warning")
    )
    if failed:
        raise UserError("\n".join(failed))
    return warned


def check_ranks(config: RunConfig | None, directory: Path, ranks: Agreement, local_rank: int) -> list[Finding]:
    """The quick checks of all `ranks` together; the same findings on every rank.

    `directory`: of the run, or wherever one is to be; `config` gives the size of its checkpoints.
    """
    machines = ranks.on_all(lambda: Machine.read(local_rank))
    local_ranks = ranks.on_all(lambda: local_rank)
    device = "auto" if config is None else config.train.device
    findings = []
    for rank, (machine, place) in enumerate(zip(machines, local_ranks, strict=True)):
        own = judge_machine(machine, processes=place + 1, device=device)
        findings += [replace(finding, ranks=(rank,)) for finding in own]
    findings = merged(findings, ranks.size)
    if ranks.size > 1:
        findings += [*judge_alike(machines), *check_clocks(ranks), *check_shared(ranks, directory)]
    findings += ranks.on_first(lambda: check_disk(config, directory))
    return findings


def check_machine(config: RunConfig | None, directory: Path, processes: int | None = None) -> list[Finding]:
    """The quick checks of this machine alone. `processes`: ranks that are to run here, if that is known."""
    device = "auto" if config is None else config.train.device
    machine = Machine.read()
    return [
        *judge_machine(machine, processes=processes or 1, device=device),
        *check_disk(config, directory),
    ]


def judge_alike(machines: Sequence[Machine]) -> list[Finding]:
    """Versions and GPUs that are not the same on all ranks; by rank."""
    findings = []
    names = sorted({name for machine in machines for name in machine.versions})
    of_all = {name: [machine.versions.get(name, "none") for machine in machines] for name in names}
    of_all["GPU"] = [machine.gpus[0].name if machine.gpus else "none" for machine in machines]
    of_all["driver"] = [machine.driver or "none" for machine in machines]
    for name, values in of_all.items():
        usual = Counter(values).most_common(1)[0][0]
        for value in sorted(set(values) - {usual}):
            ranks = tuple(rank for rank, one in enumerate(values) if one == value)
            findings.append(
                Finding(
                    check="all alike",
                    result="warning" if name in ("driver", "GPU") else "failed",
                    found=f"{name} {value}, elsewhere {usual}",
                    right="one environment for all ranks" if name in machines[0].versions else "equal nodes",
                    ranks=ranks,
                    blames_host=2 * len(ranks) < len(machines),
                )
            )
    return findings or [Finding(check="all alike", result="ok", found=f"versions and GPUs of {len(machines)} ranks")]


def check_clocks(ranks: Agreement, clock: Callable[[], float] = time.time) -> list[Finding]:
    """Clocks that differ from most others.

    An exchange cannot have ended anywhere before it began everywhere. Where the clocks say so, they differ by that much
    at least; how busy a machine is, or how slow the network, is never taken for a difference.
    """
    ranks.on_all(lambda: None)
    began = ranks.on_all(clock)
    ended = ranks.on_all(clock)
    everyone = range(ranks.size)
    apart = [[_apart(began[a], ended[a], began[b], ended[b]) for b in everyone] for a in everyone]
    findings: list[Finding] = []
    for result, limit_s in _CLOCK_LIMITS_S.items():
        named = {rank for finding in findings for rank in finding.ranks}
        # Most others: those that are right differ from the wrong ones too.
        wrong = [rank for rank in everyone if 2 * sum(abs(one) > limit_s for one in apart[rank]) >= ranks.size]
        for rank in sorted({*wrong} - named):
            least_s = max(apart[rank], key=abs)
            findings.append(
                Finding(
                    check="clocks",
                    result=result,
                    found=f"at least {abs(least_s):.0f} s {'ahead of' if least_s > 0 else 'behind'} others",
                    right="less than 2 s: let all hosts take their time from one server (chrony, NTP)",
                    ranks=(rank,),
                    blames_host=2 * len(wrong) < ranks.size,
                )
            )
    ok = f"less than {_CLOCK_LIMITS_S['warning']:.0f} s apart, as far as can be told"
    return findings or [Finding(check="clocks", result="ok", found=ok)]


def _apart(began: float, ended: float, others_began: float, others_ended: float) -> float:
    """By how much one clock is ahead of another, at least; negative: behind; 0: cannot be told."""
    return max(0.0, began - others_ended) - max(0.0, others_began - ended)


def check_shared(ranks: Agreement, directory: Path) -> list[Finding]:
    """Whether all ranks see one and the same directory: where `directory`, or the part of it that exists, is.

    Every rank offers a file under one name, which only one can get. All read it: who does not see the file of most
    others sees another directory.
    """
    place = ranks.on_first(lambda: existing_part(directory))
    name = ranks.on_first(lambda: f".preflight-{uuid.uuid4().hex}")
    draft = place / f"{name}-{ranks.rank}"
    seen = ranks.on_all(lambda: _offer(draft, place / name, str(ranks.rank)))
    with contextlib.suppress(OSError):
        draft.unlink()
        if seen[ranks.rank] == str(ranks.rank):
            (place / name).unlink()
    usual = Counter(seen).most_common(1)[0][0]
    findings = []
    for other in sorted(set(seen) - {usual}):
        own = tuple(rank for rank, one in enumerate(seen) if one == other)
        what = "is another directory than that of the other ranks" if other.isdecimal() else other
        findings.append(
            Finding(
                check="shared directory",
                result="failed",
                found=f"{place} {what}",
                right="one file system, mounted and writable on all hosts, for the run directory",
                ranks=own,
                blames_host=2 * len(own) < ranks.size,
            )
        )
    if usual.isdecimal():
        return findings or [Finding(check="shared directory", result="ok", found=f"all ranks see the same {place}")]
    return [
        *findings,
        Finding(check="shared directory", result="failed", found=f"{place} {usual}", right="a directory to write to"),
    ]


def check_disk(config: RunConfig | None, directory: Path) -> list[Finding]:
    """Whether the next checkpoints fit, where the run is or is to be."""
    place = existing_part(directory)
    free = shutil.disk_usage(place).free
    size, origin = checkpoint_bytes(config, RunDirectory(directory))
    if size is None:
        return [Finding(check="disk", result="ok", found=f"{size_text(free)} free in {place}; {origin}")]
    keep = _KEEP if config is None else config.checkpoint.keep
    # A new one is whole before an old one is removed.
    missing = max(1, keep + 1 - len(list_steps(RunDirectory(directory).checkpoints)))
    found = f"{size_text(free)} free in {place}; a checkpoint is {size_text(size)} ({origin})"
    right = f"{size_text(missing * size)} free, for {missing} more"
    if free >= missing * size:
        return [Finding(check="disk", result="ok", found=found)]
    return [Finding(check="disk", result="failed" if free < size else "warning", found=found, right=right)]


def checkpoint_bytes(config: RunConfig | None, run: RunDirectory) -> tuple[int | None, str]:
    """Bytes of one checkpoint of `run`, and how that is known."""
    for step in reversed(list_steps(run.checkpoints)):
        path = run.checkpoints / directory_name(step)
        try:
            files = read_manifest(path).files
        except DamagedCheckpoint:
            continue
        return sum(record.num_bytes for record in files.values()) + _SPARE_BYTES, f"as {path.name}"
    if config is None:
        return None, "no configuration says how large a checkpoint is"
    parameters = sum(prod(shape) for shape in parameter_shapes(config.model).values())
    return parameters * _BYTES_PER_PARAMETER + _SPARE_BYTES, f"{parameters:,} parameters"


def existing_part(path: Path) -> Path:
    """`path`, or what there is of it."""
    absolute = path.absolute()
    return next(part for part in (absolute, *absolute.parents) if part.is_dir())


def _offer(draft: Path, path: Path, word: str) -> str:
    """Write `word` to `path` if nobody has yet; what is there then, or what the system says to that."""
    try:
        draft.write_text(word, encoding="ascii")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        return path.read_text(encoding="ascii")
    except OSError as error:
        return f"cannot be written to ({error.strerror})" if draft.parent.is_dir() else "does not exist there"


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
