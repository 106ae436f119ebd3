"""Adapters of a run in its frozen weights, row by row as these are read; and the adapters themselves."""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightscale.config.schema import AdapterConfig
from lightscale.exchange.files.stored_tensors import StoredTensors
from lightscale.exchange.files.weights import TensorRows
from lightscale.models.adapters import LinearMap
from lightscale.training.checkpoints.header import Entry


class MergedTensors(StoredTensors):
    """The weights of a base with adapters put into them: W + lora_alpha / r B A, of DoRA with rows of length m.

    Args:
        directory, headers: of the base.
        adapters: the checkpoint with the adapters.
        maps: those that have an adapter.
    """

    def __init__(
        self,
        directory: Path,
        headers: Mapping[str, Sequence[Entry]],
        *,
        adapters: StoredTensors,
        maps: Sequence[LinearMap],
        adapter: AdapterConfig,
    ) -> None:
        super().__init__(directory, headers)
        self.adapters, self.adapter, self.scale = adapters, adapter, adapter.lora_alpha / adapter.r
        self.maps: dict[str, list[LinearMap]] = {}
        for one in maps:
            self.maps.setdefault(one.weight, []).append(one)

    def matrices(self, linear: LinearMap) -> dict[str, Tensor]:
        """``lora_A``, ``lora_B`` and of DoRA ``lora_magnitude_vector`` of one map, as they are stored."""
        names = linear.parameters(self.adapter)
        return {name.rpartition(".")[2]: self.adapters.read(TensorRows(key=name)) for name in names}

    def norms(self, rows: TensorRows) -> Tensor:
        """(rows,), fp32, of the frozen weight."""
        return torch.cat([block.float().norm(dim=1) for _, block in self._placed_blocks(rows)])

    def blocks(self, rows: TensorRows) -> Generator[Tensor]:
        """See ``StoredTensors``; rows with adapters are fp32."""
        maps = self.maps.get(rows.key)
        if maps is None:
            yield from super().blocks(rows)
            return
        change, magnitudes = self._changes(maps, self._boxes[rows.key][0][1].box.shape[0])
        first_matrix = torch.cat([self.matrices(one)["lora_A"].float() for one in maps])
        for first, block in self._placed_blocks(rows):
            own = slice(first, first + len(block))
            merged = block.float().addmm(change[own], first_matrix, alpha=self.scale)
            if magnitudes is not None:
                norms = merged.norm(dim=1)
                # NaN: a row without an adapter.
                factors = magnitudes[own] / norms.clamp_min(torch.finfo(norms.dtype).tiny)
                merged *= torch.where(factors.isnan(), 1.0, factors)[:, None]
            yield merged

    def _changes(self, maps: Sequence[LinearMap], num_rows: int) -> tuple[Tensor, Tensor | None]:
        """B of all ``maps`` of a weight, (rows, sum of their ranks), and magnitudes (rows,) if there are any."""
        held = [self.matrices(one) for one in maps]
        places = torch.cat([torch.arange(first, last) for one in maps for first, last in one.ranges])
        blocks = torch.block_diag(*[one["lora_B"].float() for one in held])
        change = torch.zeros(num_rows, blocks.size(1)).index_copy(0, places, blocks)
        if self.adapter.name != "dora":
            return change, None
        magnitudes = torch.cat([one["lora_magnitude_vector"].float() for one in held])
        return change, torch.full((num_rows,), torch.nan).index_copy(0, places, magnitudes)

    def _dtype(self, key: str) -> torch.dtype:
        stored = super()._dtype(key)
        return torch.promote_types(stored, torch.float32) if key in self.maps else stored


def joined(parts: Sequence[tuple[range, int, Mapping[str, Tensor]]], norms: Tensor) -> dict[str, Tensor]:
    """The adapter of a matrix that holds rows of several maps: ``lora_A`` and ``lora_B`` of the sum of their ranks.

    Args:
        parts: rows of the matrix, the first row of the map that they are, and the map's tensors.
        norms: (rows,) of the matrix: magnitudes of rows without an adapter, whose rows of B are zero.
    """
    own = {id(tensors): tensors for _, _, tensors in parts}
    ranks = [tensors["lora_A"].size(0) for tensors in own.values()]
    starts = dict(zip(own, [sum(ranks[:place]) for place in range(len(ranks))], strict=True))
    second = parts[0][2]["lora_B"].new_zeros(len(norms), sum(ranks))
    found = {"lora_A": torch.cat([tensors["lora_A"] for tensors in own.values()]), "lora_B": second}
    if "lora_magnitude_vector" in parts[0][2]:
        found["lora_magnitude_vector"] = norms.clone()
    for rows, first, tensors in parts:
        matrix, at = tensors["lora_B"], starts[id(tensors)]
        here, there = slice(rows.start, rows.stop), slice(first, first + len(rows))
        second[here, at : at + matrix.size(1)] = matrix[there]
        if "lora_magnitude_vector" in tensors:
            found["lora_magnitude_vector"][here] = tensors["lora_magnitude_vector"][there]
    return found
