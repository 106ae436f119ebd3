"""An image file, or an array of pixels, to an array of a store's shape, by Pillow."""

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from lightscale.data_pipeline.images.broken import Broken
from lightscale.data_pipeline.preparation.readers.interface import one_line
from lightscale.errors import UserError

Resize = Literal["crop", "stretch"]
Pixels = NDArray[np.uint8]

_MODES = {1: "L", 3: "RGB"}
_WIDE_MODES = ("I", "F")
# Without formats that start other programs, such as EPS.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_MOST_PIXELS = 2**27
# What Pillow's decoders raise for damaged files.
_FAULTS = (
    *(OSError, Image.DecompressionBombError, Image.DecompressionBombWarning),
    *(SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, OverflowError, struct.error, zlib.error),
)


@dataclass(frozen=True, kw_only=True)
class ImageForm:
    """The form of all images of a store, and the permitted ways to it."""

    shape: tuple[int, int, int]
    """(height, width, channels); channels are 1 (grey) or 3 (RGB)."""
    resize: Resize | None = None
    """crop: cover the shape, and cut the centre; stretch: scale both axes; None: refuse other sizes."""
    convert: bool = False
    """Whether other modes of Pillow become grey or RGB; alpha channels are dropped."""
    asked_by: str = "--images"
    """What asks for the shape, in messages."""

    @property
    def needs(self) -> str:
        """Beginning of a message about an image of another form."""
        return f"{self.asked_by} {'x'.join(map(str, self.shape))} needs"

    @property
    def dtype(self) -> str:
        """Number format of a store's array."""
        return "uint8"

    def decoded(self, data: bytes | Pixels, where: str) -> Pixels | Broken:
        """See the function."""
        return decoded(data, self, where)

    def report(self) -> dict[str, Any]:
        """For the store's report."""
        return {"shape": list(self.shape), "resize": self.resize, "convert": self.convert}

    def __post_init__(self) -> None:
        if self.shape[2] not in _MODES:
            raise UserError(f"--images: {self.shape[2]} channels; use 1 (grey) or 3 (RGB)")


def decoded(data: bytes | Pixels, form: ImageForm, where: str) -> Pixels | Broken:
    """(height, width, channels) pixels of ``data``, a file's content, or an array (h, w) or (h, w, c).

    Raises ``UserError`` that begins with ``where`` for an image of another size or mode that ``form`` does not permit
    to change.
    """
    try:
        image = _opened(data)
    except UnidentifiedImageError:
        # Pillow's text has an address of memory: a report is the same each time.
        return Broken(reason=f"no image of a known format ({', '.join(_FORMATS)})")
    except _FAULTS as error:
        return Broken(reason=one_line(error))
    height, width, channels = form.shape
    if image.mode.startswith(_WIDE_MODES):
        # Pillow would cut their values off at 255: photographs become white.
        raise UserError(
            f"{where}: the image has mode {image.mode}, more than 8 bits per channel; scale its values to 8 bits"
        )
    if image.mode != _MODES[channels]:
        if not form.convert:
            raise UserError(
                f"{where}: the image has mode {image.mode}, and {form.needs} {_MODES[channels]}; use --convert-modes"
            )
        image = image.convert(_MODES[channels])
    if image.size != (width, height):
        if form.resize is None:
            raise UserError(
                f"{where}: the image has {image.height} x {image.width} pixels, and {form.needs} {height} x {width}; "
                "use --resize crop or --resize stretch"
            )
        fit = ImageOps.fit if form.resize == "crop" else Image.Image.resize
        image = fit(image, (width, height), Image.Resampling.BICUBIC)
    return np.asarray(image, dtype=np.uint8).reshape(form.shape)


def _opened(data: bytes | Pixels) -> Image.Image:
    """Upright, with its pixels read; of animations the first picture."""
    if not isinstance(data, bytes):
        grey = data[..., 0] if data.ndim == 3 and data.shape[2] == 1 else data
        return Image.fromarray(np.ascontiguousarray(grey))
    image = Image.open(io.BytesIO(data), formats=_FORMATS)
    if image.width * image.height > _MOST_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels; use at most {_MOST_PIXELS:,}")
    image.load()
    return ImageOps.exif_transpose(image)
