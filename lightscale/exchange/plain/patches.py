"""Images as rows of patches: their form, the embedding of pixels, and where the patches stand."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.exchange.plain.operators import wide_dtype


@dataclass(frozen=True, kw_only=True)
class ImageInputs:
    """How a model reads images: its tokens are ``leading_tokens``, and patches row by row."""

    grid: tuple[int, int]
    """Rows and columns of patches."""
    patch_size: tuple[int, int]
    """Height and width of a patch, in pixels."""
    overlap: int = 0
    """Pixels around a patch that its token reads too; beyond the image its edge is repeated."""
    num_channels: int = 3
    leading_tokens: int = 0
    """Learned vectors before the patches, such as a class token."""
    image_mean: tuple[float, ...] = (0.5,)
    """Subtracted from pixels between 0 and 1, for all channels or each."""
    image_std: tuple[float, ...] = (0.5,)
    """What they are divided by."""
    latents: bool = False
    """Whether there are floats in place of pixels, which have no range."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of an image, in pixels."""
        return self.grid[0] * self.patch_size[0], self.grid[1] * self.patch_size[1]

    @property
    def tokens(self) -> int:
        """Of an image."""
        return self.leading_tokens + self.grid[0] * self.grid[1]

    @property
    def first_cell(self) -> int:
        """Places in the first row of tokens before the first one: leading tokens end full rows above the patches."""
        return -self.leading_tokens % self.grid[1]


def image_inputs_from(table: Mapping[str, Any]) -> ImageInputs:
    """Those with the fields of ``table``, whose pairs are lists, as JSON has them."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return ImageInputs(**fields)


def coordinates(image: ImageInputs, device: torch.device) -> Tensor:
    """(1, n, 2) int64: row and column of each token; leading tokens stand in rows above the patches, none below 0."""
    cells = torch.arange(image.tokens, device=device)[None] + image.first_cell
    return torch.stack([cells // image.grid[1], cells % image.grid[1]], dim=-1)


def alternating_orders(image: ImageInputs, device: torch.device) -> Tensor:
    """(2, n) int64: the tokens along rows and along columns, every second of them backwards; leading tokens first."""
    rows, columns = image.grid
    cells = image.leading_tokens + torch.arange(rows * columns, device=device).view(rows, columns)
    leading = torch.arange(image.leading_tokens, device=device)
    orders = []
    for lines in (cells, cells.T):
        turned = torch.stack([line.flip(0) if number % 2 else line for number, line in enumerate(lines)])
        orders.append(torch.cat([leading, turned.flatten()]))
    return torch.stack(orders)


def interpolated(table: Tensor, image: ImageInputs, other: ImageInputs) -> Tensor:
    """Learned vectors (tokens, d) of ``image`` as those of a grid of another size, by bicubic interpolation (ViT's).

    Leading tokens keep theirs.
    """
    leading, cells = table[: image.leading_tokens], table[image.leading_tokens : image.tokens]
    planes = cells.to(wide_dtype(table)).T.reshape(1, -1, *image.grid)
    found = F.interpolate(planes, size=other.grid, mode="bicubic", align_corners=False)
    return torch.cat([leading, found.flatten(2)[0].T.to(table.dtype)])


def pixels_of(patches: Tensor, image: ImageInputs) -> Tensor:
    """Patches (b, n, p), pixels row by row with the channels last, of ``image`` -> (b, channels, height, width)"""
    (rows, columns), (height, width) = image.grid, image.patch_size
    cells = patches.view(len(patches), rows, columns, height, width, image.num_channels)
    return cells.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), image.num_channels, *image.image_size)


class PatchMap(nn.Module):
    """x = W p + b of a patch p, its pixels row by row with the channels last, and learned vectors before the patches.

    Args:
        image: of training.
        hidden_size: d.
    """

    def __init__(self, image: ImageInputs, hidden_size: int) -> None:
        super().__init__()
        self.image = image
        self.extent = (image.patch_size[0] + 2 * image.overlap, image.patch_size[1] + 2 * image.overlap)
        self.projection = nn.Linear(math.prod(self.extent) * image.num_channels, hidden_size)
        leading = nn.Parameter(torch.zeros(image.leading_tokens, hidden_size)) if image.leading_tokens else None
        self.leading: nn.Parameter | None
        self.register_parameter("leading", leading)

    def forward(self, pixel_values: Tensor, *, any_size: bool = False) -> tuple[Tensor, ImageInputs]:
        """pixel_values: (b, channels, height, width) -> (b, n, d), and the form of these images.

        ValueError for images of another size than in training, unless ``any_size``: then patches divide theirs.
        """
        (h, w), (height, width) = self.image.patch_size, pixel_values.shape[-2:]
        if pixel_values.dim() != 4 or pixel_values.size(1) != self.image.num_channels:
            found = tuple(pixel_values.shape)
            raise ValueError(f"pixel_values must be (b, {self.image.num_channels}, height, width), got {found}")
        if not any_size and (height, width) != self.image.image_size:
            size = " x ".join(map(str, self.image.image_size))
            raise ValueError(
                f"images of {height} x {width} pixels, and the model was trained on {size}; resize them, or set "
                "interpolate_pos_encoding"
            )
        if height % h or width % w or not height * width:
            raise ValueError(f"images of {height} x {width} pixels: patches of {h} x {w} must divide them")
        grid = replace(self.image, grid=(height // h, width // w))
        padded = F.pad(pixel_values, [self.image.overlap] * 4, mode="replicate") if self.image.overlap else pixel_values
        # (b, channels, rows, columns, height, width)
        patches = padded.unfold(2, self.extent[0], h).unfold(3, self.extent[1], w)
        patches = patches.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
        x = self.projection(patches.to(self.projection.weight.dtype))
        if self.leading is not None:
            x = torch.cat([self.leading.expand(len(x), -1, -1), x], dim=1)
        return x, grid
