"""Options, layouts, precision and splits of rows for the launches of Triton kernels."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

NUM_WARPS = 4

LAUNCH = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}
"""Options of every launch. Triton 3.10 will not fuse multiplications and additions unless asked to."""

# Rows are cut into splits until every multiprocessor has this many programs that scan states. No further: the tokens of
# a row in several splits are read twice. The second number is the least number of chunks in a split.
_PROGRAMS_PER_MULTIPROCESSOR = 2
_LEAST_SPLIT_CHUNKS = 8


def dense_last(x: Tensor) -> Tensor:
    """``x``, copied only if the values of its last dimension are not contiguous."""
    return x if x.stride(-1) == 1 or x.size(-1) == 1 else x.contiguous()


def power_of_two(width: int, *, most: int) -> int:
    """The smallest tile that holds ``width`` and that a dot accepts (16 at least), or ``most``."""
    return min(most, max(16, 1 << (width - 1).bit_length()))


def dot_precision(dtype: torch.dtype) -> str:
    """Triton's ``input_precision``: three TF32 products reach fp32's precision on tensor cores, one does not."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors, the least number of parallel programs; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """A context that makes x's GPU the current one; no effect for the CPU."""
    return torch.cuda.device_of(x)


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Division of the chunks of rows among programs that scan states; a split is some whole chunks of a row."""

    num_programs: int
    """Programs per split."""
    num_splits: int
    """Splits per row, at least 1."""
    split_chunks: int
    """Chunks per split, except the last split of a row."""

    @classmethod
    def of(cls, num_programs: int, num_chunks: int, device: torch.device) -> "Splits":
        """The fewest splits that fill the GPU, with ``num_programs`` programs per split and ``num_chunks`` per row."""
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
        """Scan rows from the states that enter them, or from zero; ``final`` (B, H, …) receives the states that leave.

        Args:
            launch: scans every split independently. Its arguments: the states that enter the splits or None; its
                results or None (the states that leave the splits, the decays through them); and whether it stores the
                chunks' states.
            fold: folds the splits of a row. Its arguments: the states that leave the splits from zero states; the
                decays through the splits; the states that enter the rows; and its results, the states that enter the
                splits or None, and ``final``.
            entering: (B, H, …), or None for zero.
            final: fp32.
            decays: shape of a head's decay through a split; None if ``launch`` computes no decays.
            keep: whether ``launch`` stores the chunks' states.
        """
        if not final.numel():
            return
        entering = None if entering is None else entering.contiguous()
        if self.num_splits == 1:
            launch(entering, final, None, keep)
            return
        # Three launches: all splits from zero, side by side; a fold over the few splits; and all splits again from the
        # states that enter them. Inputs are read twice, which costs less than idle multiprocessors.
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
    # No more splits than fill the GPU: each token of a row in several splits is read twice.
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device) // max(num_programs, 1)
    splits = max(min(wanted, num_chunks // _LEAST_SPLIT_CHUNKS), 1)
    # Two passes over halves side by side take as long as one over the whole, which is read once.
    splits = 1 if splits == 2 else splits
    return max(-(-num_chunks // splits), 1)
