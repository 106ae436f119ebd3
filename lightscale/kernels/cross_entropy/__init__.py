"""The loss of a linear output layer over a large vocabulary, in the memory of one chunk's logits.

The loss is -log softmax(hidden weightᵀ)[label] per token, over chunks of tokens. The rows of the vocabulary may be
split over ranks, and some rows may be padding. docs/reference/operators/cross-entropy.md has the mathematics and the
costs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.errors import UserError
from lightscale.kernels.common.backends import AUTO, choose_backend, implementation, preload_backends
from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.cross_entropy import chunked
from lightscale.kernels.cross_entropy.chunked import (
    Ids,
    LossGradients,
    Reduce,
    Softmax,
    Statistics,
    log_normalizer,
    scale_,
)
from lightscale.kernels.cross_entropy.reference import linear_cross_entropy_reference

__all__ = [
    "Reduce",
    "linear_cross_entropy",
    "linear_cross_entropy_and_z_loss",
    "linear_cross_entropy_reference",
    "linear_log_probability",
]


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses times ``factors``, and in the same pass the gradients of their sum.

    The backward pass scales these gradients where all losses have one cotangent, as in a sum. For other cotangents it
    recomputes them: the products need each token's factor first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        factors: Tensor | None,
        ids: Ids,
        reduce: Reduce | None,
        softmax: Softmax,
        chunk_tokens: int | None,
        cap: float | None,
        z_loss: float,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor | None]:
        needs = ctx.needs_input_grad[:2]
        gradients, weights = None, None
        if with_gradients and any(needs):
            gradients = LossGradients(hidden, weight, needs)
            wide = state_dtype(hidden.dtype)
            weights = hidden.new_ones(labels.shape, dtype=wide) if factors is None else factors.to(wide)
        found = chunked.forward(
            hidden,
            weight,
            labels,
            ids,
            softmax,
            chunk_tokens,
            reduce=reduce,
            cap=cap,
            z_loss=z_loss,
            gradients=gradients,
            factors=weights,
        )
        ctx.save_for_backward(hidden, weight, labels, factors, *found)
        ctx.ids, ctx.softmax, ctx.chunk_tokens, ctx.cap, ctx.z_loss = ids, softmax, chunk_tokens, cap, z_loss
        ctx.gradients = None if gradients is None else gradients.result()
        # In this order large logits cost no digits of the loss.
        losses = found.total.log() - (found.target - found.largest)
        if not z_loss:
            return _weighted(losses, factors), None
        terms = _weighted(z_loss * log_normalizer(found).square(), factors)
        ctx.mark_non_differentiable(terms)
        return _weighted(losses, factors) + terms, terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor, _terms: Tensor | None) -> tuple[Tensor | None, ...]:
        made, ctx.gradients = ctx.gradients, None
        # Read from the strides, without a wait for the device: autograd expands the cotangent of a sum without a copy.
        is_sum = all(stride == 0 or size == 1 for stride, size in zip(dlosses.stride(), dlosses.shape, strict=True))
        if made is not None and is_sum and dlosses.numel():
            # In place: the first backward pass consumes the gradients. A second pass over the same graph recomputes
            # them.
            gradients = tuple(None if gradient is None else scale_(gradient, dlosses[0]) for gradient in made)
            return *gradients, *(None,) * 9
        hidden, weight, labels, factors, *found = ctx.saved_tensors
        computed = chunked.backward(
            hidden,
            weight,
            labels,
            ctx.ids,
            Statistics(*found),
            _weighted(dlosses, factors),
            ctx.softmax,
            ctx.chunk_tokens,
            cap=ctx.cap,
            z_loss=ctx.z_loss,
            needs=ctx.needs_input_grad[:2],
        )
        return *computed, *(None,) * 9


def _weighted(losses: Tensor, factors: Tensor | None) -> Tensor:
    return losses if factors is None else torch.where(factors == 0, 0.0, losses * factors)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    num_ids: int,
    first_id: int = 0,
    reduce: Reduce | None = None,
    loss_mask: Tensor | None = None,
    cap: float | None = None,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    backend: str = AUTO,
) -> Tensor:
    """-log softmax(hidden weightᵀ)[label] of each token; differentiable in hidden and weight.

    The forward pass computes the gradients of the sum of the losses from the same logits; ``loss_mask`` sets the
    weights in the sum. Other cotangents give correct gradients too, and cost the logits once more. Without autograd
    (``torch.no_grad``) no gradient is computed.

    Logits are rounded to the dtype of hidden, as in a linear layer; exponentials and sums are fp32 or wider. With
    ``reduce`` the gradient of hidden is the part by this rank's rows of the vocabulary: the caller sums it over the
    ranks.

    Args:
        hidden: (..., d), fp16, bf16, fp32 or fp64.
        weight: (rows, d) of hidden's dtype: the rows of the vocabulary that this rank holds.
        labels: (...) int64 ids below ``num_ids``; any value where the mask is 0.
        num_ids: number of ids in use, over all ranks; further rows are padding of probability 0.
        first_id: the id of the weight's first row.
        reduce: replaces a tensor by its maximum or sum over the ranks that hold the other rows. The forward pass calls
            it for both in every chunk, the backward pass never.
        loss_mask: (...), factor of each loss, without a gradient; None for 1.
        cap: logits s are cap tanh(s / cap), above 0 (arXiv 2408.00118, section 2); None: they are s.
        z_loss: at least 0; the losses have the term z_loss log² Z, with Z the sum of the exponentials of the logits
            (arXiv 2204.02311, section 5).
        chunk_tokens: tokens whose logits exist at a time; by default as many as ``LOGITS_WORKSPACE_BYTES`` hold.
        backend: "auto", "triton", "chunked" (PyTorch's operators), "reference" (all logits at once, by
            autograd; one rank).

    Returns:
        The losses (...) in nats, fp32 (fp64 for fp64 inputs).

    Raises:
        UserError: a shape, dtype, device or backend does not fit; the message names the argument. The values of labels
            are checked on a CPU only: on a GPU a read would stall the stream.
    """
    losses, _ = linear_cross_entropy_and_z_loss(
        hidden,
        weight,
        labels,
        num_ids=num_ids,
        first_id=first_id,
        reduce=reduce,
        loss_mask=loss_mask,
        cap=cap,
        z_loss=z_loss,
        chunk_tokens=chunk_tokens,
        backend=backend,
    )
    return losses


def linear_cross_entropy_and_z_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    num_ids: int,
    first_id: int = 0,
    reduce: Reduce | None = None,
    loss_mask: Tensor | None = None,
    cap: float | None = None,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """``linear_cross_entropy``, and the term of ``z_loss`` in it: (...), without a gradient."""
    _check(hidden, weight, labels, num_ids, first_id, loss_mask, chunk_tokens, cap, z_loss)
    name = choose_backend("cross_entropy", hidden, backend)
    if name == "reference":
        if reduce is not None:
            raise UserError("linear_cross_entropy: backend 'reference' has no `reduce`; use 'auto' or 'chunked'")
        wide = state_dtype(hidden.dtype)
        inputs = hidden.to(wide), weight.to(wide), labels
        options: dict[str, Any] = {"num_ids": num_ids, "loss_mask": loss_mask, "cap": cap}
        losses = linear_cross_entropy_reference(*inputs, **options, z_loss=z_loss)
        with torch.no_grad():
            return losses, losses - linear_cross_entropy_reference(*inputs, **options)
    ids = Ids(first_id, min(max(num_ids - first_id, 0), weight.shape[0]))
    flat = hidden.reshape(-1, hidden.shape[-1])
    factors = None if loss_mask is None else loss_mask.detach().reshape(-1)
    losses, terms = _LinearCrossEntropy.apply(
        flat,
        weight,
        labels.reshape(-1),
        factors,
        ids,
        reduce,
        implementation("cross_entropy", name),
        chunk_tokens,
        cap,
        z_loss,
        torch.is_grad_enabled(),
    )
    return losses.view(labels.shape), losses.new_zeros(()).expand(labels.shape) if terms is None else terms.view(
        labels.shape
    )


@torch.no_grad()
def linear_log_probability(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    num_ids: int,
    first_id: int = 0,
    reduce: Reduce | None = None,
    cap: float | None = None,
    chunk_tokens: int | None = None,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden weightᵀ)[label] of each token, and whether no id is more probable; without gradients.

    Arguments, errors and the pass over the logits are those of ``linear_cross_entropy``; hidden is (tokens, d) and
    labels (tokens,). The back-end "reference" means "chunked" here.
    """
    _check(hidden, weight, labels, num_ids, first_id, None, chunk_tokens, cap, 0.0)
    name = choose_backend("cross_entropy", hidden, backend)
    softmax: Softmax = implementation("cross_entropy", "chunked" if name == "reference" else name)
    ids = Ids(first_id, min(max(num_ids - first_id, 0), weight.shape[0]))
    found = chunked.forward(hidden, weight, labels, ids, softmax, chunk_tokens, reduce=reduce, cap=cap)
    return (found.target - found.largest) - found.total.log(), found.target >= found.largest


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_ids: int,
    first_id: int,
    loss_mask: Tensor | None,
    chunk_tokens: int | None,
    cap: float | None,
    z_loss: float,
) -> None:
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise UserError(
            f"hidden must be (..., d) and weight (rows, d), got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if hidden.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise UserError(f"hidden must be fp16, bf16, fp32 or fp64, got {hidden.dtype}")
    if weight.dtype != hidden.dtype:
        raise UserError(f"weight must be of hidden's dtype {hidden.dtype}, got {weight.dtype}")
    expected = tuple(hidden.shape[:-1])
    if labels.shape != expected or labels.dtype != torch.int64:
        raise UserError(f"labels must be int64 of shape {expected}, got {labels.dtype}, {tuple(labels.shape)}")
    if loss_mask is not None and loss_mask.shape != expected:
        raise UserError(f"loss_mask must be of shape {expected}, got {tuple(loss_mask.shape)}")
    for name, tensor in (("weight", weight), ("labels", labels), ("loss_mask", loss_mask)):
        if tensor is not None and tensor.device != hidden.device:
            raise UserError(f"{name} is on {tensor.device}, but hidden is on {hidden.device}")
    if num_ids < 1 or first_id < 0:
        raise UserError(f"num_ids must be at least 1 and first_id at least 0, got {num_ids} and {first_id}")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise UserError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if cap is not None and cap <= 0:
        raise UserError(f"cap must be above 0, got {cap}")
    if not 0 <= z_loss < torch.inf:
        raise UserError(f"z_loss must be at least 0, got {z_loss}")
    if labels.device.type == "cpu":
        counted = labels if loss_mask is None else labels[loss_mask != 0]
        wrong = counted[(counted < 0) | (counted >= num_ids)]
        if wrong.numel():
            raise UserError(f"labels must be ids from 0 to {num_ids - 1}, got {wrong[0]}")


preload_backends("cross_entropy")
