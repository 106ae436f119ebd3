"""State passing as one differentiable operation: it begins with keys and values, and ends with queries.

Forward: summary ▸ exchange ∥ (queries, gates) ▸ outputs from the incoming state. Backward: cotangent of the incoming
state by the outputs ▸ exchange ∥ gradients without the outgoing state's cotangent ▸ the other gradients.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.parallel.sequence.algebra import Tensors
from lightscale.parallel.sequence.exchange import StateExchange
from lightscale.parallel.sequence.scans import Scan


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """The incoming state of a layer, kept for its recomputation and its backward pass."""

    state: Tensors
    kept: Tensors


class Replay(defaultdict[str, deque[Incoming]]):
    """Incoming states of layers whose activations are recomputed, by layer, so that their exchanges are not repeated.

    The first pass of such a layer runs without gradients and leaves its state here; the second one, in the backward
    pass, takes it. Micro-batches are recomputed in the order in which they came, hence first in, first out.

    A second exchange would cost as much again, in the middle of the backward pass, where little runs beside it. And
    the state is the very same bits, which outputs computed twice must have.
    """

    def __init__(self, layers: Iterable[str]) -> None:
        super().__init__(deque)
        self.layers = frozenset(layers)
        """Recomputed layers."""


def begin(
    scan: Scan, exchange: StateExchange, *written: Tensor | None, name: str = "", replay: Replay | None = None
) -> Callable[..., Tensor]:
    """Start ``scan`` over rows that are split along the sequence over the ranks of ``exchange``, in rank order.

    Segments may differ in length from rank to rank, and be empty. One exchange forward and one backward.

    Args:
        written: the scan's inputs that do not read the state.
        name: of the layer; ``replay`` keeps its states under it.
        replay: for a layer whose activations are recomputed.

    Returns:
        A function of the scan's inputs that read the state, to be called once; it gives the outputs.
    """
    # With gradients, a layer that is recomputed runs for the second time. (Checkpointed layers run without them first.)
    if replay is not None and torch.is_grad_enabled():
        # No collective: repeated by recomputation, they hang where ranks recompute in other orders (VeOmni issue 979).
        incoming = replay[name].popleft()
        return lambda *read: _PassStates.apply(scan, exchange, lambda: incoming, *written, *read)
    # The exchange is no part of autograd's graph: _PassStates computes its gradients itself, exchange included.
    with torch.no_grad():
        summary = scan.summarize(written)
    wait = exchange.submit(exchange.forward, scan.algebra, summary)

    def arrive() -> Incoming:
        before, kept = wait()
        incoming = Incoming(state=scan.entering(before), kept=kept)
        # One state per layer that stays until the backward pass, beside the layer's input. Unlike the activations that
        # recomputation saves, it does not grow with the sequence.
        if replay is not None:
            replay[name].append(incoming)
        return incoming

    return lambda *read: _PassStates.apply(scan, exchange, arrive, *written, *read)


class _PassStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scan: Scan,
        exchange: StateExchange,
        arrive: Callable[[], Incoming],
        *inputs: Tensor | None,
    ) -> Tensor:
        incoming = arrive()
        ctx.scan, ctx.exchange = scan, exchange
        # All tensors by autograd's own means: kept on ctx, they would escape its checks for changes in place.
        # The states between chunks are not among them: the gradients' pass makes them again from inputs and incoming
        # state, which costs one more pass over keys and values, and spares the memory of a state per chunk and layer.
        # From the state, not added to outputs of a zero one: that would read and write all outputs once more, and round
        # them twice in bf16 models. What the exchange takes is hidden by the queries' and the gate's projections.
        with torch.profiler.record_function("outputs"):
            found = scan.outputs(inputs, incoming.state)
        o, *taken = (found,) if isinstance(found, Tensor) else found
        state = (*incoming.state, *taken)
        ctx.sizes = len(inputs), len(state)
        ctx.save_for_backward(*inputs, *state, *incoming.kept)
        return o

    @staticmethod
    # Autograd does not see the exchange: a second derivative would miss it silently, so that it is refused.
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        num_inputs, num_state = ctx.sizes
        inputs, rest = ctx.saved_tensors[:num_inputs], ctx.saved_tensors[num_inputs:]
        state, kept = rest[:num_state], rest[num_state:]
        scan, exchange = ctx.scan, ctx.exchange
        # Mirrors the forward pass: what later ranks wait for is computed first, then what they do not need. Autograd
        # runs layers in reverse order on every rank alike, so exchanges meet in one order again.
        wait = exchange.submit(exchange.backward, scan.algebra, kept, scan.reads(inputs, do, state))
        with torch.profiler.record_function("gradients"):
            return None, None, None, *scan.gradients(inputs, do, state, wait)
