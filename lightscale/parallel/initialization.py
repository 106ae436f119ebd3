"""Initial weights that do not depend on the layout.

Megatron draws each shard from a random stream of its tensor and pipeline rank, so another layout starts from other
weights. Here every parameter is drawn whole, in fp32, from a stream seeded by its global name, and each rank keeps
its shard. The same (seed, model) gives the same weights on any number of processes.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class DrawWeights(Protocol):
    """How a parameter gets its initial values."""

    def __call__(self, weight: Tensor, generator: torch.Generator) -> None:
        """Fill ``weight``, the whole parameter in fp32 on the CPU, in place; draw from ``generator`` only."""


def normal(std: float) -> DrawWeights:
    """N(0, std)."""

    def draw(weight: Tensor, generator: torch.Generator) -> None:
        weight.normal_(0.0, std, generator=generator)

    return draw


def uniform(most: float) -> DrawWeights:
    """Evenly from -most to most."""

    def draw(weight: Tensor, generator: torch.Generator) -> None:
        weight.uniform_(-most, most, generator=generator)

    return draw


def ones(weight: Tensor, generator: torch.Generator) -> None:
    """Draws nothing: every element is 1."""
    weight.fill_(1.0)


def zeros(weight: Tensor, generator: torch.Generator) -> None:
    """Draws nothing: every element is 0."""
    weight.zero_()


def set_initializer(parameter: nn.Parameter, draw: DrawWeights, *, rows: int | None = None) -> None:
    """Set the initializer of ``parameter``. Every parameter of a model needs one.

    ``rows``: of the whole parameter, where tensor ranks may hold more than those together; the others are padding.
    """
    parameter.draw_weights = draw  # type: ignore[attr-defined]
    parameter.unpadded_rows = rows  # type: ignore[attr-defined]


def unpadded_rows(parameter: nn.Parameter) -> int | None:
    """Rows of the whole ``parameter`` without padding; None: it is never padded."""
    rows: int | None = getattr(parameter, "unpadded_rows", None)
    return rows


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(global name, parameter) of every parameter on this rank.

    Local layer numbers start at 0 on every pipeline stage; here they are those of the whole model. The output layer
    of the last stage, when it is tied, is the embedding under another name and gets the embedding's.
    """
    layers: Any = model.get_submodule("decoder.layers")
    for name, parameter in model.named_parameters():
        match = _LAYER.match(name)
        # Megatron counts layers of the whole model from 1.
        if match:
            name = f"decoder.layers.{layers[int(match.group(1))].layer_number - 1}.{name[match.end() :]}"
        elif name == "output_layer.weight" and getattr(parameter, "shared_embedding", False):
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def shard(whole: Tensor, parameter: nn.Parameter, rank: int, size: int) -> Tensor:
    """The part of ``whole`` that tensor rank ``rank`` of ``size`` holds of ``parameter``.

    A parameter with ``partition_stride`` s is s stacked matrices (the gate and up halves of a GLU) that are split
    one by one: each rank stores its part of the first, then of the second.
    """
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    split: Any = parameter  # Megatron's attributes are unknown to the type
    # As ColumnParallelLinear expects a GLU's weight: [gate; up] on each rank. Rows first … last of the whole matrix
    # would give the first ranks the gate and the last ones the other half.
    stacked = whole.chunk(split.partition_stride, dim=split.partition_dim)
    own = [part.chunk(size, dim=split.partition_dim)[rank] for part in stacked]
    return torch.cat(own, dim=split.partition_dim)


@torch.no_grad()
def draw_weights(
    model: nn.Module, *, seed: int, tensor_rank: int, tensor_size: int, factors: Mapping[str, float] | None = None
) -> None:
    """Fill every parameter of ``model`` from ``seed`` and its global name.

    ``factors``: of what is drawn, by global name; of other parameters 1.
    """
    for name, parameter in named_parameters(model):
        shape = list(parameter.shape)
        if tensor_size > 1 and getattr(parameter, "tensor_model_parallel", False):
            shape[parameter.partition_dim] *= tensor_size  # type: ignore[attr-defined]
        # Whole, in fp32, on the CPU, whatever the model's: the numbers must depend neither on how many ranks share it
        # nor on its number format nor on the device's generator. One tensor at a time, so memory is no matter.
        whole = torch.zeros(shape, dtype=torch.float32, device="cpu")
        # A stream for each name: adding a parameter, or a pipeline rank drawing only some, changes no other's weights.
        # Part of what a seed means for ever, so neither the text nor the hash may change.
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        draw: DrawWeights | None = getattr(parameter, "draw_weights", None)
        assert draw is not None, f"{name} has no initializer"
        # Padding is not drawn: how much there is of it depends on the layout.
        rows = unpadded_rows(parameter)
        draw(whole if rows is None else whole[:rows], generator)
        if (factor := (factors or {}).get(name, 1.0)) != 1:
            whole.mul_(factor)
        parameter.copy_(shard(whole, parameter, tensor_rank, tensor_size))
