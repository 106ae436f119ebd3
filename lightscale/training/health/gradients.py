"""Wrong arithmetic: a step's gradients are computed by two data ranks, and compared bit by bit.

Ranks with the same place on the axes tensor, pipeline and sequence hold the same weights. In a compared step the ranks
of data rank d first compute the micro-batches of data rank d - 1, then their own, both without the sums over ranks. All
that compute right get the same bits. So the data ranks d and d + 1 compare what they have of the micro-batches of d:
checksums of the output of every module, in the order of the forward pass, and of the gradient of every parameter, the
last parameter first. Then the gradients of the own micro-batches are reduced, and the step goes on.

A data rank that always computes wrong differs from both of its neighbours, which names it where there are three or
more. Of two the comparison cannot tell which one is right, and both are named. Within a data rank, the rank with the
first difference is named: ranks of other stages, sequence and tensor ranks only continue with its numbers. With one
data rank the same ranks compute twice, which detects what does not happen again.

Detected: whatever goes wrong in a compared step between its data and the local sums of its gradients, such as a bit
that flips in a gradient or an activation; and a rank that computes wrong from some step on, before the next checkpoint.
Not detected: what goes wrong once in another step, in sums over ranks, or in the optimizer; with one data rank, what
goes wrong in the same way each time.
"""

import hashlib
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightscale.parallel.engine import Engine, LossSums
from lightscale.parallel.initialization import named_parameters
from lightscale.parallel.mesh import Mesh
from lightscale.parallel.micro_batch import MicroBatch
from lightscale.training.health.copies import flat_checksum
from lightscale.training.health.replicas import ReplicaFault, SilentCorruption

Order = tuple[int, int, int, int]
"""Of numbers in a pass over all stages: each depends only on lower ones, and on equal ones of other ranks."""


class PassPart(NamedTuple):
    """A number of a pass."""

    order: Order
    name: str
    checksum: int


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What one rank computed in a compared step."""

    host: str
    data_rank: int
    place: tuple[int, int, int]
    """Stage, sequence rank and tensor rank: ranks of one place hold the same weights."""
    own: str
    """Hash of what it has of its own micro-batches."""
    other: str
    """The same of those of the data rank before."""


@dataclass(kw_only=True)
class _Pass:
    """Checksums of one pass on this rank."""

    stage: int
    outputs: list[list[tuple[str, Tensor]]]
    """By chunk of the model, those of modules in the order of their calls."""
    gradients: list[list[tuple[str, Tensor]]] = field(default_factory=list)
    """By chunk, those of parameters, the last one first."""

    def parts(self) -> list[PassPart]:
        """All of them; the host waits for the device."""
        found = []
        for is_backward, chunks in ((0, self.outputs), (1, self.gradients)):
            for chunk, named in enumerate(chunks):
                first = (is_backward, -chunk, -self.stage) if is_backward else (is_backward, chunk, self.stage)
                sums = torch.stack([one for _, one in named]).tolist() if named else []
                found += [
                    PassPart((*first, number), name, checksum)
                    for number, ((name, _), checksum) in enumerate(zip(named, sums, strict=True))
                ]
        return found


class GradientCheck:
    """Computes the gradients of an engine's steps, and again every ``every`` steps; 0: never, and nothing is compared.

    check.begin(0)
    for step in …:
        sums = check.forward_backward(step, batches)
        …                       # the optimizer
        check.check(step)       # before a checkpoint
    """

    def __init__(self, engine: Engine, *, every: int) -> None:
        self._engine, self._mesh, self._every = engine, engine.mesh, every
        self._batches: Sequence[MicroBatch] | None = None

    def begin(self, step: int) -> None:
        """Start anew from the weights after ``step``."""
        if self._every:
            self._since, self._batches = step, None

    def forward_backward(self, step: int, batches: Sequence[MicroBatch], *, measure_logits: bool = False) -> LossSums:
        """``Engine.forward_backward``, with the same numbers.

        Raises:
            SilentCorruption: on all ranks, where a compared step differs between two computations.
        """
        if not self._every:
            return self._engine.forward_backward(batches, measure_logits=measure_logits)
        # A checkpoint after this step is checked with its data.
        self._batches = batches
        if step % self._every:
            return self._engine.forward_backward(batches, measure_logits=measure_logits)
        sums = self._compare(step, batches, measure_logits=measure_logits)
        self._engine.reduce_gradients()
        return sums

    def check(self, step: int) -> None:
        """Compute the newest micro-batches again with the weights as they are, unless ``step`` itself was checked.

        The gradients are lost. Collective.

        Raises:
            SilentCorruption: as ``forward_backward``.
        """
        if self._batches is not None and self._since != step:
            self._compare(step, self._batches)

    def _compare(self, step: int, batches: Sequence[MicroBatch], *, measure_logits: bool = False) -> LossSums:
        # The own ones last: their gradients, and the attention logits that were measured, stay.
        other, _ = self._traced(_from_data_rank_before(batches, self._mesh), measure_logits)
        own, sums = self._traced(batches, measure_logits)
        groups = self._mesh.groups
        report = Computed(
            host=socket.gethostname(),
            data_rank=self._mesh.data_rank,
            place=(groups.pp.rank(), self._mesh.sequence_rank, groups.tp.rank()),
            own=_hash(own),
            other=_hash(other),
        )
        reports: list[Computed] = [report] * self._mesh.world_size
        # By the control group: every rank gets all reports and comes to the same verdict.
        dist.all_gather_object(reports, report, group=self._mesh.control)
        if differing_data(reports):
            passes: list[tuple[list[PassPart], list[PassPart]]] = [(own, other)] * self._mesh.world_size
            dist.all_gather_object(passes, (own, other), group=self._mesh.control)
            hosts = [one.host for one in reports]
            raise SilentCorruption(find_faults(reports, passes), hosts, since=self._since, step=step)
        self._since = step
        return sums

    def _traced(self, batches: Sequence[MicroBatch], measure_logits: bool) -> tuple[list[PassPart], LossSums]:
        found = _Pass(stage=self._mesh.groups.pp.rank(), outputs=[[] for _ in self._engine.chunks])
        with _repeatable(), _recorded(self._engine.chunks, found.outputs):
            sums = self._engine.forward_backward(batches, measure_logits=measure_logits, reduce=False)
        for chunk in self._engine.chunks:
            gradients = [
                (name, _checksum(parameter.main_grad))  # type: ignore[attr-defined]
                for name, parameter in named_parameters(chunk)
                if parameter.requires_grad
            ]
            found.gradients.append(gradients[::-1])
        return found.parts(), sums


@contextmanager
def _repeatable() -> Iterator[None]:
    """Sums in one order. On GPUs the backward passes of softmax attention and of indexing would else add in any."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def differing_data(reports: Sequence[Computed]) -> dict[int, list[tuple[int, int]]]:
    """By data rank whose micro-batches gave different numbers: the pairs of ranks, (its own, its neighbour's)."""
    ranks = {(one.place, one.data_rank): rank for rank, one in enumerate(reports)}
    size = 1 + max(one.data_rank for one in reports)
    found: dict[int, list[tuple[int, int]]] = {}
    for (place, data_rank), rank in ranks.items():
        neighbour = ranks[place, (data_rank + 1) % size]
        if reports[rank].own != reports[neighbour].other:
            found.setdefault(data_rank, []).append((rank, neighbour))
    return found


def find_faults(
    reports: Sequence[Computed], passes: Sequence[tuple[Sequence[PassPart], Sequence[PassPart]]]
) -> list[ReplicaFault]:
    """The faults by what all ranks computed of their own micro-batches, and of those of the data rank before."""
    suspects: list[tuple[set[int], str]] = []
    for pairs in differing_data(reports).values():
        firsts = {pair: _first_difference(passes[pair[0]][0], passes[pair[1]][1]) for pair in pairs}
        first = min(one.order for one in firsts.values())
        chosen = [pair for pair, one in firsts.items() if one.order == first]
        where = "forward" if first[0] == 0 else "backward"
        suspects.append(({rank for pair in chosen for rank in pair}, f"{firsts[chosen[0]].name}, {where} pass"))
    # Who is wrong each time differs from the neighbours on both sides, and each of these from it alone.
    counts = Counter(rank for ranks, _ in suspects for rank in ranks)
    blamed: dict[tuple[int, ...], str] = {}
    for ranks, where in suspects:
        most = max(counts[rank] for rank in ranks)
        blamed.setdefault(tuple(sorted(rank for rank in ranks if counts[rank] == most)), where)
    return [ReplicaFault(ranks=ranks, what=_what(ranks, where)) for ranks, where in blamed.items()]


def _what(ranks: Sequence[int], where: str) -> str:
    found = f"the same data gave different numbers when it was computed again, first in {where}"
    return found if len(ranks) == 1 else f"{found}; one of these ranks is wrong"


def _first_difference(own: Sequence[PassPart], other: Sequence[PassPart]) -> PassPart:
    return next((one for one, two in zip(own, other, strict=False) if one != two), own[-1])


def _hash(parts: Sequence[PassPart]) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@contextmanager
def _recorded(chunks: Sequence[nn.Module], outputs: Sequence[list[tuple[str, Tensor]]]) -> Iterator[None]:
    """Append to ``outputs``, by chunk, the checksums of what its modules return meanwhile."""
    hooks = []
    for chunk, found in zip(chunks, outputs, strict=True):
        for name, module in chunk.named_modules():

            def keep(_: nn.Module, __: Any, output: Any, name: str = name, found: Any = found) -> None:
                for tensor in output if isinstance(output, tuple | list) else (output,):
                    if isinstance(tensor, Tensor) and tensor.is_floating_point():
                        found.append((name, _checksum(tensor)))

            hooks.append(module.register_forward_hook(keep))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor:
    return flat_checksum(tensor.detach().contiguous().view(-1))


# ----- micro-batches of the neighbour --------------------------------------------------------------------------------


def _from_data_rank_before(batches: Sequence[MicroBatch], mesh: Mesh) -> list[MicroBatch]:
    """The micro-batches of the data rank before, at the same place; each rank sends its own to the one behind."""
    peers = dist.get_process_group_ranks(mesh.groups.dp)
    if len(peers) == 1:
        return list(batches)
    before, behind = peers[mesh.data_rank - 1], peers[(mesh.data_rank + 1) % len(peers)]
    given, taken = [[_on_host(batch) for batch in batches]], [None]

    def send() -> None:
        dist.send_object_list(given, dst=behind, group=mesh.control)

    def receive() -> None:
        dist.recv_object_list(taken, src=before, group=mesh.control)

    # Both wait for each other: in a ring somebody has to receive first.
    for action in (send, receive) if mesh.data_rank % 2 == 0 else (receive, send):
        action()
    found: Any = taken[0]
    return [_on_device(batch, moved, mesh.device) for batch, moved in found]


def _on_host(batch: MicroBatch) -> tuple[MicroBatch, list[str]]:
    """With the names of the fields that were on the device."""
    assert is_dataclass(batch)
    moved = [one.name for one in fields(batch) if _is_on_device(getattr(batch, one.name))]
    found: Any = replace(batch, **{name: getattr(batch, name).cpu() for name in moved})
    return found, moved


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _on_device(batch: Any, moved: Sequence[str], device: torch.device) -> MicroBatch:
    found: Any = replace(batch, **{name: getattr(batch, name).to(device) for name in moved})
    return found
