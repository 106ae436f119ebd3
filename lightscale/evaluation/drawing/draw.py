"""``lightscale draw`` behind its checks: the model on its ranks, images, files, and measures of a classifier."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.augmentation.augment import centre_crop
from lightscale.data_pipeline.augmentation.noise import as_bytes, unscaled
from lightscale.data_pipeline.loading.images import as_patches
from lightscale.data_pipeline.store.format import IMAGE
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import counted
from lightscale.evaluation.drawing.denoiser import Denoiser
from lightscale.evaluation.drawing.measures import (
    classifier_score,
    coverage,
    frechet_distance,
    spatial_channels,
)
from lightscale.evaluation.drawing.pictures import as_grid, as_pixels, write_latents, write_png
from lightscale.evaluation.drawing.request import DrawingRequest, Judge
from lightscale.evaluation.inference.predictions import Predictor
from lightscale.evaluation.model import LoadedModel, mesh_of, restore
from lightscale.evaluation.model_at_work import ModelAtWork
from lightscale.models.specs.patches import patch_numbers
from lightscale.parallel.mesh import Mesh

Pixels = NDArray[np.uint8]
Latents = NDArray[np.float32]


def draw(asked: DrawingRequest) -> None:
    """Draw the images that ``asked`` describes, write them, and print their measures.

    Called by every rank with torchrun's variables in the environment, or without them by one process.
    """
    with mesh_of(asked.chosen.config) as mesh:
        drawing = Drawing(asked, restore(asked.chosen, mesh, average=asked.average), mesh)
        images = drawing.draw()
        drawing.write(images)
        if asked.judge is not None:
            assert images.dtype == np.uint8, "checked"
            drawing.print_measures(measures(asked, asked.judge, images.astype(np.uint8), mesh, drawing.advance))


class Drawing(ModelAtWork):
    """A model and its request; collective over the ranks of ``mesh``."""

    def __init__(self, asked: DrawingRequest, loaded: LoadedModel, mesh: Mesh) -> None:
        super().__init__(asked.chosen, loaded, mesh)
        self.asked = asked
        self._denoiser = Denoiser(loaded.model, mesh, row_tokens=asked.row_tokens, advance=self.advance)

    def draw(self) -> Pixels | Latents:
        """(b, h, w, c), on every rank."""
        started_s, model = time.perf_counter(), self.asked.chosen.config.model
        assert model.patches is not None and model.grid is not None, "a model of images"
        shape = model.grid.document_tokens, patch_numbers(model.patches)
        found = self.asked.sampler.draw(self._denoiser, self.asked.classes, shape)
        of_channels = model.patches.mean, model.patches.std
        form = model.grid.shape, model.patches.size, model.patches.channels
        images: Pixels | Latents
        if model.patches.latents:
            images = as_pixels(unscaled(found, *of_channels).astype(np.float32), *form)
        else:
            images = as_pixels(as_bytes(found, *of_channels), *form)
        took_s, weights = time.perf_counter() - started_s, self.asked.average or "weights"
        self._say(f"{counted(len(images), 'image')} in {took_s:.2f} s, from {self.loaded.checkpoint} ({weights})")
        return images

    def write(self, images: Pixels | Latents) -> None:
        """The picture of all images, and single ones; or latents."""
        if not self._is_main:
            return
        asked = self.asked
        if asked.latents is not None:
            names = [asked.class_name(label) for label in asked.classes]
            write_latents(images.astype(np.float32), names, asked.latents)
            self._say(f"wrote {asked.latents}")
            return
        assert asked.out is not None and images.dtype == np.uint8, "checked"
        pixels = images.astype(np.uint8)
        write_png(as_grid(pixels, asked.columns, scale=asked.scale), asked.out)
        self._say(f"wrote {asked.out}")
        if asked.folder is None:
            return
        for number, (image, label) in enumerate(zip(pixels, asked.classes, strict=True)):
            path = asked.folder / asked.class_name(label) / f"{number:05}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_png(image, path)
        self._say(f"wrote {counted(len(pixels), 'file')} to {asked.folder}")

    def print_measures(self, found: dict[str, Any]) -> None:
        """A line for people, or one of JSON."""
        if self._is_main:
            line = (
                json.dumps(found) if self.asked.as_json else ", ".join(f"{key} {value}" for key, value in found.items())
            )
            sys.stdout.write(line + "\n")


def measures(
    asked: DrawingRequest, judge: Judge, images: Pixels, mesh: Mesh, advance: Callable[[], None]
) -> dict[str, Any]:
    """What a classifier recognises of drawn ``images``, and how near its features of them are to real ones'.

    ``advance`` is called for each batch.
    """
    config = judge.chosen.config.model
    assert config.patches is not None and config.grid is not None and config.image_shape is not None
    height, width = config.patches.size
    leading, tokens = config.grid.leading_tokens, config.grid.document_tokens
    channels = spatial_channels(tokens - leading, config.hidden_size)
    model = restore(judge.chosen, mesh).model
    predictor = Predictor(model, mesh, row_tokens=asked.row_tokens, advance=advance)

    def documents(pixels: Pixels) -> list[NDArray[Any]]:
        return list(as_patches(pixels, (height, width), leading))

    real = documents(_real_images(judge, (config.image_shape[0], config.image_shape[1])))
    drawn = documents(images)
    classes = predictor.classify(drawn)
    recognised = classes.argmax(axis=1) == np.array(asked.classes)
    of_real, of_drawn = (predictor.embed(one, "mean") for one in (real, drawn))
    places = (predictor.embed_patches(one, leading, channels).reshape(len(one), -1) for one in (real, drawn))
    covered = coverage(of_real, of_drawn)
    return {
        "images": len(drawn),
        "recognised": round(float(recognised.mean()), 4),
        "frechet_distance": round(frechet_distance(of_real, of_drawn), 4),
        "spatial_frechet_distance": round(frechet_distance(*places), 4),
        "classifier_score": round(classifier_score(classes), 4),
        "precision": round(covered.precision, 4),
        "recall": round(covered.recall, 4),
    }


def _real_images(judge: Judge, size: tuple[int, int]) -> Pixels:
    """All images of a source, the middle of each."""
    source = TokenStore(judge.store).source(judge.source)
    assert source.image_shape is not None, "a source of images"
    pixels: Pixels = source.document_values(IMAGE, 0, source.num_documents)
    return np.stack([centre_crop(image.reshape(source.image_shape), size) for image in pixels])
