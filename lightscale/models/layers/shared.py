"""What a model computes once and all layers of a stage read."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def for_all_layers(hidden: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """``hidden`` as it enters the layers, and ``value`` for the layers to read, however they run.

    Layers whose activations are recomputed run a backward pass of their own each. Through ``value`` every one of them
    would go on to what it was computed from, a second time, and hand a part of that gradient to its reduction. So
    layers get a leaf, which collects their gradients, and the sum is passed on when ``hidden`` gets its own, behind
    the last layer; it is zero where no layer read it.
    """
    leaf = value.detach().requires_grad_(value.requires_grad)
    passed: Tensor = _Collect.apply(hidden, value, lambda: leaf.grad)
    return passed, leaf


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Tensor, collected: Callable[[], Tensor | None]) -> Tensor:
        # Not the leaf itself: as an input it would wait for this node, which must run behind it. (The engine runs what
        # was created last first: all that leads from the layers to the leaf comes before.)
        ctx.collected, ctx.zero = collected, torch.zeros_like(value)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        collected = ctx.collected()
        return grad, ctx.zero if collected is None else collected, None
