"""The divergence of a linear output layer from another model's, in the memory of one chunk of the logits of both.

    T² KL(softmax(t / T) || softmax(s / T)) - w log softmax(s)[label]

per token, of logits s = hidden weightᵀ and the other model's logits t (Hinton et al. 2015, arXiv 1503.02531, section
2). Only hidden and weight have gradients. PyTorch's operators compute it on every device.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.errors import UserError
from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.cross_entropy.chunked import (
    Ids,
    LossGradients,
    Reduce,
    capped_,
    labels_here,
    logits_of_chunks,
    scale_,
)


class SoftTargets(NamedTuple):
    """A distribution for each token, as the inputs of the output layer that gives it, and its weight in the loss."""

    hidden: Tensor
    """(..., d') without a gradient; the tokens are those of the layer that learns."""
    weight: Tensor
    """(rows, d') of hidden's dtype: the same ids as the layer that learns."""
    cap: float | None = None
    """Logits t are cap tanh(t / cap); None: they are t."""
    temperature: float = 1.0
    """T, above 0: both sets of logits are divided by T in the divergence."""
    cross_entropy_weight: float = 0.0
    """w: weight of the cross entropy of the labels."""


class _Layer(NamedTuple):
    """The arguments of a pass that are no inputs of autograd."""

    labels: Tensor
    targets: SoftTargets
    ids: Ids
    reduce: Reduce | None
    cap: float | None
    chunk_tokens: int | None


class _LinearDivergence(torch.autograd.Function):
    """Losses times ``factors``, with the gradients of their sum from the same logits, as ``_LinearCrossEntropy``."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, factors: Tensor, layer: _Layer, with_gradients: bool
    ) -> Tensor:
        gradients = None
        if with_gradients and any(ctx.needs_input_grad[:2]):
            gradients = LossGradients(hidden, weight, ctx.needs_input_grad[:2])
        losses = _forward(hidden, weight, layer, gradients, factors)
        ctx.save_for_backward(hidden, weight, factors)
        ctx.layer, ctx.gradients = layer, None if gradients is None else gradients.result()
        return torch.where(factors == 0, 0.0, losses * factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        made, ctx.gradients = ctx.gradients, None
        is_sum = all(stride == 0 or size == 1 for stride, size in zip(dlosses.stride(), dlosses.shape, strict=True))
        if made is not None and is_sum and dlosses.numel():
            return *(None if gradient is None else scale_(gradient, dlosses[0]) for gradient in made), *(None,) * 3
        # The products need each token's cotangent first: the logits once more.
        hidden, weight, factors = ctx.saved_tensors
        gradients = LossGradients(hidden, weight, ctx.needs_input_grad[:2])
        _forward(hidden, weight, ctx.layer, gradients, torch.where(factors == 0, 0.0, dlosses * factors))
        return *gradients.result(), *(None,) * 3


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    targets: SoftTargets,
    *,
    num_ids: int,
    first_id: int = 0,
    reduce: Reduce | None = None,
    loss_mask: Tensor | None = None,
    cap: float | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Divergence from ``targets`` plus weighted cross entropy of each token; differentiable in hidden and weight.

    Arguments and results are those of ``linear_cross_entropy``. ``reduce`` is called twice per chunk, in a recomputing
    backward pass too.

    Returns:
        The losses (...) in nats, fp32 (fp64 for fp64 inputs).

    Raises:
        UserError: the targets have other tokens, rows or another dtype than hidden and weight.
    """
    if targets.hidden.shape[:-1] != hidden.shape[:-1] or len(targets.weight) != len(weight):
        raise UserError(
            f"targets have {tuple(targets.hidden.shape[:-1])} tokens and {len(targets.weight)} rows, but hidden has "
            f"{tuple(hidden.shape[:-1])} tokens and weight {len(weight)} rows"
        )
    if targets.hidden.dtype != hidden.dtype or targets.weight.dtype != hidden.dtype:
        raise UserError(f"targets must be of hidden's dtype {hidden.dtype}, got {targets.hidden.dtype}")
    ids = Ids(first_id, min(max(num_ids - first_id, 0), len(weight)))
    wide = state_dtype(hidden.dtype)
    factors = hidden.new_ones(labels.shape, dtype=wide) if loss_mask is None else loss_mask.detach().to(wide)
    flat = targets._replace(hidden=targets.hidden.flatten(0, -2))
    layer = _Layer(labels.reshape(-1), flat, ids, reduce, cap, chunk_tokens)
    losses: Tensor = _LinearDivergence.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, factors.reshape(-1), layer, torch.is_grad_enabled()
    )
    return losses.view(labels.shape)


@torch.no_grad()
def _forward(hidden: Tensor, weight: Tensor, layer: _Layer, gradients: LossGradients | None, factors: Tensor) -> Tensor:
    """The losses (tokens,) without factors; ``gradients`` collects those of the sum of losses times ``factors``."""
    labels, targets, ids, reduce, cap, chunk_tokens = layer
    parts = []
    with torch.autocast(hidden.device.type, enabled=False):
        own = logits_of_chunks(hidden, weight, chunk_tokens)
        others = logits_of_chunks(targets.hidden, targets.weight, chunk_tokens)
        for (tokens, logits), (_, wanted) in zip(own, others, strict=True):
            slope = None if cap is None else capped_(logits, cap)
            if targets.cap is not None:
                capped_(wanted, targets.cap)
            chunk = _Chunk(logits, wanted, labels[tokens], ids, reduce, targets)
            parts.append(chunk.losses)
            if gradients is not None:
                chunk.gradient_(logits, factors[tokens])
                gradients.add(tokens, logits if slope is None else logits.mul_(slope))
    return torch.cat(parts) if parts else factors.new_zeros(0)


class _Chunk:
    """The losses of one chunk of tokens, and the parts of their gradients.

    Args:
        logits, wanted: (m, rows), of the layer that learns and of the other.
        labels: (m,).
    """

    def __init__(
        self, logits: Tensor, wanted: Tensor, labels: Tensor, ids: Ids, reduce: Reduce | None, targets: SoftTargets
    ) -> None:
        wide, temperature = state_dtype(logits.dtype), targets.temperature
        self.ids, self.temperature, self.cross_entropy_weight = ids, temperature, targets.cross_entropy_weight
        both = [x[:, : ids.used].to(wide) for x in (logits, wanted)]
        # A rank of padding alone has no largest logit.
        least = labels.new_full((len(labels), 1), -torch.inf, dtype=wide)
        largest = torch.stack([torch.cat([x, least], dim=1).amax(dim=1) for x in both])
        if reduce is not None:
            reduce(largest, "max")
        scores, aims = (x - most[:, None] for x, most in zip(both, largest, strict=True))
        self.here, self.index = labels_here(labels, ids)
        self.own, self.other = (scores / temperature).exp_(), (aims / temperature).exp_()
        sums = [self.own.sum(dim=1), self.other.sum(dim=1), (aims.sub_(scores).mul_(self.other)).sum(dim=1)]
        if self.cross_entropy_weight:
            picked = torch.zeros_like(sums[0])
            if ids.used:
                picked = scores.gather(1, self.index[:, None]).squeeze(1).where(self.here, 0.0)
            self.hard = scores.exp_()
            sums += [self.hard.sum(dim=1), picked]
        self.sums = torch.stack(sums)
        if reduce is not None:
            reduce(self.sums, "sum")
        own, other, cross, *hard = self.sums
        self.losses = temperature**2 * (cross / (temperature * other) + own.log() - other.log())
        if hard:
            self.losses += self.cross_entropy_weight * (hard[0].log() - hard[1])

    def gradient_(self, logits: Tensor, factors: Tensor) -> None:
        """Replace ``logits`` by the gradient of the losses times ``factors`` (m,), and padding by 0."""
        logits[:, self.ids.used :] = 0
        if self.ids.used == 0:
            return
        own, other, _, *hard = self.sums
        scale = self.temperature * factors
        gradient = self.own.mul_((scale / own)[:, None]).sub_(self.other.mul_((scale / other)[:, None]))
        if hard:
            weight = self.cross_entropy_weight * factors
            gradient.add_(self.hard.mul_((weight / hard[0])[:, None]))
            gradient.scatter_add_(1, self.index[:, None], -weight.where(self.here, 0.0)[:, None])
        logits[:, : self.ids.used] = gradient
