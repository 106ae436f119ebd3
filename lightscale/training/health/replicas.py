"""Silent corruption: weights that several ranks hold are compared, and the rank that differs is named.

The optimizer of each data and sequence rank writes a part of the flat weights, its row. All ranks of that group then
gather all rows. Until the next step no code writes weights, so a difference is corruption. Every step gathers the rows
again. That repairs the copies, and it spreads a fault of a row from its owner; a rare comparison of weights would miss
both. Every rank therefore computes checksums in every step,

    remember   of its own row, after it is written or read from a checkpoint: the reference for this row,
    observe    of all rows, after the backward pass: the last moment before they are written again,

and folds the checksums of all steps into one number for each row. ``compare`` exchanges these numbers at intervals. A
rank that observed another number than the owner of a row is at fault. If no rank observed the owner's number, the owner
is at fault. Two ranks are enough, and a single rank detects faults of its own memory. Parameters with copies on tensor
ranks or stages, which update them separately, are compared too; there the majority is right.

Detected: weights and moments that change between two steps, in memory or while they are gathered, and copies with
different updates. Not detected: wrong computations, because all ranks get the result. Those of activations and
gradients are compared by ``gradients.py``, those of a row in its optimizer by nothing. The checksum is the sum of all
words modulo 2^64. It detects any single changed bit, and several bits unless their differences cancel.
"""

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightscale.parallel.engine import Engine
from lightscale.training.health.copies import checksums, differing_copies, flat_checksum, held_weights, places

# Odd, so that nothing is lost modulo 2^64 however often a number is folded.
_FOLD = 0x9E3779B97F4A7C1
_MOST_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """Checksums of one rank since the last comparison."""

    host: str
    group: tuple[int, ...]
    """The ranks that hold the same flat weights, in the order of their rows."""
    written: int
    """Its own row, each time that it was written."""
    seen: tuple[int, ...]
    """All rows, each time before they were written again."""
    is_intact: bool
    """Whether its own row is unchanged since the last write."""
    is_state_intact: bool = True
    """Whether its fp32 weights and moments were, before each step, those of the step before."""
    copies: tuple[tuple[str, int], ...] = ()
    """By name, the parameters with copies on other tensor ranks or stages."""


@dataclass(frozen=True, kw_only=True)
class ReplicaFault:
    """Weights that differ."""

    ranks: tuple[int, ...]
    """The ranks at fault."""
    what: str


class SilentCorruption(RuntimeError):
    """Weights are corrupted; the message names the ranks and their hosts."""

    def __init__(
        self,
        faults: Sequence[ReplicaFault],
        hosts: Sequence[str],
        *,
        since: int,
        step: int,
        differing: Sequence[str] = (),
    ) -> None:
        """``hosts``: of all ranks; it happened after step ``since`` and before the end of ``step``.

        ``differing``: the parameters whose copies differ now, and where.
        """
        self.ranks = sorted({rank for fault in faults for rank in fault.ranks})
        self.hosts = [hosts[rank] for rank in self.ranks]
        self.since = since
        lines = [f"{places(fault.ranks, hosts)}: {fault.what}" for fault in faults]
        names = f"; different now: {', '.join(differing[:_MOST_NAMES])}" if differing else ""
        more = f" and {len(differing) - _MOST_NAMES} more" if len(differing) > _MOST_NAMES else ""
        super().__init__(
            f"silent corruption after step {since} and before the end of step {step}: "
            f"{'; '.join(lines)}{names}{more}. No checkpoint was written since then; exclude a host that is reported "
            "again"
        )


class ReplicaCheck:
    """Compares the weights of an engine's ranks every ``every`` steps; 0: never, and then nothing is computed.

    check.begin(0)
    for step in …:
        …                       # forward and backward
        check.observe()
        if check.is_due(step):
            check.compare(step)
        …                       # the optimizer
        check.remember()
    """

    _own: Tensor
    """(1,) of the own row, as it was written last."""
    _written: Tensor
    """(1,) of the own row, folded over the steps since the last comparison."""
    _seen: Tensor
    """(ranks of the group,) of all rows, folded."""
    _copies: Tensor
    """(copied weights,), folded."""
    _state: Tensor
    """() of this rank's fp32 weights and moments, as they were written last."""
    _state_changes: Tensor
    """() number of steps before which these had changed."""

    def __init__(self, engine: Engine, *, every: int) -> None:
        self._engine, self._mesh, self._every = engine, engine.mesh, every
        group = engine.mesh.groups.dp_cp
        self._group = tuple(dist.get_process_group_ranks(group))
        self._own_rows = slice(group.rank(), group.rank() + 1)
        self._factors = torch.tensor([], dtype=torch.int64)
        """Of the checksums of fp32 weights and moments, so that their order counts."""

    def begin(self, step: int) -> None:
        """Start anew from the weights after ``step``, which were drawn or read: earlier checksums are dropped."""
        if self._every:
            self.remember()
            self._forget(step)

    def remember(self) -> None:
        """The optimizer has written this rank's row."""
        if self._every:
            self._own = self._rows(self._own_rows)
            self._state = self._owned_state()

    def observe(self) -> None:
        """The backward pass of a step is done, and no weight is written yet."""
        if self._every:
            # Tensors of the device throughout: no step waits for the GPU, only `compare` reads the numbers. The factor
            # makes the order count, so that a change in one step cannot cancel that of another.
            self._written = self._written * _FOLD + self._own
            self._seen = self._seen * _FOLD + self._rows(slice(None))
            self._state_changes = self._state_changes + (self._owned_state() != self._state)
            copies = [checksums(weight.reshape(1, -1)) for _, weight in self._copied()]
            if copies:
                self._copies = self._copies * _FOLD + torch.cat(copies)

    def is_due(self, step: int) -> bool:
        """Whether ``step`` is one to compare in."""
        return self._every > 0 and step % self._every == 0

    def compare(self, step: int) -> None:
        """Compare the checksums since the last comparison, until ``step``. Collective.

        Raises:
            SilentCorruption: on all ranks, where anything differs.
        """
        # Called before each save as well, also where nothing is compared.
        if not self._every:
            return
        names = [name for name, _ in self._copied()]
        own = ReplicaReport(
            host=socket.gethostname(),
            group=self._group,
            written=int(self._written),
            seen=tuple(self._seen.tolist()),
            # Needs no peer: by this a rank without replicas finds faults of its own memory.
            is_intact=torch.equal(self._own, self._rows(self._own_rows)),
            is_state_intact=not self._state_changes and torch.equal(self._owned_state(), self._state),
            copies=tuple(zip(names, self._copies.tolist(), strict=True)),
        )
        reports: list[ReplicaReport] = [own] * self._mesh.world_size
        # By the control group, over gloo: every rank gets all reports and comes to the same verdict, so that all leave
        # together.
        dist.all_gather_object(reports, own, group=self._mesh.control)
        found = find_faults(reports)
        if found:
            hosts = [report.host for report in reports]
            # Rows are of flat weights. Where the copies still differ, it can be said in which parameters.
            now = [f"{copies.name} on {places(copies.odd, hosts)}" for copies in differing_copies(self._engine)]
            raise SilentCorruption(found, hosts, since=self._since, step=step, differing=now)
        self._forget(step)

    def _forget(self, step: int) -> None:
        self._since = step
        self._written = torch.zeros_like(self._own)
        self._seen = self._own.new_zeros(len(self._group))
        self._state_changes = torch.zeros_like(self._state)
        self._copies = self._own.new_zeros(sum(1 for _ in self._copied()))

    def _rows(self, rows: slice) -> Tensor:
        """(rows,) checksums over all flat weights."""
        total = torch.zeros((), dtype=torch.int64, device=self._mesh.device)
        for flat in self._engine.flat_weights():
            total = total * _FOLD + checksums(flat[rows])
        return total

    def _owned_state(self) -> Tensor:
        """() checksum over the fp32 weights and moments of which this rank takes the steps."""
        sums = [flat_checksum(flat).to(self._mesh.device) for flat in self._engine.owned_state()]
        if not sums:
            return torch.zeros((), dtype=torch.int64, device=self._mesh.device)
        if len(sums) != len(self._factors):
            # Made once: a launch for each of hundreds of tensors is enough.
            self._factors = torch.tensor(_powers(len(sums)), device=self._mesh.device)
        return (torch.stack(sums) * self._factors).sum()

    def _copied(self) -> Iterator[tuple[str, Tensor]]:
        """What other tensor ranks or stages (virtual ones: of this rank too) have copies of."""
        for held in held_weights(self._engine):
            if held.is_on_stages or (held.is_whole and self._mesh.tensor > 1):
                yield held.name, held.weight


def _powers(count: int) -> list[int]:
    """Of ``_FOLD``, modulo 2^64, as signed numbers."""
    found, power = [], 1
    for _ in range(count):
        found.append(power - (power >> 63 << 64))
        power = power * _FOLD & 0xFFFF_FFFF_FFFF_FFFF
    return found


def find_faults(reports: Sequence[ReplicaReport]) -> list[ReplicaFault]:
    """The faults by the reports of all ranks, in their order."""
    groups = dict.fromkeys(report.group for report in reports)
    found = [fault for group in groups for fault in _faults_of_rows(group, reports)]
    if changed := tuple(rank for rank, report in enumerate(reports) if not report.is_state_intact):
        found.append(ReplicaFault(ranks=changed, what="moments or fp32 weights changed between two steps"))
    # What differs between data ranks may differ between tensor ranks only because of that.
    return found or list(_faults_of_copies(reports))


def _faults_of_rows(group: Sequence[int], reports: Sequence[ReplicaReport]) -> Iterator[ReplicaFault]:
    blamed = {rank for rank in group if not reports[rank].is_intact}
    for row, owner in enumerate(group):
        wrong = {rank for rank in group if reports[rank].seen[row] != reports[owner].written}
        # What every rank sees wrong changed before it was gathered.
        blamed |= {owner} if len(wrong) == len(group) else wrong
    if blamed:
        yield ReplicaFault(ranks=tuple(sorted(blamed)), what="weights changed after the optimizer wrote them")


def _faults_of_copies(reports: Sequence[ReplicaReport]) -> Iterator[ReplicaFault]:
    holders: dict[str, list[tuple[int, int]]] = {}
    for rank, report in enumerate(reports):
        for name, checksum in report.copies:
            holders.setdefault(name, []).append((rank, checksum))
    for name, held in holders.items():
        (usual, count), *others = Counter(checksum for _, checksum in held).most_common()
        if not others:
            continue
        if count > others[0][1]:
            odd = {rank for rank, checksum in held if checksum != usual}
            yield ReplicaFault(ranks=tuple(sorted(odd)), what=f"{name} differs from that of most ranks")
        else:
            every = {rank for rank, _ in held}
            yield ReplicaFault(ranks=tuple(sorted(every)), what=f"{name} differs, and no majority of ranks agrees")
