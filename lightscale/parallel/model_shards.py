"""The shards of whole tensors on a rank: of the model's weights, and of the optimizer's state.

Names and global shapes come from Megatron's ``sharded_state_dict``, so that a layer defines its shards once. The part
of the distributed optimizer comes from ``Optimizer.owned``.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from lightscale.parallel.initialization import unpadded_rows
from lightscale.parallel.megatron import ShardedTensor, apply_factories, nested_values
from lightscale.parallel.optimizer_interface import Optimizer, OwnedState
from lightscale.parallel.shards import Box, TensorShard, moved_rows, range_boxes

# What stands before a parameter's name in checkpoints: ``model.`` for weights, the state's name for optimizer state.
_WEIGHTS = "model"


@dataclass(frozen=True, kw_only=True)
class ParameterPart:
    """Consecutive elements of a parameter, once flattened."""

    key: str
    """The parameter's global name."""
    weights: Tensor
    """(n,) fp32, the weights that the optimizer adds its steps to."""
    gradient: Tensor
    """(n,), reduced over all ranks. Not clipped until the step is applied, which may clip it in place."""


@dataclass(frozen=True, kw_only=True)
class _WeightShard:
    parameter: nn.Parameter
    shard: TensorShard
    is_copy: bool
    """Whether another tensor or pipeline rank holds it too, and comes before this one."""


def freeze(parameter: nn.Parameter) -> None:
    """Let ``parameter`` be neither trained nor in the model's checkpoints, which name another one that has it."""
    parameter.requires_grad_(False)
    parameter.is_frozen = True  # type: ignore[attr-defined]


def is_frozen(parameter: nn.Parameter) -> bool:
    """Whether ``freeze`` was called of it."""
    return getattr(parameter, "is_frozen", False)


def weight_shards(chunks: Sequence[nn.Module], *, copies: bool, frozen: bool = False) -> Iterator[TensorShard]:
    """This rank's weights in the model's number format, those that are not frozen or those that are.

    ``copies``: also copies of earlier model-parallel ranks.
    """
    for part in _weight_shards(chunks):
        if is_frozen(part.parameter) == frozen and (copies or not part.is_copy):
            yield _named(_WEIGHTS, part.shard)


def parameter_parts(chunks: Sequence[nn.Module], optimizer: Optimizer) -> Iterator[ParameterPart]:
    """The parameters that this rank's optimizer changes; every element belongs to one rank, on any layout."""
    for part in _weight_shards(chunks):
        owned = None if part.is_copy else optimizer.owned(part.parameter)
        if owned is None:
            continue
        first, last = _owned_range(part, owned)
        if first < last:
            gradient: Tensor = part.parameter.main_grad  # type: ignore[attr-defined]
            yield ParameterPart(
                key=part.shard.box.key,
                weights=owned.weights[first - owned.first : last - owned.first],
                gradient=gradient.view(-1)[first:last],
            )


@dataclass(frozen=True, kw_only=True)
class OwnedBox:
    """Elements of a whole tensor whose steps this rank takes."""

    parameter: nn.Parameter
    box: Box
    own: slice
    """Of the tensors of ``owned``, in the order of the box's elements."""
    owned: OwnedState
    is_copy: bool
    """Whether another tensor or pipeline rank takes them too, and comes before this one."""


def owned_boxes(chunks: Sequence[nn.Module], optimizer: Optimizer) -> Iterator[OwnedBox]:
    """This data rank's part of every parameter.

    With a distributed optimizer a rank owns ranges of flattened parameters, which need not end where rows do: each
    becomes a few boxes of the whole tensor.
    """
    for part in _weight_shards(chunks):
        owned = optimizer.owned(part.parameter)
        if owned is None:
            continue
        first, last = _owned_range(part, owned)
        begin, box = _begin(part), part.shard.box
        for offset, sizes in range_boxes(box.sizes, first - begin, last - begin):
            numel = math.prod(sizes)
            at = tuple(a + b for a, b in zip(box.offset, offset, strict=True))
            yield OwnedBox(
                parameter=part.parameter,
                box=replace(box, offset=at, sizes=sizes),
                own=slice(first - owned.first, first - owned.first + numel),
                owned=owned,
                is_copy=part.is_copy,
            )
            first += numel


def optimizer_shards(
    chunks: Sequence[nn.Module], optimizer: Optimizer, *, copies: bool, state: bool
) -> Iterator[TensorShard]:
    """This data rank's part of the fp32 weights and, with ``state``, of the optimizer's state."""
    for one in owned_boxes(chunks, optimizer):
        if one.is_copy and not copies:
            continue
        tensors = {_WEIGHTS: one.owned.weights, **(one.owned.state if state else {})}
        for name, flat in tensors.items():
            yield _named(name, TensorShard(box=one.box, data=flat[one.own].view(one.box.sizes)))
    if state:
        yield from optimizer.whole_shards()


def _begin(part: _WeightShard) -> int:
    """Where the shard begins in the flattened parameter."""
    return (part.shard.data.data_ptr() - part.parameter.data_ptr()) // part.parameter.element_size()


def _owned_range(part: _WeightShard, owned: OwnedState) -> tuple[int, int]:
    """First and last + 1 element of the flattened parameter that are in the shard and the optimizer's; may be empty."""
    begin = _begin(part)
    return max(owned.first, begin), min(owned.last, begin + part.shard.data.numel())


def _named(prefix: str, shard: TensorShard) -> TensorShard:
    return replace(shard, box=replace(shard.box, key=f"{prefix}.{shard.box.key}"))


def _weight_shards(chunks: Sequence[nn.Module]) -> Iterator[_WeightShard]:
    """Every shard of this rank's parameters, by its global name.

    A parameter has several where its rows are not neighbours in the whole tensor, as the gate and up halves of a
    linear unit are not.
    """
    for chunk in chunks:
        parameters = sorted(chunk.parameters(), key=Tensor.data_ptr)
        starts = [parameter.data_ptr() for parameter in parameters]
        tensors = chunk.sharded_state_dict()  # type: ignore[operator]
        apply_factories(tensors)
        for tensor in nested_values(tensors):
            if not isinstance(tensor, ShardedTensor):
                assert not getattr(tensor, "data", None), f"{tensor}: checkpoints store only parameters"
                continue
            # Megatron gives views, under names that need not be the parameter's (a tied output layer has the
            # embedding's): the address says which parameter one belongs to.
            parameter = parameters[bisect.bisect_right(starts, tensor.data.data_ptr()) - 1]
            shard = _without_padding(
                TensorShard(
                    box=Box(
                        key=tensor.key,
                        shape=tuple(tensor.global_shape),
                        offset=tuple(tensor.global_offset),
                        sizes=tuple(tensor.local_shape),
                    ),
                    data=tensor.data.detach(),
                ),
                unpadded_rows(parameter),
            )
            if shard is None:
                continue
            assert shard.data.is_contiguous() and not tensor.prepend_axis_num, tensor.key
            # The last number of a replica is its data rank, and data ranks share by Optimizer.owned.
            yield _WeightShard(parameter=parameter, shard=shard, is_copy=any(tensor.replica_id[:-1]))


def _without_padding(shard: TensorShard, rows: int | None) -> TensorShard | None:
    """Of a tensor whose first ``rows`` rows are no padding (None: all); None where ``shard`` holds only padding."""
    if rows is None or rows == shard.box.shape[0]:
        return shard
    # Padding is the last rows: what remains is in the same place.
    return moved_rows(shard, 0, rows, key=shard.box.key, shape=(rows, *shard.box.shape[1:]), to=0)
