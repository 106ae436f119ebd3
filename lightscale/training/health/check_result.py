"""What the checks before a run find, and how it is said."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

Result = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    result: Result
    found: str
    right: str = ""
    """What would be right; empty where it is."""
    ranks: tuple[int, ...] = ()
    """Whose it is; empty: all have it."""
    blames_host: bool = False
    """Whether the hosts of these ranks are at fault: the run would do without them."""


def merged(findings: Iterable[Finding], num_ranks: int) -> list[Finding]:
    """Equal findings of several ranks as one."""
    ranks: dict[Finding, tuple[int, ...]] = {}
    for finding in findings:
        key = replace(finding, ranks=())
        ranks[key] = (*ranks.get(key, ()), *finding.ranks)
    return [replace(key, ranks=() if len(own) == num_ranks else own) for key, own in ranks.items()]


def describe(finding: Finding, hosts: Sequence[str]) -> str:
    """Who has found what, and what would be right. `hosts`: of each rank."""
    who = where(finding.ranks, hosts)
    right = f" (right: {finding.right})" if finding.right else ""
    return f"{who}{': ' if who else ''}{finding.found}{right}"


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
    stretches = [list(group) for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])]
    ends = [(stretch[0][1], stretch[-1][1]) for stretch in stretches]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def size_text(num_bytes: float) -> str:
    """1.5 GB, 200 MB"""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
