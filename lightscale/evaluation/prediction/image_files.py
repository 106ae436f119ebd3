"""Images to predict from, out of files; without torch, but by Pillow, which is optional."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.config.model import ModelConfig
from lightscale.data_pipeline.images.broken import Broken
from lightscale.data_pipeline.images.decode import ImageForm, Resize, decoded
from lightscale.data_pipeline.images.files import SUFFIXES
from lightscale.data_pipeline.loading.images import as_patches
from lightscale.errors import UserError
from lightscale.evaluation.prediction.documents import MOST_BYTES
from lightscale.files import read_regular


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageDocument:
    """An image file."""

    path: Path
    ids: NDArray[np.uint8] = field(repr=False)
    """(n, p): the bytes of each token's patch."""

    def record(self) -> dict[str, Any]:
        """What names it beside its prediction."""
        return {"file": str(self.path)}

    def heading(self) -> str:
        """Its line for people."""
        return str(self.path)


def read_images(path: Path, model: ModelConfig, *, resize: Resize | None, convert: bool) -> list[ImageDocument]:
    """The image file ``path``, or all at and below the directory ``path``, by their names.

    Args:
        path: of a file or directory.
        model: decides size, channels and patches.
        resize, convert: see ``ImageForm``.

    Raises:
        UserError: names the file; none is skipped.
    """
    assert model.image_shape is not None and model.patches is not None and model.grid is not None, "a model of images"
    if not path.exists():
        raise UserError(f"--file {path}: no such file or directory")
    found = sorted(one for one in path.rglob("*") if one.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    if not found:
        raise UserError(f"--file {path}: no images are there; their names end in {', '.join(sorted(SUFFIXES))}")
    if (total := len(found) * int(np.prod(model.image_shape))) > MOST_BYTES:
        raise UserError(f"--file {path}: {total:,} bytes of pixels; use at most {MOST_BYTES:,} at once")
    form = ImageForm(shape=model.image_shape, resize=resize, convert=convert, asked_by="the model of")
    height, width = model.patches.size
    documents = []
    for one in found:
        try:
            data = read_regular(one, what="an image", most_bytes=MOST_BYTES, follow_links=True)
        except OSError as error:
            raise UserError(f"{one}: {error.strerror}") from error
        pixels = decoded(data, form, str(one))
        if isinstance(pixels, Broken):
            raise UserError(f"{one}: the image is broken ({pixels.reason}); remove the file")
        (ids,) = as_patches(pixels[None], (height, width), model.grid.leading_tokens, model.patches.overlap)
        documents.append(ImageDocument(path=one, ids=ids))
    return documents
