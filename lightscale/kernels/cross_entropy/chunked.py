"""Linear layer and cross entropy over chunks of tokens, so that the logits of one chunk exist at a time.

Forward keeps two numbers per token, the largest logit and the sum of exponentials; backward makes a chunk's logits
again and turns them into their own gradient in place. The two operations on logits come from a backend
(``Softmax``): PyTorch's operators here, kernels in ``triton``. Matrix products are PyTorch's everywhere.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.operators import LOGITS_WORKSPACE_BYTES

CPU_WORKSPACE_BYTES = 8 * 2**20
"""The same on a CPU, whose allocator returns larger blocks to the system: every page is then a fault, each time."""


class Ids(NamedTuple):
    """The rows of the vocabulary that this rank holds."""

    first: int  # the id of its first row
    used: int  # how many of its rows are ids in use; those behind are padding


class Statistics(NamedTuple):
    """What one rank's logits contribute to the loss of each token, (tokens,), fp32 (fp64 for fp64 logits)."""

    largest: Tensor  # max of the logits; -inf where a rank holds nothing but padding
    total: Tensor  # Σ exp(logit - largest)
    target: Tensor  # logit of the label; 0 where another rank holds it


class Softmax(Protocol):
    """What a backend computes on the logits (tokens, V / ranks) of one chunk."""

    def statistics(self, logits: Tensor, labels: Tensor, ids: Ids) -> Statistics:
        """One pass over the logits."""

    def gradient_(self, logits: Tensor, labels: Tensor, ids: Ids, found: Statistics, dlosses: Tensor) -> None:
        """Replace the logits by (softmax - one-hot of the label) dlosses, and padding by 0.

        ``found`` are the statistics of all ranks together.
        """


def statistics(logits: Tensor, labels: Tensor, ids: Ids) -> Statistics:
    """See ``Softmax``."""
    scores = logits[:, : ids.used].to(state_dtype(logits.dtype))
    if ids.used == 0:
        return Statistics(scores.new_full(labels.shape, -torch.inf), *(scores.new_zeros(2, len(labels))))
    largest = scores.amax(dim=1)
    here, index = _index(labels, ids)
    target = scores.gather(1, index.unsqueeze(1)).squeeze(1).where(here, 0.0)
    return Statistics(largest, (scores - largest.unsqueeze(1)).exp_().sum(dim=1), target)


def gradient_(logits: Tensor, labels: Tensor, ids: Ids, found: Statistics, dlosses: Tensor) -> None:
    """See ``Softmax``."""
    logits[:, ids.used :] = 0
    if ids.used == 0:
        return
    scores = logits[:, : ids.used]
    # In place where the logits have the dtype of the arithmetic; of half precision one chunk is copied to fp32.
    gradient = scores.sub_(found.largest[:, None]) if scores.dtype == dlosses.dtype else scores - found.largest[:, None]
    gradient = gradient.exp_().mul_((dlosses / found.total)[:, None])
    here, index = _index(labels, ids)
    gradient.scatter_add_(1, index[:, None], -dlosses.where(here, 0.0)[:, None])
    if gradient is not scores:
        scores.copy_(gradient)


def _index(labels: Tensor, ids: Ids) -> tuple[Tensor, Tensor]:
    """Which labels this rank holds, and their columns (0 for the others)."""
    column = labels - ids.first
    here = (column >= 0) & (column < ids.used)
    return here, column.where(here, 0)


def chunks(hidden: Tensor, weight: Tensor, chunk_tokens: int | None) -> Iterator[slice]:
    """Cut the tokens of hidden (tokens, d), by default into equal parts whose logits fit LOGITS_WORKSPACE_BYTES."""
    if chunk_tokens is None:
        # At least 128 tokens, or the products of the two sides would be too small for a GPU.
        room = LOGITS_WORKSPACE_BYTES if hidden.is_cuda else min(LOGITS_WORKSPACE_BYTES, CPU_WORKSPACE_BYTES)
        fitting = max(128, room // (weight.shape[0] * hidden.element_size()))
        parts = -(-len(hidden) // fitting)
        # Equal parts: a short last chunk would cost nearly as much as a full one.
        chunk_tokens = max(1, -(-len(hidden) // max(1, parts)))
    for start in range(0, len(hidden), chunk_tokens):
        yield slice(start, start + chunk_tokens)


@torch.no_grad()
def forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, ids: Ids, softmax: Softmax, chunk_tokens: int | None
) -> Statistics:
    """The statistics of all tokens: hidden (tokens, d), weight (V / ranks, d), labels (tokens,)."""
    parts = []
    with torch.autocast(hidden.device.type, enabled=False):
        for tokens in chunks(hidden, weight, chunk_tokens):
            parts.append(softmax.statistics(hidden[tokens] @ weight.mT, labels[tokens], ids))
    if not parts:
        return Statistics(*hidden.new_zeros(3, 0, dtype=state_dtype(hidden.dtype)))
    return Statistics(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ids: Ids,
    found: Statistics,
    dlosses: Tensor,
    softmax: Softmax,
    chunk_tokens: int | None,
    *,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden and weight, of which ``needs`` says which are wanted.

    That of hidden is this rank's part: the caller sums it over the ranks that split the vocabulary. That of the
    weight is summed over chunks in fp32 and rounded once.
    """
    dhidden = torch.empty_like(hidden) if needs[0] else None
    dweight = weight.new_zeros(weight.shape, dtype=state_dtype(weight.dtype)) if needs[1] else None
    with torch.autocast(hidden.device.type, enabled=False):
        for tokens in chunks(hidden, weight, chunk_tokens):
            # The logits again, by the product that made them in forward: keeping them would take 2 V bytes a token.
            logits = hidden[tokens] @ weight.mT
            part = Statistics(*(x[tokens] for x in found))
            softmax.gradient_(logits, labels[tokens], ids, part, dlosses[tokens])
            if dhidden is not None:
                torch.mm(logits, weight, out=dhidden[tokens])
            if dweight is not None:
                _add_product_(dweight, logits.mT, hidden[tokens])
    return dhidden, None if dweight is None else dweight.to(weight.dtype)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in total's dtype; half precision stays as it is on tensor cores, which sum in fp32 anyway."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
