"""The tensors of two checkpoints, compared one by one, whatever layouts wrote them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightscale.parallel.shards import Box, TensorShard, copy_overlap
from lightscale.training.checkpoints.reader import Headers
from lightscale.training.checkpoints.tensor_file import TensorFile, tensor_files


def differences(
    first: tuple[Path, Headers], second: tuple[Path, Headers], prefix: str = ""
) -> Iterator[dict[str, Any]]:
    """A row for every tensor, of a key with `prefix`, that is not bitwise the same in two checkpoints."""
    one, other = _tensors(*first), _tensors(*second)
    for key in sorted(key for key in {*one, *other} if key.startswith(prefix)):
        if key not in one or key not in other:
            yield {"tensor": key, "problem": f"only in {(first if key in one else second)[0]}"}
            continue
        # One tensor at a time: two checkpoints of a large model do not fit into memory.
        a, b = _whole(one[key]), _whole(other[key])
        if a.shape != b.shape:
            yield {"tensor": key, "problem": f"{tuple(a.shape)} and {tuple(b.shape)}"}
        # As bytes: NaN then equals itself, and -0 is not 0.
        elif not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            difference, size = a.double() - b.double(), a.double().norm()
            relative = float(difference.norm() / size) if size else float("inf")
            yield {"tensor": key, "max_difference": float(difference.abs().max()), "relative_rmse": relative}


def _tensors(path: Path, headers: Headers) -> dict[str, list[tuple[TensorFile, Box]]]:
    """The boxes of every tensor, and the files that they are in."""
    found: dict[str, list[tuple[TensorFile, Box]]] = {}
    for file in tensor_files(path, headers):
        for box in file.boxes:
            found.setdefault(box.key, []).append((file, box))
    return found


def _whole(parts: list[tuple[TensorFile, Box]]) -> Tensor:
    """The tensor that the boxes are parts of, one dimension at least."""
    (_, box), files = parts[0], list(dict.fromkeys(file for file, _ in parts))
    stored = [shard for file in files for shard in file.shards() if shard.box.key == box.key]
    whole = TensorShard(
        box=Box(key=box.key, shape=box.shape, offset=tuple(0 for _ in box.shape), sizes=box.shape),
        data=torch.empty(box.shape, dtype=stored[0].data.dtype),
    )
    for shard in stored:
        copy_overlap(shard, whole)
    return whole.data.view(-1) if not box.shape else whole.data
