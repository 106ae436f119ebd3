"""preprocessor_config.json: how transformers' ``AutoImageProcessor`` makes pixels of images, written and read."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lightscale.errors import UserError
from lightscale.exchange.plain.patches import ImageInputs
from lightscale.files import open_regular
from lightscale.training.checkpoints.reading import parse_object
from lightscale.training.checkpoints.schema import checked

NAME = "preprocessor_config.json"
_MOST_BYTES = 1 << 20
_BICUBIC = 3
_Mean = Annotated[list[float], Field(min_length=1, max_length=3)]
_Std = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1, max_length=3)]


class _Processor(BaseModel):
    """What it says of the values of pixels, with the defaults of ViT's."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    do_rescale: Literal[True] = True
    rescale_factor: Annotated[float, Field(gt=0, le=1)] = 1 / 255
    do_normalize: bool = True
    image_mean: _Mean = [0.5, 0.5, 0.5]
    image_std: _Std = [0.5, 0.5, 0.5]


def image_processor(image: ImageInputs) -> str:
    """The text of the file: images are scaled to the model's size, and their values as in training."""
    height, width = image.image_size
    content: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": _BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(_of_channels(image.image_mean, image.num_channels)),
        "image_std": list(_of_channels(image.image_std, image.num_channels)),
        "do_convert_rgb": image.num_channels == 3,
    }
    return json.dumps(content, indent=2) + "\n"


def read_scaling(directory: Path, num_channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of pixels between 0 and 1, from the file in ``directory``.

    UserError where there is none, or it scales pixels otherwise.
    """
    path = directory / NAME
    if not path.is_file():
        raise UserError(f"{path}: missing; it has the mean and the deviation of pixels; save the image processor there")
    with open_regular(path, what="the configuration of an image processor", most_bytes=_MOST_BYTES) as file:
        own = checked(_Processor, parse_object(file.read(), path), path)
    if abs(own.rescale_factor * 255 - 1) > 1e-6:
        raise UserError(f"{path}: rescale_factor = {own.rescale_factor}; use {1 / 255}, of pixels between 0 and 1")
    if not own.do_normalize:
        return (0.0,), (1.0,)
    for key, values in (("image_mean", own.image_mean), ("image_std", own.image_std)):
        if len(values) not in (1, num_channels):
            raise UserError(f"{path}: {key} has {len(values)} numbers for {num_channels} channels")
    if not all(0 <= value <= 1 for value in own.image_mean):
        raise UserError(f"{path}: image_mean = {own.image_mean}; use numbers from 0 to 1")
    return tuple(own.image_mean), tuple(own.image_std)


def _of_channels(values: tuple[float, ...], num_channels: int) -> tuple[float, ...]:
    return values if len(values) == num_channels else values * num_channels
