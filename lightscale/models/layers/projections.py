"""Projections of one input, as one product where their weights lie together in memory.

Megatron's buffers hold the weights of a layer one behind the other, and their gradients too. So queries, keys, values
and the gate are one product forward and two backward, and their input's gradient needs no sum. Parameters, their names
and checkpoints stay as they are. On CPUs, where nothing is launched, each projection has its own product.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Phases
from lightscale.kernels.heads import MOST_PARTS, Heads, split_heads
from lightscale.parallel.linear.fp8 import fp8_linear
from lightscale.parallel.megatron import tensor_parallel_layers


class Projection(NamedTuple):
    """A linear layer and the heads in its columns; of ``layers/linear.py``, so that it gives its weight."""

    layer: Any
    heads: Heads


def project(x: Tensor, *projections: Projection, phases: Phases | None = None) -> list[Tensor]:
    """All parts (b, n, heads, width) of the projections of x (n / tensor, b, d), in order; see ``split_heads``."""
    kinds = [_is_narrow(layer) for layer, _ in projections]
    if len(set(kinds)) > 1:
        # Products in 8 bits, then the others.
        of_kind = {
            kind: iter(
                project(x, *(one for one, own in zip(projections, kinds, strict=True) if own == kind), phases=phases)
            )
            for kind in (True, False)
        }
        each = zip(projections, kinds, strict=True)
        return [next(of_kind[kind]) for (_, heads), kind in each for _ in heads.activations]
    layers = [projection.layer for projection in projections]
    joint = _joint(layers) if len(layers) > 1 and _joins(x, projections) else None
    if joint is None:
        outputs = [projection.layer(x) for projection in projections]
        whole = [output[0] if isinstance(output, tuple) else output for output in outputs]
        parts = [
            part
            for output, (_, heads) in zip(whole, projections, strict=True)
            for part in split_heads(output, [heads], phases if "rotate" in heads.activations else None)
        ]
    else:
        weight, order = joint
        columns = _product(x, weight, layers)
        found = iter(split_heads(columns, [projections[number].heads for number in order], phases))
        of_each = {number: [next(found) for _ in projections[number].heads.activations] for number in order}
        parts = [part for number in range(len(projections)) for part in of_each[number]]
    return [part.transpose(0, 1) for part in parts]


def _joins(x: Tensor, projections: Sequence[Projection]) -> bool:
    # Adapters hang on the calls of frozen layers.
    is_trained = all(layer.weight.requires_grad for layer, _ in projections)
    return x.is_cuda and is_trained and sum(len(heads.activations) for _, heads in projections) <= MOST_PARTS


def _joint(layers: Sequence[Any]) -> tuple[Tensor, list[int]] | None:
    """The weights of ``layers`` as one, and the layers' numbers in the order of its rows; None: they are apart."""
    # Called, each waits for its gathered weight, as before a product.
    weights = [layer(None) for layer in layers]
    how = {(getattr(one, "sequence_parallel", False), one.gradient_accumulation_fusion) for one in layers}
    is_plain = not any(
        getattr(one, "allreduce_dgrad", False) or getattr(one, "bias", None) is not None for one in layers
    )
    if len(how) > 1 or not is_plain:
        return None
    order = sorted(range(len(weights)), key=lambda number: weights[number].data_ptr())
    in_order = [weights[number] for number in order]
    ((_, is_summed_in_products),) = how
    if not _lie_together(in_order):
        return None
    totals = [weight.main_grad for weight in in_order] if is_summed_in_products else None
    if totals is not None and not _lie_together(totals):
        return None
    joint: Tensor = _Joint.apply(is_summed_in_products, *in_order)
    if totals is not None:
        joint.main_grad = _as_one(totals)  # type: ignore[attr-defined]
        joint.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return joint, order


def _is_narrow(layer: Any) -> bool:
    return getattr(layer, "computes_in_fp8", False)


def _lie_together(rows: Sequence[Tensor]) -> bool:
    """Whether these matrices are the rows of one, in this order."""
    first = rows[0]
    expected = first.data_ptr()
    for one in rows:
        alike = one.shape[1] == first.shape[1] and one.dtype == first.dtype and one.is_contiguous()
        if not alike or one.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return False
        if one.data_ptr() != expected:
            return False
        expected += one.numel() * one.element_size()
    return True


def _as_one(rows: Sequence[Tensor]) -> Tensor:
    """The matrix of these, which lie together; of their memory, but no view in autograd's eyes."""
    first = rows[0]
    size = sum(one.shape[0] for one in rows), first.shape[1]
    return first.new_empty(0).set_(first.untyped_storage(), first.storage_offset(), size, (size[1], 1))


class _Joint(torch.autograd.Function):
    """Weights (rows, d) that lie together, as one; what is added to its gradient's sum is added to theirs."""

    @staticmethod
    def forward(ctx: Any, is_summed: bool, *weights: Tensor) -> Tensor:
        ctx.is_summed, ctx.weights = is_summed, weights
        return _as_one(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Megatron's mark: the product has added the gradient to its sum. What comes here then are no numbers.
        for weight in ctx.weights if ctx.is_summed else ():
            weight.grad_added_to_main_grad = True
        return None, *gradient.split([weight.shape[0] for weight in ctx.weights])


def _product(x: Tensor, weight: Tensor, layers: Sequence[Any]) -> Tensor:
    first = layers[0]
    linear = (
        fp8_linear if _is_narrow(first) else tensor_parallel_layers.linear_with_grad_accumulation_and_async_allreduce
    )
    out: Tensor = linear(
        x,
        weight,
        None,
        gradient_accumulation_fusion=first.gradient_accumulation_fusion,
        allreduce_dgrad=False,
        sequence_parallel=getattr(first, "sequence_parallel", False),
        tp_group=getattr(first, "tp_group", None),
    )
    return out
