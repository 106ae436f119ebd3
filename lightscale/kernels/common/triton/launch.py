"""What the launches of Triton kernels share: options, starts of documents, layouts, precision, and splits of rows."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

NUM_WARPS = 4

LAUNCH = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}
"""Options of every launch. Triton 3.10 will not fuse multiplications and additions unless asked to."""

# Rows are cut into splits until every multiprocessor has so many programs that scan states, and no further: the tokens
# of a row in several splits are read once more. Nor has a split fewer chunks than this.
_PROGRAMS_PER_MULTIPROCESSOR = 2
_LEAST_SPLIT_CHUNKS = 8


def document_starts(cu_seqlens: Tensor | None, *, num_rows: int, num_tokens: int) -> Tensor | None:
    """Where in its row each token's document begins, (B, T) int32; -1 in a row's first one: it may begin before.

    Made on cu_seqlens' device without waiting for it. None for None.
    """
    if cu_seqlens is None:
        return None
    begins = torch.zeros(num_rows * num_tokens + 1, dtype=torch.bool, device=cu_seqlens.device)
    begins.index_fill_(0, cu_seqlens.long(), True)
    begins = begins[:-1].view(num_rows, num_tokens)
    position = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    # A document that begins with its row is not marked: what enters the row belongs to the row's first document.
    starts = torch.where(begins & (position > 0), position, -1)
    return starts.cummax(1).values if num_tokens else starts


def dense_last(x: Tensor) -> Tensor:
    """``x``, copied only when the values of its last dimension do not lie side by side."""
    return x if x.stride(-1) == 1 or x.size(-1) == 1 else x.contiguous()


def power_of_two(width: int, *, most: int) -> int:
    """The smallest tile that holds ``width`` and that a dot takes (16 at least), or ``most``."""
    return min(most, max(16, 1 << (width - 1).bit_length()))


def dot_precision(dtype: torch.dtype) -> str:
    """Triton's ``input_precision``: three TF32 products give fp32's precision on tensor cores, one does not."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs run side by side, at least; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Launch on x's GPU, whichever is current; nothing for the CPU."""
    return torch.cuda.device_of(x)


@dataclass(frozen=True, kw_only=True)
class Splits:
    """How the chunks of rows are divided among programs that scan states; a split is some whole chunks of a row."""

    num_programs: int
    """Of one split."""
    num_splits: int
    """Of one row, at least 1."""
    split_chunks: int
    """Chunks of a split but the last."""

    @classmethod
    def of(cls, num_programs: int, num_chunks: int, device: torch.device) -> "Splits":
        """As many as keep the GPU busy, when each takes ``num_programs`` programs and a row has ``num_chunks``."""
        length = split_chunks(num_chunks, num_programs, device)
        return cls(num_programs=num_programs, num_splits=max(-(-num_chunks // length), 1), split_chunks=length)

    def scan(
        self,
        launch: Callable[[Tensor | None, Tensor | None, Tensor | None, bool], None],
        fold: Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor], None],
        entering: Tensor | None,
        final: Tensor,
        *,
        decays: tuple[int, ...] | None,
        keep: bool,
    ) -> None:
        """Scan rows from the states that enter them, or zero, and fill ``final`` (B, H, …) with those that leave.

        Args:
            launch: scans every split by itself. Called with what enters each or None, with what it fills or None (what
                leaves each, the decay through each), and with whether it keeps what is asked for of chunks.
            fold: called with what leaves each split when nothing enters it, the decay through each, what enters the
                rows, and what it fills: what enters each split or None, and ``final``.
            entering: (B, H, …), or None for zero.
            final: fp32.
            decays: shape of a head's decay through a split; None without decays that splits must tell.
            keep: as of ``launch``.
        """
        if not final.numel():
            return
        entering = None if entering is None else entering.contiguous()
        if self.num_splits == 1:
            launch(entering, final, None, keep)
            return
        # Three launches: each split from zero, side by side; what enters each, by a fold over the few of them; and
        # each again from that. Inputs are read twice, which costs less than multiprocessors without work.
        of_splits = (*final.shape[:2], self.num_splits)
        local = final.new_empty(*of_splits, *final.shape[2:])
        through = None if decays is None else final.new_empty(*of_splits, *decays)
        launch(None, local, through, False)
        between = torch.empty_like(local) if keep else None
        fold(local, through, entering, between, final)
        if keep:
            launch(between, None, None, True)


def split_chunks(num_chunks: int, num_programs: int, device: torch.device) -> int:
    """Chunks of a split when each split takes ``num_programs`` programs."""
    # No split more than keeps the GPU busy, as each token of a row in several is read twice.
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device) // max(num_programs, 1)
    splits = max(min(wanted, num_chunks // _LEAST_SPLIT_CHUNKS), 1)
    return max(-(-num_chunks // splits), 1)
