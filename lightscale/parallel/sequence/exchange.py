"""Exchanges: three ways to compute the state that enters each sequence rank's segment, with one result.

``gather``     every rank gets all summaries and folds the earlier ones: one collective per direction.
``two_level``  the same inside each node, then between nodes with the nodes' combined summaries, each rank taking a
               share of the heads: this divides the bytes between nodes by the ranks per node.
``ring``       from rank to rank, as in LASP (arXiv 2404.02882), without the local work on the chain.

Payloads do not depend on the length of the sequence. States are fp32 or wider. Every rank must issue the same exchanges
in the same order. Exchanges overlap the computation: on a separate stream, on CPUs on a thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightscale.parallel.sequence.algebra import Algebra, Tensors

Wait = Callable[[], Any]


class StateExchange(ABC):
    """Exchanges over ``group``, whose ranks hold the segments of each row in their order.

    ``num_calls`` and ``payload_bytes`` count what this rank contributed, so that tests and benchmarks can hold it to
    the formulas.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.num_calls = 0
        self.payload_bytes = 0
        # Made by the first exchange, which knows the device of what it sends.
        self._beside: _Beside | None = None

    @abstractmethod
    def forward(self, algebra: Algebra, summary: Tensors) -> tuple[Tensors, Tensors]:
        """The state that enters this rank's segment, and the tensors for ``backward`` (small: no states)."""

    @abstractmethod
    def backward(self, algebra: Algebra, kept: Tensors, reads: Tensors) -> Tensors:
        """The cotangent of the state that leaves this rank's segment; ``reads`` see ``Algebra.adjoint``."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Wait:
        """Start ``work(*args)`` beside the computation; the returned function waits for it and gives its result."""
        if self._beside is None:
            device = _tensors(args)[0].device
            self._beside = _OnStream(device) if device.type == "cuda" else _OnThread()
        return self._beside.submit(f"state exchange: {type(self).__name__}", work, args)

    def count(self, sent: Tensor) -> None:
        self.num_calls += 1
        self.payload_bytes += sent.numel() * sent.element_size()

    def _all_gather(self, tensors: Tensors, group: dist.ProcessGroup) -> Tensors:
        """The ``tensors`` (equal shapes and one dtype on all ranks) of all N ranks of ``group``, in one collective.

        Stacked: (N, …) each, views of one buffer.
        """
        # One message instead of one per tensor: for payloads this small the latency counts.
        flat = _packed(tensors)
        # As many payloads as ranks, the largest buffer of a pass. It must not live until the backward pass: what is
        # kept of it has to be a copy, not a view.
        gathered = flat.new_empty(group.size() * flat.numel())
        dist.all_gather_into_tensor(gathered, flat, group=group)
        self.count(flat)
        return _unpacked(gathered.view(group.size(), -1), tensors)


class Gather(StateExchange):
    """One all-gather per direction. Kept are the transitions of all segments.

    Every rank folds the received summaries itself: more work on each, but none waits for another's sums as in ``Ring``.
    """

    def forward(self, algebra: Algebra, summary: Tensors) -> tuple[Tensors, Tensors]:
        entering, transitions = algebra.fold(self._all_gather(summary, self.group), None, self.rank)
        # Those of the later segments are kept for the backward fold, so that they need not be sent a second time.
        return entering, (transitions,)

    def backward(self, algebra: Algebra, kept: Tensors, reads: Tensors) -> Tensors:
        (transitions,) = kept
        # The state that leaves this segment is the one that enters the next: the fold stops there.
        return algebra.fold_back(transitions, self._all_gather(reads, self.group), rank=self.rank)


class TwoLevel(StateExchange):
    """Three all-gathers per direction: summaries inside the node, shares of the nodes' between nodes, back inside.

    Args:
        group: all ranks of the sequence.
        node: the ranks of this node, neighbours in ``group``; as many on every node.
        across: the ranks with the same index in their nodes.
    """

    def __init__(self, group: dist.ProcessGroup, *, node: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.node, self.across = node, across

    def forward(self, algebra: Algebra, summary: Tensors) -> tuple[Tensors, Tensors]:
        # The order of the three is the same on all ranks, node then across then node, and each has its communicator.
        inside = self._all_gather(summary, self.node)
        # All ranks of the node have the same sum; each takes its share of the heads to the other nodes.
        shares = self._all_gather(self._share(algebra.combined(inside)), self.across)
        entering_share, between = algebra.fold(shares, None, self.across.rank())
        entering_node = self._join(entering_share, algebra.empty(summary))
        entering, within = algebra.fold(inside, entering_node, self.node.rank())
        return entering, (within, between)

    def backward(self, algebra: Algebra, kept: Tensors, reads: Tensors) -> Tensors:
        within, between = kept
        inside = self._all_gather(reads, self.node)
        # With nothing from behind: what the node, as one segment, reads of the state that enters it.
        shares = self._all_gather(self._share(algebra.fold_back(within, inside)), self.across)
        leaving_node = self._join(algebra.fold_back(between, shares, rank=self.across.rank()), reads)
        return algebra.fold_back(within, inside, leaving_node, rank=self.node.rank())

    def _share(self, tensors: Tensors) -> Tensors:
        """This rank's heads, padded where they do not divide; what has no heads is sent whole."""
        ranks, own = self.node.size(), self.node.rank()

        def share(x: Tensor) -> Tensor:
            # Such as ``through`` of LogSumExp, one number per row.
            if x.size(1) == 1:
                return x.contiguous()
            heads = -(-x.size(1) // ranks)
            part = x[:, own * heads : (own + 1) * heads]
            # All-gathers want equal shapes; zeros in z are as good as any, because _join drops them.
            padding = [0, 0] * (x.dim() - 2) + [0, heads - part.size(1)]
            return torch.nn.functional.pad(part, padding)

        return tuple(share(x) for x in tensors)

    def _join(self, shares: Tensors, like: Tensors) -> Tensors:
        """The inverse of ``_share`` for tensors in the shapes of ``like``."""
        return tuple(
            part[0] if x.size(1) == 1 else part.transpose(0, 1).flatten(1, 2)[:, : x.size(1)]
            for part, x in zip(self._all_gather(shares, self.node), like, strict=True)
        )


class Ring(StateExchange):
    """A message from each rank to the next per direction; the time grows with the number of ranks."""

    def forward(self, algebra: Algebra, summary: Tensors) -> tuple[Tensors, Tensors]:
        # A chain of waits, begun before the outputs: what a rank does between receiving and sending is one fold.
        # Blocking calls cannot deadlock: every rank waits for the one before it only, and the first for none; a second
        # direction begins when the first is through.
        entering: list[Tensor] = []
        for one, of_direction, reverse in algebra.directions(summary):
            before, behind = (self.rank + 1, self.rank - 1) if reverse else (self.rank - 1, self.rank + 1)
            state = self._received(one.empty(of_direction), before)
            leaving, transitions = one.fold(_stacked(of_direction), state, -1 if reverse else 1)
            self._send(leaving, behind)
            entering += state
        return tuple(entering), (transitions,)

    def backward(self, algebra: Algebra, kept: Tensors, reads: Tensors) -> Tensors:
        # The other way round: nothing reads the state that leaves the last rank.
        found: list[Tensor] = []
        for one, of_direction, reverse in algebra.directions(reads):
            before, behind = (self.rank + 1, self.rank - 1) if reverse else (self.rank - 1, self.rank + 1)
            leaving = self._received(tuple(torch.zeros_like(x) for x in of_direction), behind)
            if 0 <= before < self.size:
                self._send(one.fold_back(kept[0], _stacked(of_direction), leaving), before)
            found += leaving
        return tuple(found)

    def _send(self, tensors: Tensors, to: int) -> None:
        """To a rank that may not be there."""
        if not 0 <= to < self.size:
            return
        flat = _packed(tensors)
        # Ranks of the group, which differ from the global ones as soon as there is a data, tensor or pipeline axis.
        dist.send(flat, group=self.group, group_dst=to)
        self.count(flat)

    def _received(self, like: Tensors, source: int) -> Tensors:
        """From a rank, or ``like`` where it is not there."""
        if not 0 <= source < self.size:
            return like
        flat = _packed(like)
        dist.recv(flat, group=self.group, group_src=source)
        return _unpacked(flat, like)


def _packed(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpacked(flat: Tensor, like: Tensors) -> Tensors:
    """Views (*batch, …) of ``flat`` (*batch, size), in the shapes of ``like``."""
    parts = flat.split([tensor.numel() for tensor in like], dim=-1)
    return tuple(part.unflatten(-1, tensor.shape) for part, tensor in zip(parts, like, strict=True))


def _stacked(tensors: Tensors) -> Tensors:
    """As those of one segment."""
    return tuple(tensor[None] for tensor in tensors)


class _Beside(ABC):
    @abstractmethod
    def submit(self, name: str, work: Callable[..., Any], args: tuple[Any, ...]) -> Wait: ...


class _OnThread(_Beside):
    """One thread, so that exchanges keep the order in which they were submitted, the same on every rank.

    Waiting raises what the exchange raised.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state-exchange")

    def submit(self, name: str, work: Callable[..., Any], args: tuple[Any, ...]) -> Wait:
        def run() -> Any:
            # Autograd's mode and the profiler's ranges belong to a thread: this one has neither.
            with torch.no_grad(), torch.profiler.record_function(name):
                return work(*args)

        return self._pool.submit(run).result


class _OnStream(_Beside):
    """A stream beside the one that computes; waiting makes the latter wait, not the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, name: str, work: Callable[..., Any], args: tuple[Any, ...]) -> Wait:
        # What is sent was computed on the current stream, and may not be ready yet.
        self._stream.wait_stream(torch.cuda.current_stream())
        # A collective occupies the stream it is called on until it is done: on the computing one nothing would overlap.
        with torch.no_grad(), torch.cuda.stream(self._stream), torch.profiler.record_function(name):
            result = work(*args)
        done = self._stream.record_event()
        for tensor in _tensors(args):
            # Memory goes back to the stream that it was taken on, which must not use it before the exchange is done.
            tensor.record_stream(self._stream)

        def wait() -> Any:
            current = torch.cuda.current_stream()
            current.wait_event(done)
            # The same the other way round: taken on the exchange's stream, used on the computing one.
            for tensor in _tensors(result):
                tensor.record_stream(current)
            return result

        return wait


def _tensors(nested: Any) -> list[Tensor]:
    if isinstance(nested, tuple):
        return [tensor for part in nested for tensor in _tensors(part)]
    return [nested] if isinstance(nested, Tensor) else []
