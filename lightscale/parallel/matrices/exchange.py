"""Whole matrices from the parts that tensor, data and sequence ranks own, and back.

Tensor ranks cut a matrix along a dim, and the distributed optimizer cuts what they hold into ranges of the flattened
buffer. Each rank therefore owns some boxes of the whole tensor: those that it writes to checkpoints
(``model_shards.owned_boxes``). All ranks of a pipeline stage know the boxes of all, and give every tensor to one of
them, so that operations are nearly equal. A step is then two exchanges: every rank sends its boxes to the ranks that
compute their tensors, and gets the results for the same boxes back. A matrix is computed once and not once a rank, from
the same numbers in the same order on any layout, and copies of it get the same bits.

Of n ranks each owns 1/n of a stage's matrix elements, sends them and gets results for them; as a rank that computes it
gets and sends about as many. With products in bf16 a rank so sends 4 bytes per owned element and step. If instead every
rank gathered what it lacks, it would get 2 n bytes per owned element, and matrices be computed up to n times.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightscale.parallel.matrices.sharing import shared_out
from lightscale.parallel.shards import Box, Shape


class MatrixExchange:
    """Puts tensors together, each on one rank of ``group``, and takes what is computed of them apart.

    Args:
        boxes: of this rank, each with whether it is a copy: a rank before this one owns the same and sends it.
        cost: operations of a tensor, by name and shape.
        dtype: number format of what is sent.
        device: of the tensors.
    """

    def __init__(
        self,
        boxes: Sequence[tuple[Box, bool]],
        group: dist.ProcessGroup,
        cost: Callable[[str, Shape], float],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group = group
        # Ranks may own nothing, and still send and get tensors of the format.
        self._nothing = torch.empty(0, dtype=dtype, device=device)
        of_rank: list[list[tuple[Box, bool]]] = [list(boxes)] * group.size()
        if group.size() > 1:
            dist.all_gather_object(of_rank, list(boxes), group=group)
        shapes = {box.key: box.shape for own in of_rank for box, _ in own}
        computes = shared_out({key: cost(key, shape) for key, shape in shapes.items()}, group.size())
        here, ranks = group.rank(), range(group.size())
        own = list(enumerate(of_rank[here]))
        # Indices of this rank's boxes, by the rank that computes their tensors; and the boxes of all for this rank's.
        self._places = [[n for n, (box, _) in own if computes[box.key] == to] for to in ranks]
        self._sent = [[n for n in places if not of_rank[here][n][1]] for places in self._places]
        self._returned = [[box for box, _ in of_rank[one] if computes[box.key] == here] for one in ranks]
        self._received = [
            [box for box, is_copy in of_rank[one] if computes[box.key] == here and not is_copy] for one in ranks
        ]
        self._boxes = [box for box, _ in of_rank[here]]
        self.computed = {key: shape for key, shape in shapes.items() if computes[key] == here}
        """Names and shapes of the tensors that this rank computes."""

    def compute(self, parts: Sequence[Tensor], function: Callable[[str, Tensor], Tensor]) -> list[Tensor]:
        """Results of ``function`` for the boxes of this rank, (box.numel,) each; all ranks of the group call it.

        Args:
            parts: (box.numel,) for each of this rank's boxes.
            function: of name and whole tensor; keeps shape and number format.
        """
        received = self._exchange(
            [[parts[n] for n in own] for own in self._sent], [_numel(boxes) for boxes in self._received]
        )
        whole = {key: received.new_empty(shape) for key, shape in self.computed.items()}
        for box, block in _blocks(self._received, received):
            whole[box.key][_slices(box)] = block
        del received
        # One by one, so that no input is kept beside its result.
        results = {key: function(key, whole.pop(key)) for key in self.computed}
        returned = self._exchange(
            [[results[box.key][_slices(box)] for box in boxes] for boxes in self._returned],
            [_numel([self._boxes[n] for n in own]) for own in self._places],
        )
        found: dict[int, Tensor] = {}
        own_boxes = [[self._boxes[n] for n in own] for own in self._places]
        for n, (_, block) in zip((n for own in self._places for n in own), _blocks(own_boxes, returned), strict=True):
            found[n] = block.reshape(-1)
        return [found[n] for n in range(len(self._boxes))]

    def _exchange(self, sent: Sequence[Sequence[Tensor]], sizes: list[int]) -> Tensor:
        """What all ranks send to this one, (sum of ``sizes``,), in the order of ranks."""
        packed = torch.cat([self._nothing, *(part.reshape(-1) for own in sent for part in own)])
        if self._group.size() == 1:
            return packed
        received = packed.new_empty(sum(sizes))
        counts = [sum(part.numel() for part in own) for own in sent]
        dist.all_to_all_single(received, packed, sizes, counts, group=self._group)
        return received


def _numel(boxes: Sequence[Box]) -> int:
    return sum(box.numel for box in boxes)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(box.offset, box.sizes, strict=True))


def _blocks(boxes: Sequence[Sequence[Box]], flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Every box with its elements in ``flat``."""
    first = 0
    for box in itertools.chain(*boxes):
        yield box, flat[first : first + box.numel].view(box.sizes)
        first += box.numel
