"""Two scans of the same tokens, from the left and from the right, whose outputs are added.

They are one scan of twice as many rows: of the rows, and of their mirror image. So an operator whose tokens read those
before them reads whole documents, by its own passes. A token reads itself in both directions, as in the code of HGRN2's
authors; docs/reference/architectures/hgrn2.md has the equation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.parallel.sequence.algebra import BOTH, Algebra, Tensors
from lightscale.parallel.sequence.scans import DiagonalScan, Inputs, Scan


def doubled(x: Tensor) -> Tensor:
    """x (B, T, …) and its mirror image behind it, (2B, T, …)."""
    # One flip mirrors all tokens flattened, so that boundaries over these are mirrored by a subtraction.
    return torch.cat([x, x.flip(0, 1)])


def added(x: Tensor) -> Tensor:
    """(B, T, …): the rows of x (2B, T, …), a result of ``doubled`` rows, and those of their image turned back."""
    rows, image = x.chunk(2)
    return rows + image.flip(0, 1)


def doubled_bounds(cu_seqlens: Tensor | None) -> Tensor | None:
    """Document boundaries of ``doubled`` rows."""
    if cu_seqlens is None:
        return None
    return torch.cat([cu_seqlens, 2 * cu_seqlens[-1] - cu_seqlens.flip(0)[1:]])


@dataclass(frozen=True, kw_only=True)
class BothWays(Scan):
    """The scan ``of`` in both directions. Its inputs are those of ``of``; states are a prefix and a suffix.

    Segments share the decays: a state passes a segment, from either side, by the decays of all its tokens.
    """

    of: Callable[..., DiagonalScan]

    algebra: ClassVar[Algebra] = BOTH

    @cached_property
    def _doubled(self) -> DiagonalScan:
        # Nothing is cut from what comes from behind: where a document ends with this segment, nothing comes.
        continues = torch.cat([self.continues, torch.ones_like(self.continues)])
        return self.of(continues=continues, cu_seqlens=doubled_bounds(self.cu_seqlens))

    def summarize(self, written: Inputs) -> Tensors:
        state, decay = self._doubled.summarize(self._inputs(written))
        prefix, suffix = _sides(state)
        # Over the border to a document that begins with this row nothing passes, in neither direction.
        return prefix, self.where_continues(suffix), decay.chunk(2)[0]

    def entering(self, state: Tensors) -> Tensors:
        prefix, suffix = state
        return self.where_continues(prefix), suffix

    def outputs(self, inputs: Inputs, state: Inputs) -> Tensor:
        found = self._doubled.outputs(self._inputs(inputs), _rows(*state))
        assert isinstance(found, Tensor), "a diagonal scan gives outputs alone"
        return added(found)

    def reads(self, inputs: Inputs, do: Tensor, state: Tensors) -> Tensors:
        (found,) = self._doubled.reads(self._inputs(inputs), doubled(do), _rows(*state))
        return _sides(found)

    def gradients(
        self, inputs: Inputs, do: Tensor, state: Inputs, leaving: Callable[[], Inputs]
    ) -> list[Tensor | None]:
        def of_rows() -> Inputs:
            of_prefix, of_suffix = leaving()
            return _rows(of_prefix, of_suffix if of_suffix is None else self.where_continues(of_suffix))

        found = self._doubled.gradients(self._inputs(inputs), doubled(do), _rows(*state), of_rows)
        return [
            added(gradient) if gradient is not None and self._has_tokens(place, x) else gradient
            for place, (x, gradient) in enumerate(zip(inputs, found, strict=True))
        ]

    def of_whole_rows(self, *inputs: Tensor | None) -> Tensor:
        """The outputs of rows that are whole, differentiable; only ``inputs`` are kept for the backward pass."""
        found: Tensor = _OfWholeRows.apply(self, *inputs)
        return found

    def _inputs(self, inputs: Inputs) -> Inputs:
        """``doubled`` inputs; ``requires_grad`` is what scans ask for the gradients they are to give."""
        return tuple(
            doubled(x).requires_grad_(x.requires_grad) if self._has_tokens(place, x) else x
            for place, x in enumerate(inputs)
        )

    def _has_tokens(self, place: int, x: Tensor | None) -> bool:
        return x is not None and x.dim() > 1 and place not in self._doubled.of_heads


class _OfWholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scan: BothWays, *inputs: Tensor | None) -> Tensor:
        ctx.scan = scan
        ctx.save_for_backward(*inputs)
        return scan.outputs(inputs, (None, None))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        return None, *ctx.scan.gradients(ctx.saved_tensors, do, (None, None), lambda: (None, None))


def _sides(state: Tensor) -> tuple[Tensor, Tensor]:
    """Prefix and suffix of rows, from a state of doubled rows."""
    prefix, suffix = state.chunk(2)
    return prefix, suffix.flip(0)


def _rows(prefix: Tensor | None, suffix: Tensor | None) -> Inputs:
    """The state of doubled rows, the inverse of ``_sides``; None, zero, if both are."""
    return (None if prefix is None or suffix is None else torch.cat([prefix, suffix.flip(0)]),)
