"""Cross entropy over a vocabulary that is split over the tensor ranks.

Megatron's own casts to fp32 whatever comes in, which hides fp64 comparisons, and knows no padding rows. This one
computes in fp32 for half precision and in the dtype of the logits otherwise, and skips padding rows in the sum.
"""

from typing import Literal

import torch.distributed as dist
from torch import Tensor

from lightscale.kernels.cross_entropy import linear_cross_entropy
from lightscale.parallel.megatron import gather_from_sequence_parallel_region


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int, group: dist.ProcessGroup
) -> Tensor:
    """-log softmax(hidden weightᵀ)[label] per token, (n, b), without holding the logits; fp32 (fp64 for fp64 inputs).

    With several tensor ranks hidden is gathered along the tokens, and its gradient, of which every rank has the part of
    its rows of the vocabulary, is summed and shared out again, as Megatron's output layer does.

    Args:
        hidden: (n / tensor, b, d).
        weight: (V / tensor, d), this rank's rows of the vocabulary.
        labels: (n, b), int64 global ids below ``vocab_size``.
        vocab_size: ids in use; rows from there on are padding and take no probability.
        group: the tensor group.
    """
    if group.size() == 1:
        return linear_cross_entropy(hidden, weight, labels, num_ids=vocab_size)

    def reduce(x: Tensor, how: Literal["max", "sum"]) -> None:
        dist.all_reduce(x, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group=group)

    # Activations are split by token between layers (Megatron's sequence parallelism), but a rank's rows of the
    # vocabulary need every token. Backward the mapping sums the ranks' parts and shares them out by token again.
    gathered = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    first_id = group.rank() * weight.size(0)
    return linear_cross_entropy(gathered, weight, labels, num_ids=vocab_size, first_id=first_id, reduce=reduce)
