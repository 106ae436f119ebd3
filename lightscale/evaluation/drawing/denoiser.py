"""Predictions of a diffusion transformer on any layout; every rank gives the same images and gets all predictions."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightscale.models.language_model import LanguageModel
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.megatron import get_forward_backward_func
from lightscale.parallel.mesh import Mesh


class _Rows(NamedTuple):
    """One pass: images of this data rank, and their segment on this sequence rank."""

    first: int
    num_images: int
    """Of the rows, that are asked for: the others fill up the pass."""
    tokens: Tensor
    positions: Tensor
    conditions: Tensor


class Denoiser:
    """A model that predicts noise.

    Args:
        model: this rank's layers, in evaluation mode.
        mesh: without virtual stages; tensor and sequence ranks divide the tokens of an image.
        row_tokens: tokens per forward pass of the model, at least those of an image.
        advance: called after each pass.
    """

    def __init__(
        self, model: LanguageModel, mesh: Mesh, *, row_tokens: int = 8192, advance: Callable[[], None] = lambda: None
    ) -> None:
        self._model, self._mesh, self._row_tokens, self._advance = model, mesh, row_tokens, advance

    @torch.no_grad()
    def __call__(self, x: NDArray[np.float64], timestep: int, classes: NDArray[np.int64]) -> NDArray[np.float64]:
        """x: (b, n, p) noised images at ``timestep``, of ``classes`` (b,) -> (b, n, p); collective."""
        count, tokens, _ = x.shape
        rows = min(count, max(1, self._row_tokens // tokens))
        width = tokens // self._mesh.sequence
        own = slice(self._mesh.sequence_rank * width, (self._mesh.sequence_rank + 1) * width)
        found = np.zeros_like(x)

        def rows_from(first: int) -> _Rows:
            # All passes have one shape: rows beyond the last image are read by nobody.
            numbers = np.minimum(np.arange(first, first + rows), count - 1)
            conditions = np.stack([np.full(rows, timestep), classes[numbers]], axis=1)
            positions = np.tile(np.arange(tokens)[own], (rows, 1))
            arrays = (x[numbers][:, own].astype(np.float32), positions, conditions)
            return _Rows(first, min(rows, count - first), *map(self._to_device, arrays))

        def find() -> None:
            firsts = range(self._mesh.data_rank * rows, count, self._mesh.data * rows)
            for first in firsts:
                one = rows_from(first)
                for predicted in self._run(one, tokens):
                    if self._mesh.groups.tp.rank() == 0:
                        found[first : first + one.num_images, own] = predicted[: one.num_images].double().cpu().numpy()
                self._advance()

        # What fails on one rank is raised on all.
        Agreement(self._mesh.control).on_all(find)
        if self._mesh.world_size > 1:
            # By the control group, on the host, in place. Every token is one rank's, and nothing is added to it.
            dist.all_reduce(torch.from_numpy(found), group=self._mesh.control)
        return found

    def _to_device(self, array: NDArray[np.float32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._mesh.device)

    def _run(self, rows: _Rows, tokens: int) -> list[Tensor]:
        """Predictions (b, n / sequence, p) on the last stage, nothing on the others."""
        found: list[Tensor] = get_forward_backward_func()(
            forward_step_func=_step,
            data_iterator=iter([rows]),
            model=[self._model],
            num_microbatches=1,
            # Of the whole row: for the shapes that stages send, Megatron divides by tensor and sequence ranks itself.
            seq_length=tokens,
            micro_batch_size=len(rows.tokens),
            forward_only=True,
        )
        return found


def _step(batches: Iterator[_Rows], model: LanguageModel) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    rows = next(batches)
    output = model(rows.tokens, rows.positions, conditions=rows.conditions)
    assert isinstance(output, Tensor), "a model of images has no z-loss"
    return output, partial(_reported)


def _reported(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron's (loss, number of tokens, what to report); only the last counts here."""
    return output.new_zeros(()), torch.zeros((), dtype=torch.int), output
