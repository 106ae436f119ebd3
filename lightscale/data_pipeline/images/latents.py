"""Latents: images as floats that an encoder made of them, (height, width, channels), out of files of numpy.

    PATH/CLASS/…/NAME.npy    a folder for each class, below a directory
    NAME.tar                 webdataset: KEY.npy beside KEY.cls, or KEY.json with the label field
    NAME.npz                 arrays latents, (n, h, w, c), and labels, (n,)

Numbers stay as they are: nothing is scaled, cut or rounded.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.images.broken import Broken
from lightscale.data_pipeline.images.files import Arrays, Folders, ImageFiles, Tars
from lightscale.data_pipeline.preparation.readers.interface import one_line
from lightscale.errors import UserError

LatentDtype = Literal["float16", "float32"]


class LatentTars(Tars):
    """With arrays of numpy in place of image files."""

    suffixes = frozenset({".npy"})


class LatentArrays(Arrays):
    """With the array ``latents``."""

    array = "latents"

    def check(self, where: str, found: NDArray[Any]) -> None:
        """Raise UserError unless there are latents of any form; each is checked when it is decoded."""
        if found.ndim != 4:
            raise UserError(f"{where}: latents has the shape {found.shape}; use (n, height, width, channels)")


LATENT_KINDS: Mapping[str, type[ImageFiles]] = {".npy": Folders, ".tar": LatentTars, ".npz": LatentArrays}


@dataclass(frozen=True, kw_only=True)
class LatentForm:
    """The form of all latents of a store."""

    shape: tuple[int, int, int]
    """(height, width, channels)"""
    dtype: LatentDtype = "float16"
    """Number format of the files and of the store."""

    def decoded(self, data: bytes | NDArray[Any], where: str) -> NDArray[Any] | Broken:
        """(height, width, channels) of ``data``, the content of a .npy file, or an array.

        Raises ``UserError`` that begins with ``where`` for another shape or number format, NaN and infinity.
        """
        found = data
        if isinstance(found, bytes):
            try:
                found = np.load(io.BytesIO(found), allow_pickle=False)
            except (OSError, ValueError, EOFError, MemoryError, SyntaxError) as error:
                return Broken(reason=one_line(error))
            if not isinstance(found, np.ndarray):
                return Broken(reason="not one array of numpy (.npy)")
        if found.shape != self.shape:
            raise UserError(
                f"{where}: the latent has the shape {found.shape}, and --latents {'x'.join(map(str, self.shape))} "
                f"needs {self.shape}: height, width, channels; transpose it, or change --latents"
            )
        if found.dtype != np.dtype(self.dtype):
            raise UserError(
                f"{where}: the latent is {found.dtype}, and the store {self.dtype}; use --latents-dtype float16 or "
                "float32, and write all files so"
            )
        if not np.isfinite(found).all():
            raise UserError(f"{where}: the latent has NaN or infinity; write it again, or remove it")
        return found

    def report(self) -> dict[str, Any]:
        """For the store's report."""
        return {"shape": list(self.shape), "dtype": self.dtype}


class Moments:
    """Mean and standard deviation of each channel, in fp64."""

    def __init__(self, channels: int) -> None:
        self._count, self._sums, self._squares = 0, np.zeros(channels), np.zeros(channels)

    def add(self, image: NDArray[Any]) -> None:
        """``image``: (h, w, c)"""
        rows = image.reshape(-1, image.shape[-1]).astype(np.float64)
        self._count += len(rows)
        self._sums += rows.sum(0)
        self._squares += np.square(rows).sum(0)

    def report(self) -> dict[str, list[float]]:
        """For the store's report; of at least one image."""
        mean = self._sums / self._count
        std = np.sqrt(np.maximum(self._squares / self._count - np.square(mean), 0))
        return {"mean": [float(one) for one in mean], "std": [float(one) for one in std]}
