"""What ``lightscale resolutions`` is asked for, found and checked without torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lightscale.config.arithmetic import near_multiple
from lightscale.config.model import ModelConfig
from lightscale.config.tasks import task_class
from lightscale.data_pipeline.store.format import LABEL
from lightscale.data_pipeline.store.several_stores import same_classes
from lightscale.data_pipeline.store.token_store import TokenSource, TokenStore
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun
from lightscale.evaluation.prediction.request import class_names
from lightscale.tasks.classify import check_labels

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


@dataclass(frozen=True, kw_only=True)
class ResolutionRequest:
    """Runs, and the sizes and images that they are measured with."""

    runs: Sequence[ChosenRun]
    sizes: Sequence[tuple[int, int]]
    """Height and width in pixels; multiples of every run's patches."""
    source: TokenSource
    """Of a store of images with labels."""
    image_shape: tuple[int, int, int]
    """Of its images."""
    num_images: int
    batch_size: int


def image_grid(option: str, size: str, model: ModelConfig) -> list[int]:
    """Rows and columns of patches of images of ``size``, "HEIGHTxWIDTH"; UserError that names ``option``."""
    assert model.patches is not None, "a model of images"
    grid = []
    for pixels, patch in zip(image_size(option, size), model.patches.size, strict=True):
        if pixels % patch:
            raise UserError(
                f"{option} {size}: {pixels} pixels are no multiple of the {patch} of a patch "
                f"(model.patches.size = {model.patches.size}); use {near_multiple(pixels, patch)}"
            )
        grid.append(pixels // patch)
    return grid


def image_size(option: str, given: str) -> tuple[int, int]:
    """Height and width of "HEIGHTxWIDTH"."""
    found = _SIZE.fullmatch(given)
    if found is None:
        raise UserError(f"{option} {given}: must be HEIGHTxWIDTH, such as 224x224")
    height, width = map(int, found.groups())
    return height, width


def check_request(
    runs: Sequence[ChosenRun],
    sizes: Sequence[str],
    *,
    store: Path | None,
    source: str | None,
    num_images: int | None,
    batch_size: int,
) -> ResolutionRequest:
    """The request; UserError for runs of texts, sizes that patches do not divide, and images that do not fit.

    Args:
        runs: each with a checkpoint.
        sizes: "HEIGHTxWIDTH".
        store, source: None: those of the first run's validation.
        num_images: the first so many; None: all.
        batch_size: images of a pass.
    """
    if find_spec("PIL") is None:
        raise UserError("resolutions: images are scaled by the package pillow; pip install 'lightscale[images]'")
    for option, value in (("--images", num_images), ("--batch-size", batch_size)):
        if value is not None and value < 1:
            raise UserError(f"{option} {value}: must be at least 1")
    for run in runs:
        where = f'{run.directory.path}: its task.name = "{run.config.task.name}"'
        task = task_class(run.config.task.name)
        if not (task.reads_images and task.predicts_labels):
            raise UserError(f'{where}; use runs with task.name = "classify-image"')
        for size in sizes:
            image_grid("--image-sizes", size, run.config.model)
    opened, name = _store(runs[0], store, source)
    found = opened.source(name)
    shape = opened.image_shape
    if shape is None or opened.has_latents:
        raise UserError(f"{opened.title} has no images; use a store of `data prepare --images`")
    for run in runs:
        model = run.config.model
        assert model.head is not None and model.patches is not None, "a model of images"
        if model.patches.channels != shape[2]:
            raise UserError(
                f"{opened.title} has images of {shape[2]} channels, and {run.directory.path} reads "
                f"{model.patches.channels}; use a store of such images (--store)"
            )
        check_labels(LABEL, opened, found, model.head.num_labels)
        names, others = class_names(run), opened.classes.get(LABEL)
        # Without names there are only numbers. A store may lack the run's last classes, as validation may.
        if names and others and list(names[: len(others)]) != list(others):
            raise UserError(
                f"{opened.title}: its classes are not those of {run.directory.path} ({', '.join(names[:5])}, …); "
                f"{same_classes(opened)}"
            )
    return ResolutionRequest(
        runs=runs,
        sizes=[image_size("--image-sizes", size) for size in sizes],
        source=found,
        image_shape=shape,
        num_images=min(num_images or found.num_documents, found.num_documents),
        batch_size=batch_size,
    )


def _store(run: ChosenRun, store: Path | None, source: str | None) -> tuple[TokenStore, str]:
    """The store, and the name of its source of images."""
    data = run.config.data
    validation = list(data.validation.values())
    if store is None and source is None and validation:
        store = validation[0].store
    if store is None:
        paths = data.store_paths
        if len(paths) > 1:
            raise UserError(f"{run.directory.path} reads {len(paths)} stores; name one with --store PATH")
        (store,) = paths.values()
    if source is None and not validation:
        raise UserError(f"{run.directory.path} has no validation (data.validation); name a source with --source")
    opened = TokenStore(store)
    return opened, source if source is not None else validation[0].source
