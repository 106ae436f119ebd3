"""Sums of exponentials over whole documents: all tokens of a document read one state (BiRN, equation 9).

    z = log Σ_i e^{b_i}        db_i = e^{b_i - z} Σ_t dz_t

A row may be one rank's part of a sequence. Then the sum of its first document includes tokens before the row, the sum
of its last document tokens behind it. The same holds for Σ dz_t. ``bounds`` are document boundaries on the host, every
row start included. None: every row is one document, or a part of one.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.kernels.common.states import Arriving, arrived, state_dtype, without_autocast
from lightscale.kernels.lightnet.noncausal import Bounds, row_ends
from lightscale.kernels.log_sum.chunked import weight


def _by_document(x: Tensor, bounds: Bounds) -> list[Tensor]:
    """(B, T, D) as parts (n, D) of documents, (B, n, D) at once without bounds."""
    if bounds is None:
        return [x]
    return list(x.flatten(0, 1).split([end - start for start, end in pairwise(bounds)]))


def _of_tokens(of_documents: Tensor, x: Tensor, bounds: Bounds) -> Tensor:
    """Values (N, D) of documents as values (B, T, D) of the tokens of x."""
    if bounds is None:
        return of_documents[:, None].expand(x.shape)
    parts = [one.expand(end - start, -1) for one, (start, end) in zip(of_documents, pairwise(bounds), strict=True)]
    return torch.cat(parts).view(x.shape)


@without_autocast
def document_sums(b: Tensor, bounds: Bounds = None) -> Tensor:
    """z (N, D) of the part here of each of N documents; without bounds N is B."""
    wide = b.to(state_dtype(b.dtype))
    if not b.shape[1]:
        return torch.full_like(wide[:, :0].sum(1), -torch.inf)
    found = [torch.logsumexp(part, dim=-2) for part in _by_document(wide, bounds)]
    return found[0] if bounds is None else torch.stack(found)


def state_fwd(b: Tensor, bounds: Bounds = None) -> tuple[Tensor, Tensor, Tensor]:
    """The sums (B, D) of each row's first and last document in the row, and (B,) 0 where the two differ."""
    z = document_sums(b, bounds)
    first, last = row_ends(bounds, b)
    return z[first], z[last], (first == last).to(z.dtype)


def total_sums(b: Tensor, sides: tuple[Tensor, Tensor] | None, bounds: Bounds = None) -> Tensor:
    """z (N, D) of whole documents, from the sums (B, D) of the tokens before and behind each row."""
    z = document_sums(b, bounds)
    if sides is not None:
        for index, entering in zip(row_ends(bounds, b), sides, strict=True):
            z = z.index_copy(0, index, torch.logaddexp(z[index], entering))
    return z


def out_fwd(b: Tensor, z: Tensor, bounds: Bounds = None) -> Tensor:
    """The z (B, T, D) that each token of b reads, from z (N, D) of whole documents."""
    return _of_tokens(z, b, bounds)


@without_autocast
def document_cotangents(dz: Tensor, bounds: Bounds = None) -> Tensor:
    """Σ_t dz_t (N, D) over the part here of each document."""
    found = [part.sum(-2) for part in _by_document(dz, bounds)]
    return found[0] if bounds is None else torch.stack(found)


def state_bwd(dz: Tensor, bounds: Bounds = None) -> tuple[Tensor, Tensor]:
    """The cotangents (B, D) of the sums that enter each row from both sides, by the row's own outputs."""
    own = document_cotangents(dz, bounds)
    first, last = row_ends(bounds, dz)
    return own[first], own[last]


@without_autocast
def grad_bwd(
    b: Tensor,
    dz: Tensor,
    z: Tensor,
    dsides: Arriving[tuple[Tensor, Tensor] | None] = None,
    bounds: Bounds = None,
) -> Tensor:
    """The gradient of b (B, T, D).

    Args:
        b: inputs; a row may be without tokens.
        dz: cotangents of the outputs (B, T, D).
        z: of whole documents, see ``total_sums``.
        dsides: Σ dz (B, D) of the tokens before the row in its first document, and (B, D) behind the row in its last
            one; or a function that waits for both; zero when None.
        bounds: of documents.
    """
    own = document_cotangents(dz, bounds)
    from_sides = arrived(dsides)
    if from_sides is not None:
        for index, part in zip(row_ends(bounds, b), from_sides, strict=True):
            own = own.index_add(0, index, part.to(own.dtype))
    share = weight(b.to(z.dtype), _of_tokens(z, b, bounds))
    return (share * _of_tokens(own, b, bounds)).to(b.dtype)


class DocumentLogSum(torch.autograd.Function):
    """The operator of whole rows with its gradient; saves the inputs and the documents' sums."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, bounds: Bounds) -> Tensor:
        """See ``log_sum_whole``."""
        z = document_sums(b, bounds)
        ctx.bounds = bounds
        ctx.save_for_backward(b, z)
        return out_fwd(b, z, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, None]:
        """The gradient of b."""
        b, z = ctx.saved_tensors
        return grad_bwd(b, dz, z, None, ctx.bounds), None
