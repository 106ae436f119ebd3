"""The forward pass of a model on any layout, for tokens of which some are scored.

Tensor, pipeline and sequence ranks of one model take part together; data ranks have other rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightscale.evaluation.inference.packing import Columns
from lightscale.models.language_model import LanguageModel
from lightscale.models.layers.context import MixerState
from lightscale.parallel.megatron import get_forward_backward_func
from lightscale.parallel.mesh import Mesh

States = dict[str, MixerState]
"""Of the layers that this rank holds, by name."""


class Found(NamedTuple):
    """The results for scored tokens, (m,) each."""

    numbers: NDArray[np.int32]
    offsets: NDArray[np.int32]
    log_probability: NDArray[np.float64]
    is_greedy: NDArray[np.bool_]


@dataclass(eq=False, kw_only=True)
class Rows:
    """The input of one forward pass: the same on all ranks of a model."""

    columns: Columns
    states: States | None = None
    """Incoming states of the rows, replaced by the outgoing ones. None: rows begin and end in this pass."""


class Forward:
    """A model's layers on this rank, ready to score.

    Args:
        model: in evaluation mode.
        mesh: without virtual stages.
    """

    def __init__(self, model: LanguageModel, mesh: Mesh) -> None:
        assert mesh.virtual_stages == 1, "evaluation builds every stage in one"
        self.model, self.mesh = model, mesh

    @property
    def align(self) -> int:
        """Divisor of the length of rows."""
        return self.mesh.sequence * self.mesh.tensor

    @property
    def answers(self) -> bool:
        """Whether this rank's results are kept: one rank of those with equal results."""
        return self.mesh.is_last_stage and self.mesh.groups.tp.rank() == 0

    @torch.no_grad()
    def score(self, batches: Sequence[Rows]) -> Iterator[Found]:
        """Run ``batches``, all of one shape (b, n), and yield this rank's results for its segment of each.

        Nothing on all but the last stage.
        """
        for columns, output in self.run(batches, self._score):
            log_probability, is_greedy = output.cpu().numpy()
            yield Found(columns.numbers, columns.offsets, log_probability, is_greedy > 0)

    @torch.no_grad()
    def run(
        self, batches: Sequence[Rows], read: Callable[[Columns, Tensor], Tensor]
    ) -> Iterator[tuple[Columns, Tensor]]:
        """Run ``batches``, all of one shape (b, n); nothing comes on all but the last stage.

        Args:
            batches: rows.
            read: makes of this rank's segment of a batch, and of what would enter the output layer there
                (n / tensor, b, d), what comes with the segment.
        """
        b, n = batches[0].columns.positions.shape
        assert n % self.align == 0, f"rows of {n} tokens on ranks that share {self.align}"
        own = [self._own(rows.columns) for rows in batches]
        outputs: list[Tensor] = get_forward_backward_func()(
            forward_step_func=partial(self._step, read),
            data_iterator=iter(zip(batches, own, strict=True)),
            model=[self.model],
            num_microbatches=len(batches),
            # Of the whole row: for the shapes that stages send, Megatron divides by tensor and sequence ranks itself.
            seq_length=n,
            micro_batch_size=b,
            forward_only=True,
        )
        yield from zip(own, outputs, strict=False)

    def largest(self, value: int) -> int:
        """The largest ``value`` of the ranks of this model."""
        largest = torch.tensor(value, device=self.mesh.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.mesh.groups.mp)
        return int(largest)

    def _own(self, columns: Columns) -> Columns:
        """The segment of this sequence rank."""
        if self.mesh.sequence == 1:
            return columns
        n = columns.tokens.shape[1]
        width = n // self.mesh.sequence
        first = self.mesh.sequence_rank * width
        row, column = columns.chosen // n, columns.chosen % n - first
        here = (column >= 0) & (column < width)
        part = slice(first, first + width)
        return Columns(
            columns.tokens[:, part],
            columns.positions[:, part],
            (row * width + column)[here],
            *(values[here] for values in (columns.labels, columns.numbers, columns.offsets)),
        )

    def _step(
        self,
        read: Callable[[Columns, Tensor], Tensor],
        batches: Iterator[tuple[Rows, Columns]],
        model: LanguageModel,
    ) -> tuple[Tensor, partial]:
        rows, own = next(batches)
        tokens, positions = (self.to_device(array) for array in (own.tokens, own.positions))
        hidden = model(tokens, positions, states=rows.states, hidden_only=True)
        return hidden, partial(_reported, read, own)

    def _score(self, own: Columns, hidden: Tensor) -> Tensor:
        """(2, m): log-probabilities, and 1 where they are the most probable."""
        if not len(own.chosen):
            return torch.empty(2, 0, dtype=torch.float64)
        found = self.model.log_probability(hidden, self.to_device(own.chosen), self.to_device(own.labels))
        return torch.stack([values.double() for values in found])

    def to_device(self, array: NDArray[np.int64]) -> Tensor:
        """``array`` where the model is."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.mesh.device)


def _reported(read: Callable[[Columns, Tensor], Tensor], own: Columns, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron's (loss, number of tokens, what to report); only the last counts here."""
    return hidden.new_zeros(()), torch.zeros((), dtype=torch.int), read(own, hidden)
