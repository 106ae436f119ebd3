"""Results of the checks before a run (preflight, `lightscale doctor`), and how they are printed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

Outcome = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of one check."""

    check: str
    result: Outcome
    found: str
    right: str = ""
    """The remedy; empty without a fault."""
    ranks: tuple[int, ...] = ()
    """The ranks it applies to; empty: all."""
    blames_host: bool = False
    """Whether the hosts of these ranks are at fault, and the run could start without them."""


def merged(results: Iterable[CheckResult], num_ranks: int) -> list[CheckResult]:
    """Equal results of several ranks joined into one."""
    ranks: dict[CheckResult, tuple[int, ...]] = {}
    for result in results:
        key = replace(result, ranks=())
        ranks[key] = (*ranks.get(key, ()), *result.ranks)
    # What holds for all ranks is about the job: a list of a thousand ranks would hide that.
    return [replace(key, ranks=() if len(own) == num_ranks else own) for key, own in ranks.items()]


def describe(result: CheckResult, hosts: Sequence[str]) -> str:
    """One line: the ranks, their finding, and the remedy. `hosts`: of each rank."""
    who = where(result.ranks, hosts)
    right = f" (expected: {result.right})" if result.right else ""
    return f"{who}{': ' if who else ''}{result.found}{right}"


def where(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """gpu03 (rank 1), gpu04 (ranks 2, 3)"""
    names = dict.fromkeys(hosts[rank] for rank in ranks)
    parts = []
    for host in names:
        own = [rank for rank in ranks if hosts[rank] == host]
        parts.append(f"{host} (rank{'s' if len(own) > 1 else ''} {_ranges(own)})")
    return ", ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """0-3, 7"""
    # Index minus value is constant within a run of consecutive numbers.
    runs = [list(group) for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
