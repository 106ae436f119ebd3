"""Cross entropy over a vocabulary that is split over the tensor ranks.

Megatron's cross entropy casts every dtype to fp32, which hides fp64 comparisons, and has no padding rows. This one
computes in fp32 for half precision, in the dtype of the logits for others, and skips padding rows in the sum.
"""

from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from lightscale.kernels.cross_entropy import Reduce, linear_cross_entropy_and_z_loss, linear_log_probability
from lightscale.kernels.cross_entropy.divergence import SoftTargets, linear_divergence
from lightscale.parallel.megatron import gather_from_sequence_parallel_region


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup,
    loss_mask: Tensor | None = None,
    cap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """-log softmax(hidden weightᵀ)[label] per token, (n, b), without holding the logits; fp32 (fp64 for fp64 inputs).

    The second result is the term of ``z_loss`` in them, without a gradient. The gradients of their sum are made in the
    same pass (``kernels.cross_entropy``).

    With several tensor ranks hidden is gathered along the tokens. Every rank computes the part of its gradient from its
    rows of the vocabulary; the parts are reduce-scattered, as in Megatron's output layer.

    Args:
        hidden: (n / tensor, b, d).
        weight: (V / tensor, d), this rank's rows of the vocabulary.
        labels: (n, b), int64 global ids below ``vocab_size``.
        vocab_size: ids in use; rows from there on are padding and take no probability.
        group: the tensor group.
        loss_mask: (n, b), factor of each loss; None for 1.
        cap: logits s are cap tanh(s / cap); None: they are s.
        z_loss: factor of log² Z in the losses.
    """
    options: dict[str, Any] = {"num_ids": vocab_size, "loss_mask": loss_mask, "cap": cap, "z_loss": z_loss}
    if group.size() == 1:
        return linear_cross_entropy_and_z_loss(hidden, weight, labels, **options)

    # Activations are split by token between layers (Megatron's sequence parallelism), but a rank's rows of the
    # vocabulary need every token. Backward the mapping sums the ranks' parts and shares them out by token again.
    gathered = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    first_id = group.rank() * weight.size(0)
    return linear_cross_entropy_and_z_loss(gathered, weight, labels, first_id=first_id, reduce=_over(group), **options)


def vocab_parallel_linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    targets: SoftTargets,
    *,
    vocab_size: int,
    group: dist.ProcessGroup,
    loss_mask: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """The divergence of each token's distribution from ``targets``, (n, b); see ``kernels.cross_entropy.divergence``.

    Arguments as of ``vocab_parallel_linear_cross_entropy``; the tokens and rows of ``targets`` are split as those of
    hidden and weight.
    """
    several = group.size() > 1
    if several:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
        targets = targets._replace(hidden=gather_from_sequence_parallel_region(targets.hidden, group=group))
    return linear_divergence(
        hidden,
        weight,
        labels,
        targets,
        num_ids=vocab_size,
        first_id=group.rank() * weight.size(0),
        reduce=_over(group) if several else None,
        loss_mask=loss_mask,
        cap=cap,
    )


def vocab_parallel_log_probability(
    hidden: Tensor,
    weight: Tensor,
    chosen: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden weightᵀ)[label] of some tokens, and whether the label is their most probable id; no gradient.

    Args:
        hidden, weight, vocab_size, group, cap: as of ``vocab_parallel_linear_cross_entropy``.
        chosen: (m,) int64, indices into the b·n tokens, row after row.
        labels: (m,) int64 global ids below ``vocab_size``.

    Returns:
        (m,) fp32 (fp64 for fp64 inputs) and (m,) bool, the same on all ranks.
    """
    several = group.size() > 1
    if several:
        hidden = gather_from_sequence_parallel_region(hidden, group=group)
    n, b = hidden.shape[:2]
    # Tokens come first in activations, rows in indices.
    rows = hidden.reshape(n * b, -1)[chosen % n * b + chosen // n]
    first_id = group.rank() * weight.size(0)
    reduce = _over(group) if several else None
    return linear_log_probability(rows, weight, labels, num_ids=vocab_size, first_id=first_id, reduce=reduce, cap=cap)


def _over(group: dist.ProcessGroup) -> Reduce:
    def reduce(x: Tensor, how: Literal["max", "sum"]) -> None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group=group)

    return reduce
