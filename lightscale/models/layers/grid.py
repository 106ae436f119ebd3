"""Coordinates of tokens in documents that are grids, such as images: ``[model.grid]``."""

import torch
from torch import Tensor

from lightscale.config.model import GridConfig


def coordinates(positions: Tensor, grid: GridConfig) -> Tensor:
    """(…, axes) int64: the coordinates of tokens with ``positions`` (…) in their documents.

    Leading tokens end the slices before the first one: every coordinate is at least 0, and that of a single axis is the
    position. The first coordinate goes on behind its extent, as positions do.
    """
    # By numbers of the host: a tensor of them would make it wait for a GPU.
    first, *others = (torch.div(positions + grid.first_cell, stride, rounding_mode="floor") for stride in grid.strides)
    return torch.stack([first, *(one % extent for one, extent in zip(others, grid.shape[1:], strict=True))], dim=-1)


def chain_positions(positions: Tensor, grid: GridConfig, axis: int) -> Tensor:
    """The tokens of its line along ``axis`` before each token, in its document; 0 exactly where a line begins."""
    in_document = torch.div(positions, grid.strides[axis], rounding_mode="floor")
    return in_document if axis == 0 else torch.minimum(in_document, coordinates(positions, grid)[..., axis])


def as_chains(x: Tensor, stride: int) -> Tensor:
    """(n, b, …) -> (n / stride, stride b, …), a view: neighbours in a line along an axis come after one another."""
    return x if stride == 1 else x.unflatten(0, (x.size(0) // stride, stride)).flatten(1, 2)
