"""The model of images that ``lightscale.load`` returns.

model = lightscale.load("runs/digits")
model.classify("some.png"); model.logits(pixels); model.embed("some.png")
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightscale.errors import UserError
from lightscale.exchange.plain.model import ImageClassifier
from lightscale.exchange.plain.patches import ImageInputs
from lightscale.exchange.plain.units import pooled
from lightscale.files import read_regular

_MOST_BYTES = 1 << 28
Images = str | PathLike[str] | NDArray[np.uint8] | Tensor
"""The path of an image file; or pixels, uint8: (height, width, channels), or (b, height, width, channels)."""


@dataclass(frozen=True, kw_only=True)
class ImageModel:
    """A model that classifies images."""

    module: ImageClassifier
    """An ``nn.Module`` of plain PyTorch, in evaluation mode: of normalised pixels (b, channels, height, width)."""
    origin: str
    """The checkpoint or directory that the weights are from."""
    refused: tuple[str, ...] = ()
    """Why newer checkpoints were skipped, one line each."""
    classes: tuple[str, ...] = ()
    """Names of the classes, by number, where the run has them."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.module.score.weight.device

    @property
    def form(self) -> ImageInputs:
        """Size and patches of the images in training."""
        assert self.module.shape.image is not None
        return self.module.shape.image

    def pixel_values(self, images: Images, image_size: Sequence[int] | None = None) -> Tensor:
        """(b, channels, height, width), scaled as in training, on the model's device.

        Args:
            images: a file is scaled to the size, as ``lightscale predict --resize stretch`` does; pixels must have it.
            image_size: height and width, multiples of the patches'; None: those of training.

        Raises:
            UserError: images of another size or kind.
        """
        form, (h, w) = self.form, self.form.patch_size
        height, width = form.image_size if image_size is None else image_size
        if height % h or width % w or height < 1 or width < 1:
            raise UserError(f"image_size = {height}, {width}: patches of {h} x {w} must divide it")
        if isinstance(images, (str, PathLike)):
            images = _read(Path(fspath(images)), (height, width, form.num_channels))
        elif not isinstance(images, (np.ndarray, Tensor)):
            raise UserError(
                f"images: use one path, or uint8 pixels in an array or a tensor; got {type(images).__name__}"
            )
        pixels = torch.as_tensor(images, device=self.device)
        pixels = pixels[None] if pixels.dim() == 3 else pixels
        if pixels.dtype != torch.uint8 or pixels.shape[1:] != (height, width, form.num_channels):
            raise UserError(
                f"images must be uint8, {height} x {width} x {form.num_channels} (height x width x channels); got "
                f"{pixels.dtype}, {' x '.join(map(str, pixels.shape[1:]))}"
            )
        wide = torch.promote_types(self.module.score.weight.dtype, torch.float32)
        mean, std = (
            torch.tensor(values, dtype=wide, device=self.device) for values in (form.image_mean, form.image_std)
        )
        return ((pixels.to(wide) / 255 - mean) / std).permute(0, 3, 1, 2)

    def logits(self, images: Images, image_size: Sequence[int] | None = None) -> Tensor:
        """Logits of the classes: (labels,) of one image, or (b, labels). Differentiable. See ``pixel_values``."""
        found: Tensor = self.module(self.pixel_values(images, image_size), interpolate=image_size is not None)
        return found[0] if _is_one(images) else found

    @torch.inference_mode()
    def classify(self, images: Images, image_size: Sequence[int] | None = None) -> dict[str, float]:
        """Probability of each class by name (by number if it has no name), most probable first; of one image."""
        if not _is_one(images):
            raise UserError("classify takes one image; use logits for several")
        shares = self.logits(images, image_size).softmax(-1)
        order = shares.argsort(descending=True, stable=True).tolist()
        return {self.classes[n] if n < len(self.classes) else str(n): float(shares[n]) for n in order}

    @torch.inference_mode()
    def embed(
        self,
        images: Images,
        pooling: Literal["mean", "first", "last"] = "mean",
        image_size: Sequence[int] | None = None,
    ) -> Tensor:
        """Embedding (d,) of an image, or (b, d): the mean of the last states of its tokens, or one of them."""
        if pooling not in ("mean", "first", "last"):
            raise UserError(f"pooling = {pooling!r}: use mean, first or last")
        pixels = self.pixel_values(images, image_size)
        hidden = self.module.model.pixels_output(pixels, interpolate=image_size is not None)
        found = pooled(hidden, None, pooling)
        return found[0] if _is_one(images) else found


def _is_one(images: Images) -> bool:
    return isinstance(images, (str, PathLike)) or getattr(images, "ndim", None) == 3


def _read(path: Path, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    # Pillow is optional.
    from lightscale.data_pipeline.images import decode  # noqa: PLC0415

    form = decode.ImageForm(shape=shape, resize="stretch", convert=True, asked_by="the model of")
    try:
        data = read_regular(path, what="an image", most_bytes=_MOST_BYTES, follow_links=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    pixels = decode.decoded(data, form, str(path))
    if isinstance(pixels, decode.Broken):
        raise UserError(f"{path}: the image is broken ({pixels.reason})")
    return pixels
