"""Attention transfer: mixers learn the outputs of another model's mixers, each from the input that the other one had.

    loss of a token = mean over the layers of |o - y|² / |y|²,   o = mixer(norm(x))

x is the other model's residual stream before the layer and y the output of its mixer there: every layer learns by
itself, whatever the layers before it have come to (Zhang et al. 2024, LoLCATs, arXiv 2410.10254; here the error is
relative, so that no layer outweighs the others).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightscale.models.layers.context import SequenceContext
from lightscale.parallel.megatron import gather_from_sequence_parallel_region


class LayerTarget(NamedTuple):
    """The input and output of the other model's mixer, without gradients."""

    layer: int
    """From 0."""
    stream: Tensor
    """(n / tensor, b, d), the residual stream before the layer's norm."""
    output: Tensor
    """(n / tensor, b, d)."""


def transfer_losses(
    layers: Sequence[nn.Module], targets: Sequence[LayerTarget], context: SequenceContext, group: dist.ProcessGroup
) -> Tensor:
    """(n, b), fp32 or wider, equal on all tensor ranks; differentiable in the weights of the mixers of ``targets``.

    Args:
        layers: all layers of the model.
        targets: of at least one layer.
        context: of the rows, with the results of the model's parts.
        group: the tensor group.
    """
    total: Any = 0.0
    for number, stream, output in targets:
        layer: Any = layers[number]
        with torch.no_grad():
            _, given = layer.mixer_input((stream, None))
        found, _ = layer.self_attention(given, None, packed_seq_params=context)
        wide = torch.promote_types(output.dtype, torch.float32)
        wanted = output.to(wide)
        size = wanted.square().sum(dim=-1).clamp_min(torch.finfo(wide).tiny)
        total = total + (found.to(wide) - wanted).square().sum(dim=-1) / size
    losses: Tensor = total / len(targets)
    if group.size() > 1:
        # All ranks sum the losses of all tokens: backward each takes the cotangents of its own tokens, once.
        losses = gather_from_sequence_parallel_region(losses, tensor_parallel_output_grad=False, group=group)
    return losses
