"""Linear layer and cross entropy over chunks of tokens; only the logits of one chunk exist at a time.

The forward pass reads a chunk's logits for their statistics and then replaces them by their own gradient in place.
Without gradients it reads them once. A backend (``Softmax``) implements the two operations on logits: PyTorch's
operators here, kernels in ``triton``. Matrix products are PyTorch's everywhere.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.operators import LOGITS_WORKSPACE_BYTES, loss_chunk_tokens

CPU_WORKSPACE_BYTES = 8 * 2**20
"""The same on a CPU, whose allocator returns larger blocks to the system: every page is then a fault, each time."""


Reduce = Callable[[Tensor, Literal["max", "sum"]], None]
"""Takes the maximum or the sum of a tensor over ranks, in place."""


_SCALED_ELEMENTS = 2**24


class Ids(NamedTuple):
    """The rows of the vocabulary that this rank holds."""

    first: int  # the id of its first row
    used: int  # number of its rows that are ids in use; the rows behind are padding


class Statistics(NamedTuple):
    """Contribution of one rank's logits to the loss of each token, (tokens,), fp32 (fp64 for fp64 logits)."""

    largest: Tensor  # max of the logits; -inf where a rank holds padding alone
    total: Tensor  # Σ exp(logit - largest)
    target: Tensor  # logit of the label; 0 where another rank holds it


OverRanks = Callable[[Statistics], Statistics]
"""Reduces the statistics of this rank's logits to the statistics of all ranks."""


class Softmax(Protocol):
    """Operations of a backend on the logits (tokens, V / ranks) of one chunk."""

    def statistics(self, logits: Tensor, labels: Tensor, ids: Ids) -> Statistics:
        """The statistics for labels (tokens,), by one pass over the logits, which the pass may overwrite."""

    def statistics_and_gradient_(
        self, logits: Tensor, labels: Tensor, ids: Ids, factors: Tensor, over_ranks: OverRanks, z_loss: float
    ) -> Statistics:
        """The statistics of all ranks; then ``gradient_`` of the losses times ``factors`` (tokens,)."""

    def gradient_(
        self, logits: Tensor, labels: Tensor, ids: Ids, found: Statistics, dlosses: Tensor, z_loss: float
    ) -> None:
        """Replace the logits by (softmax (1 + 2 z_loss log Z) - one-hot of the label) dlosses, and padding by 0.

        ``found`` holds the statistics of all ranks; dlosses is (tokens,).
        """


def log_normalizer(found: Statistics) -> Tensor:
    """log Z, the logarithm of the softmax's normaliser, of each token: (tokens,)."""
    return found.total.log() + found.largest


def pulls(found: Statistics, dlosses: Tensor, z_loss: float) -> Tensor:
    """The factor of the softmax in the gradient, of each token: (1 + 2 z_loss log Z) dlosses."""
    return dlosses * (1 + 2 * z_loss * log_normalizer(found)) if z_loss else dlosses


def statistics(logits: Tensor, labels: Tensor, ids: Ids) -> Statistics:
    """See ``Softmax``."""
    return _exponentials_(logits, labels, ids)[0]


def statistics_and_gradient_(
    logits: Tensor, labels: Tensor, ids: Ids, factors: Tensor, over_ranks: OverRanks, z_loss: float
) -> Statistics:
    """See ``Softmax``. The gradient is the exponentials of the statistics times one number per token."""
    own, exponentials = _exponentials_(logits, labels, ids)
    found = over_ranks(own)
    scale = pulls(found, factors, z_loss) / found.total
    if found is not own:
        scale = scale * (own.largest - found.largest).exp()
    _finish_gradient_(exponentials.mul_(scale[:, None]), logits, labels, ids, factors)
    return found


def _exponentials_(logits: Tensor, labels: Tensor, ids: Ids) -> tuple[Statistics, Tensor]:
    """The statistics and exp(logit - largest) (tokens, used), in the logits' memory where these are fp32 or fp64."""
    scores = logits[:, : ids.used].to(state_dtype(logits.dtype))
    if ids.used == 0:
        none = Statistics(scores.new_full(labels.shape, -torch.inf), *(scores.new_zeros(2, len(labels))))
        return none, scores
    largest = scores.amax(dim=1)
    here, index = labels_here(labels, ids)
    target = scores.gather(1, index.unsqueeze(1)).squeeze(1).where(here, 0.0)
    exponentials = scores.sub_(largest.unsqueeze(1)).exp_()
    return Statistics(largest, exponentials.sum(dim=1), target), exponentials


def gradient_(logits: Tensor, labels: Tensor, ids: Ids, found: Statistics, dlosses: Tensor, z_loss: float) -> None:
    """See ``Softmax``."""
    # In place where the logits have the dtype of the arithmetic; half precision is copied to fp32, one chunk at a time.
    scores = logits[:, : ids.used].to(dlosses.dtype).sub_(found.largest[:, None])
    scale = pulls(found, dlosses, z_loss) / found.total
    _finish_gradient_(scores.exp_().mul_(scale[:, None]), logits, labels, ids, dlosses)


def _finish_gradient_(gradient: Tensor, logits: Tensor, labels: Tensor, ids: Ids, dlosses: Tensor) -> None:
    """Subtract the labels' one-hot from ``gradient`` (tokens, used), and write the result to the logits."""
    logits[:, ids.used :] = 0
    if ids.used == 0:
        return
    here, index = labels_here(labels, ids)
    gradient.scatter_add_(1, index[:, None], -dlosses.where(here, 0.0)[:, None])
    if gradient.dtype != logits.dtype:
        logits[:, : ids.used] = gradient


def labels_here(labels: Tensor, ids: Ids) -> tuple[Tensor, Tensor]:
    """Mask of the labels that this rank holds, and their columns (0 for the others)."""
    column = labels - ids.first
    here = (column >= 0) & (column < ids.used)
    return here, column.where(here, 0)


def chunks(hidden: Tensor, weight: Tensor, chunk_tokens: int | None) -> Iterator[slice]:
    """Cut the tokens of hidden (tokens, d), by default into equal parts whose logits fit LOGITS_WORKSPACE_BYTES."""
    if chunk_tokens is None:
        room = LOGITS_WORKSPACE_BYTES if hidden.is_cuda else min(LOGITS_WORKSPACE_BYTES, CPU_WORKSPACE_BYTES)
        chunk_tokens = loss_chunk_tokens(len(hidden), weight.shape[0] * hidden.element_size(), room)
    for start in range(0, len(hidden), chunk_tokens):
        yield slice(start, start + chunk_tokens)


def logits_of_chunks(hidden: Tensor, weight: Tensor, chunk_tokens: int | None) -> Iterator[tuple[slice, Tensor]]:
    """Each chunk of tokens and its logits (tokens, V / ranks), in one memory: each chunk overwrites the previous one.

    New memory for each chunk would cost page faults on a CPU, which take half as long as the product.
    """
    room = None
    for tokens in chunks(hidden, weight, chunk_tokens):
        some = hidden[tokens]
        if room is None:
            room = some.new_empty(len(some), len(weight))
        yield tokens, torch.mm(some, weight.mT, out=room[: len(some)])


def capped_(logits: Tensor, cap: float) -> Tensor:
    """Replace the logits s by cap tanh(s / cap), rounded once; the derivative 1 - tanh², fp32 at least."""
    tanh = logits.to(state_dtype(logits.dtype), copy=True).div_(cap).tanh_()
    torch.mul(tanh, cap, out=logits)
    # Of the tanh that is not rounded: near the cap a rounded one has no digits of the derivative.
    return tanh.square_().neg_().add_(1)


class LossGradients:
    """Gradients of hidden (tokens, d) and weight (V / ranks, d), by chunks; ``needs`` selects them.

    The gradient of hidden is this rank's part: the caller sums it over the ranks that split the vocabulary. The
    gradient of the weight is summed over chunks in fp32 and rounded once.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, needs: tuple[bool, bool]) -> None:
        self._inputs = hidden, weight
        self._hidden = torch.empty_like(hidden) if needs[0] else None
        self._weight = weight.new_zeros(weight.shape, dtype=state_dtype(weight.dtype)) if needs[1] else None

    def add(self, tokens: slice, dlogits: Tensor) -> None:
        """Add the gradients of one chunk, whose logits have the gradient ``dlogits`` (its tokens, V / ranks)."""
        hidden, weight = self._inputs
        if self._hidden is not None:
            torch.mm(dlogits, weight, out=self._hidden[tokens])
        if self._weight is not None:
            _add_product_(self._weight, dlogits.mT, hidden[tokens])

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of all chunks."""
        return self._hidden, None if self._weight is None else self._weight.to(self._inputs[1].dtype)


@torch.no_grad()
def forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ids: Ids,
    softmax: Softmax,
    chunk_tokens: int | None,
    *,
    reduce: Reduce | None,
    cap: float | None = None,
    z_loss: float = 0.0,
    gradients: LossGradients | None = None,
    factors: Tensor | None = None,
) -> Statistics:
    """The statistics of all tokens and ranks: hidden (tokens, d), weight (V / ranks, d), labels (tokens,).

    ``cap``: see ``capped_``; None: logits stay as they are. ``z_loss``: see ``Softmax.gradient_``.
    ``gradients`` collects the gradients of the sum of the losses times ``factors`` (tokens,); None: no gradients.
    """
    parts = []

    def over_ranks(own: Statistics) -> Statistics:
        return own if reduce is None else _over_ranks(own, reduce)

    with torch.autocast(hidden.device.type, enabled=False):
        for tokens, logits in logits_of_chunks(hidden, weight, chunk_tokens):
            slope = None if cap is None else capped_(logits, cap)
            if gradients is None or factors is None:
                parts.append(softmax.statistics(logits, labels[tokens], ids))
                continue
            # Reduced per chunk, not once for all chunks: the gradient needs the sums of all ranks.
            own = labels[tokens], ids, factors[tokens]
            parts.append(softmax.statistics_and_gradient_(logits, *own, over_ranks, z_loss))
            gradients.add(tokens, logits if slope is None else logits.mul_(slope))
    if not parts:
        return Statistics(*hidden.new_zeros(3, 0, dtype=state_dtype(hidden.dtype)))
    found = Statistics(*(torch.cat(column) for column in zip(*parts, strict=True)))
    return found if gradients is not None else over_ranks(found)


def _over_ranks(found: Statistics, reduce: Reduce) -> Statistics:
    """The statistics of the whole vocabulary: two reductions of numbers per token."""
    largest = found.largest.clone()
    reduce(largest, "max")
    both = torch.stack([found.total * (found.largest - largest).exp(), found.target])
    reduce(both, "sum")
    return Statistics(largest, both[0], both[1])


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
    cap: float | None = None,
    z_loss: float = 0.0,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden and weight for any cotangents ``dlosses`` (tokens,), from the statistics of all ranks."""
    gradients = LossGradients(hidden, weight, needs)
    with torch.autocast(hidden.device.type, enabled=False):
        # The logits again, by the product of the forward pass: to keep them would take 2 V bytes per token.
        for tokens, logits in logits_of_chunks(hidden, weight, chunk_tokens):
            slope = None if cap is None else capped_(logits, cap)
            part = Statistics(*(x[tokens] for x in found))
            softmax.gradient_(logits, labels[tokens], ids, part, dlosses[tokens], z_loss)
            gradients.add(tokens, logits if slope is None else logits.mul_(slope))
    return gradients.result()


def scale_(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient (n, d) *= factor (), in the wider of their dtypes and rounded once, with little further memory."""
    if gradient.dtype == factor.dtype:
        return gradient.mul_(factor)
    # On a GPU one kernel converts as it reads and writes; on a CPU PyTorch would copy the whole gradient.
    num_rows = len(gradient) if gradient.is_cuda else _SCALED_ELEMENTS // max(1, gradient.shape[1])
    for rows in gradient.split(max(1, num_rows)):
        # One-dimensional: PyTorch would round a number without dimensions to the gradient's dtype first.
        rows.mul_(factor[None])
    return gradient


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in total's dtype; tensor cores take half precision unconverted, because they sum in fp32."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
