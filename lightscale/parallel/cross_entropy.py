"""Cross entropy over a vocabulary that is split over the tensor ranks.

Megatron's own casts to fp32 whatever comes in, which hides fp64 comparisons, and knows no padding rows. This one
computes in fp32 for half precision and in the dtype of the logits otherwise, and leaves padding rows out of the sum.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
        rows = logits.size(-1)
        first = group.rank() * rows
        scores = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits.clone()
        if first + rows > vocab_size:
            scores[..., max(vocab_size - first, 0) :] = -torch.inf
        largest = scores.amax(dim=-1)
        if group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        scores = scores.sub_(largest.unsqueeze(-1))
        here = (labels >= first) & (labels < first + rows)
        index = torch.where(here, labels - first, 0).unsqueeze(-1)
        target = torch.where(here, scores.gather(-1, index).squeeze(-1), 0.0)
        exponentials = scores.exp_()
        total = exponentials.sum(dim=-1)
        if group.size() > 1:
            both = torch.stack([target, total])
            dist.all_reduce(both, group=group)
            target, total = both.unbind()
        # Only the probabilities are kept for backward: softmax minus one-hot is the gradient.
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), index, here)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, here = ctx.saved_tensors
        grad = probabilities.clone()
        grad.scatter_add_(-1, index, -here.unsqueeze(-1).to(grad.dtype))
        return grad.mul_(grad_output.unsqueeze(-1)).to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, vocab_size: int, group: dist.ProcessGroup
) -> Tensor:
    """-log softmax(logits)[label] per token, (..., ) in fp32 (fp64 for fp64 logits).

    Args:
        logits: (..., V / tensor), this rank's rows of the vocabulary.
        labels: (...), int64 global ids below ``vocab_size``.
        vocab_size: ids in use; rows from there on are padding and take no probability.
        group: the tensor group.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, vocab_size, group)
