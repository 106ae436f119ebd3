"""Documents inside a row: their boundaries, checked once, and the number of each token's document.

``cu_seqlens`` (N+1,) holds the boundaries over the flattened B·T tokens, every row start included. A row may begin in
the middle of a document: its first document is then the rest of that document.
"""

import torch
from torch import Tensor

from lightscale.errors import UserError


def check_cu_seqlens(cu_seqlens: Tensor, *, num_rows: int, num_tokens: int) -> None:
    """Refuse boundaries that do not describe ``num_rows`` rows of ``num_tokens`` tokens.

    The values are read on a CPU only: on a GPU a read would stall the stream at every call.

    Raises:
        UserError: the shape, dtype, ends or order are wrong, or a row start is missing.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise UserError(
            f"cu_seqlens must be a non-empty 1-D int32 or int64 tensor of document boundaries, "
            f"got shape {tuple(cu_seqlens.shape)}, {cu_seqlens.dtype}"
        )
    if cu_seqlens.device.type != "cpu":
        return
    boundaries = cu_seqlens.tolist()
    total = num_rows * num_tokens
    if boundaries[0] != 0 or boundaries[-1] != total:
        raise UserError(
            f"cu_seqlens must begin with 0 and end with B·T = {num_rows}·{num_tokens} = {total}, "
            f"got {boundaries[0]} and {boundaries[-1]}"
        )
    if boundaries != sorted(boundaries):
        raise UserError("cu_seqlens must not decrease")
    known = set(boundaries)
    missing = [row * num_tokens for row in range(num_rows) if row * num_tokens not in known]
    if missing:
        raise UserError(
            f"cu_seqlens must contain every row start, a multiple of T = {num_tokens}; it lacks {missing[0]}"
        )


def boundaries_of_tokens(positions: Tensor) -> Tensor:
    """``cu_seqlens`` (B·T + 1,) int64 of rows with ``positions`` (B, T): the start of each token's document, then B·T.

    The size depends on the rows alone and no value is read, so that the boundaries of other documents can take the
    place of these in a CUDA graph. A boundary that is there several times encloses empty documents, which have no
    results: operators compute the same numbers as with each boundary once.
    """
    rows, length = positions.shape
    slots = torch.arange(rows * length, device=positions.device).view(rows, length)
    begins = positions == 0
    begins[:, :1] = True
    starts = torch.where(begins, slots, 0).flatten().cummax(0).values if slots.numel() else slots.flatten()
    return torch.cat([starts, starts.new_full((1,), rows * length)])


def document_numbers(cu_seqlens: Tensor, *, num_rows: int, num_tokens: int) -> Tensor:
    """The number (B, T) of each token's document inside its row; the row begins with document 0."""
    starts = torch.zeros(num_rows * num_tokens + 1, dtype=torch.int64, device=cu_seqlens.device)
    # index_fill_, because an assignment by index copies the number to a GPU first, and the host waits.
    starts.index_fill_(0, cu_seqlens.long(), 1)
    starts = starts[:-1].view(num_rows, num_tokens)
    starts[:, :1] = 0
    return starts.cumsum(1)


def numbers_or_none(cu_seqlens: Tensor | None, x: Tensor) -> Tensor | None:
    """``document_numbers`` of the rows of x (B, T, …); None without boundaries."""
    return None if cu_seqlens is None else document_numbers(cu_seqlens, num_rows=x.shape[0], num_tokens=x.shape[1])
