"""``lightscale resolutions`` behind its checks: image classifiers at image sizes, on one process."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightscale.data_pipeline.images.broken import Broken
from lightscale.data_pipeline.images.decode import ImageForm, decoded
from lightscale.data_pipeline.loading.images import as_patches
from lightscale.data_pipeline.store.format import IMAGE, LABEL
from lightscale.evaluation.model import LoadedModel, mesh_of, restore
from lightscale.evaluation.resolutions.memory import MemoryPeak
from lightscale.evaluation.resolutions.request import ResolutionRequest
from lightscale.models.language_model import LanguageModel
from lightscale.models.resolution import at_grid

Record = dict[str, Any]
_TOP = 5


def measured(asked: ResolutionRequest) -> Iterator[Record]:
    """A record of each run and size, in order; see ``record`` for its keys."""
    for chosen in asked.runs:
        with mesh_of(chosen.config) as mesh:
            loaded = restore(chosen, mesh)
            for size in asked.sizes:
                yield {
                    "run": str(chosen.directory.path),
                    "step": loaded.step,
                    "device": mesh.device.type,
                    **record(loaded, asked, size, mesh.device),
                }


def record(loaded: LoadedModel, asked: ResolutionRequest, size: tuple[int, int], device: torch.device) -> Record:
    """``loss``, ``accuracy`` and ``top5_accuracy`` are means over images.

    ``images_per_s`` and ``peak_memory_bytes`` are of the passes alone: of images that are on the device, without the
    first pass, and beyond what the process held before. None: out of memory, or not counted.
    """
    patches, trained = loaded.config.model.patches, loaded.config.model.grid
    assert patches is not None and trained is not None, "a model of images"
    (height, width), (h, w) = size, patches.size
    shape = [height // h, width // w]
    found: Record = {"image_size": list(size), "tokens": trained.leading_tokens + shape[0] * shape[1]}
    try:
        with at_grid(loaded.model, shape), torch.inference_mode():
            return found | _passes(loaded.model, asked, size, (h, w), device)
    except torch.OutOfMemoryError:
        keys = ("images", "loss", "accuracy", "top5_accuracy", "images_per_s", "peak_memory_bytes")
        return {**found, **dict.fromkeys(keys), "out_of_memory": True}


def _passes(
    model: LanguageModel,
    asked: ResolutionRequest,
    size: tuple[int, int],
    patch: tuple[int, int],
    device: torch.device,
) -> Record:
    assert model.model.grid is not None and model.model.patches is not None, "a model of images"
    sums, timed_images, timed_s, first = torch.zeros(3, dtype=torch.float64), 0, 0.0, True
    batches = _batches(asked, size, patch, model.model.grid.leading_tokens, model.model.patches.overlap)
    peak: MemoryPeak | None = None
    for tokens, labels in batches:
        inputs, wanted = torch.from_numpy(tokens).to(device), torch.from_numpy(labels).to(device)
        positions = torch.arange(inputs.size(1), device=device).repeat(len(inputs), 1)
        # Behind the first batch's making, whose images would count.
        peak = peak or MemoryPeak(device)
        _wait(device)
        began = time.perf_counter()
        log_probability, _ = model.label_log_probability(model(inputs, positions, hidden_only=True), positions)
        _wait(device)
        if not first:
            timed_s, timed_images = timed_s + time.perf_counter() - began, timed_images + len(inputs)
        first = False
        own = log_probability.gather(1, wanted[:, None])
        better = (log_probability > own).sum(1)
        sums += torch.stack([-own.sum(), (better < 1).sum(), (better < _TOP).sum()]).double().cpu()
    loss, best, among = (sums / asked.num_images).tolist()
    return {
        "images": asked.num_images,
        "loss": loss,
        "accuracy": best,
        "top5_accuracy": among,
        "images_per_s": timed_images / timed_s if timed_s else None,
        "peak_memory_bytes": None if peak is None else peak.num_bytes(),
    }


def _batches(
    asked: ResolutionRequest, size: tuple[int, int], patch: tuple[int, int], leading_tokens: int, overlap: int
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Tokens (b, n, p) and labels (b,) of the images, scaled to cover ``size`` and cut in the middle."""
    form = ImageForm(shape=(*size, asked.image_shape[2]), resize="crop", asked_by="--image-sizes")
    for first in range(0, asked.num_images, asked.batch_size):
        last = min(first + asked.batch_size, asked.num_images)
        pixels = asked.source.document_values(IMAGE, first, last).reshape(-1, *asked.image_shape)
        scaled = [_scaled(one, form) for one in pixels]
        labels = asked.source.document_values(LABEL, first, last).astype(np.int64)
        yield as_patches(np.stack(scaled), patch, leading_tokens, overlap), labels


def _scaled(pixels: NDArray[np.uint8], form: ImageForm) -> NDArray[np.uint8]:
    if pixels.shape == form.shape:
        return pixels
    found = decoded(pixels, form, "an image of the store")
    assert not isinstance(found, Broken), "pixels of a store"
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def of_runs(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each run, in order."""
    found: dict[str, list[Record]] = {}
    for one in records:
        found.setdefault(one["run"], []).append(one)
    return found
