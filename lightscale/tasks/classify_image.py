"""Predict one label for each image of a store of images: image classification.

A sequence is one image: ``model.grid`` counts its patches, ``model.patches`` their pixels. The output layer,
``model.head``, sees the mean of its tokens, the first one (a class token: ``model.grid.leading_tokens`` = 1) or the
last. The loss is the mean over images.
"""

from collections.abc import Collection
from importlib.util import find_spec
from typing import Literal

from lightscale.config.augmentation import AugmentationConfig
from lightscale.config.mixers import BIDIRECTIONAL, CAUSAL
from lightscale.config.model import ModelConfig
from lightscale.config.schema import TaskConfig
from lightscale.config.section import Fraction
from lightscale.data_pipeline.augmentation.augment import Augmentation
from lightscale.data_pipeline.augmentation.noise import Noise
from lightscale.data_pipeline.loading.images import Images
from lightscale.data_pipeline.store.format import LABEL
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.errors import UserError
from lightscale.tasks.classify import check_labels
from lightscale.tasks.interface import TrainingTask


class ClassifyImageConfig(TaskConfig):
    """[task] with name = "classify-image"."""

    name: Literal["classify-image"] = "classify-image"
    label_smoothing: Fraction = 0.0
    """Share of a training label that all classes have alike, as in torch's cross entropy; validation has none."""
    augmentation: AugmentationConfig = AugmentationConfig()
    """Random changes of training images; never of those of validation."""


class ClassifyImage(TrainingTask):
    """Classification of images; mixers may read either way."""

    options = ClassifyImageConfig
    directions = CAUSAL | BIDIRECTIONAL
    predicts_labels = True
    reads_images = True
    top = (1, 5)

    def __init__(self, config: ClassifyImageConfig, model: ModelConfig) -> None:
        self.config, self.model = config, model

    def check_store(self, model: ModelConfig, store: TokenStore, sources: Collection[str]) -> None:
        """The store has images of the model's size, and every one a label of the model's; reads the labels."""
        assert model.head is not None, "checked before"
        check_images(model, store, sources, model.head.num_labels, self.config.augmentation)

    def targets(self, store: TokenStore, *, validation: bool) -> Images:
        """Images are changed, and labels smoothed, in training alone."""
        config, head = self.config, self.model.head
        assert head is not None, "checked before"
        smoothing = 0.0 if validation else config.label_smoothing
        augmentation = None if validation else config.augmentation
        return images_of(self.model, head.num_labels, augmentation=augmentation, label_smoothing=smoothing)

    def class_names(self, store: TokenStore) -> list[str]:
        """Those of the array of labels."""
        return store.classes.get(LABEL, [])


def check_images(
    model: ModelConfig, store: TokenStore, sources: Collection[str], num_labels: int, augmentation: AugmentationConfig
) -> None:
    """Raise UserError unless ``sources`` have images of the model's size, each with one of ``num_labels`` labels."""
    assert model.patches is not None and model.grid is not None, "checked before"
    if not _fits(store.image_shape, model.image_shape):
        found = "no images" if store.image_shape is None else f"images of {_shown(store.image_shape)}"
        option = "--latents" if model.patches.latents else "--images"
        raise UserError(
            f"{store.title} has {found}, and the model reads images of {_shown(model.image_shape)} "
            f"(model.grid.shape = {model.grid.shape} times model.patches.size = {model.patches.size}, "
            f"model.patches.channels = {model.patches.channels}); prepare the store with {option} "
            f"{'x'.join(map(str, model.image_shape or ()))}, or larger, or change these keys"
        )
    if store.has_latents != model.patches.latents:
        found, cure = ("latents", "true") if store.has_latents else ("pixels", "false")
        raise UserError(
            f"{store.title} has {found}, and model.patches.latents = {str(model.patches.latents).lower()}; use {cure}, "
            f"or a store of {'pixels (--images)' if store.has_latents else 'latents (--latents)'}"
        )
    if augmentation.needs_pillow and find_spec("PIL") is None:
        raise UserError(
            "task.augmentation: crop_scale and rand_augment_ops need Pillow; pip install 'lightscale[images]', or "
            "remove them"
        )
    for source in map(store.source, sources):
        check_labels(LABEL, store, source, num_labels)


def images_of(
    model: ModelConfig,
    num_labels: int,
    *,
    augmentation: AugmentationConfig | None,
    label_smoothing: float = 0.0,
    noise: Noise | None = None,
) -> Images:
    """The rows of a model of images; ``augmentation``: None: images stay as they are."""
    assert model.image_shape is not None and model.patches is not None and model.grid is not None, "checked before"
    height, width = model.patches.size
    # What is off has no part in the run's data.
    changes = augmentation is not None and augmentation.description()
    return Images(
        shape=model.image_shape,
        patch=(height, width),
        overlap=model.patches.overlap,
        leading_tokens=model.grid.leading_tokens,
        label=LABEL,
        num_labels=num_labels,
        label_smoothing=label_smoothing,
        augmentation=Augmentation(
            config=augmentation,
            size=model.image_shape[:2],
            mean=model.patches.mean,
            std=model.patches.std,
        )
        if augmentation is not None and changes
        else None,
        noise=noise,
    )


def _fits(stored: tuple[int, int, int] | None, read: tuple[int, int, int] | None) -> bool:
    """Whether images of the store hold those of the model: of larger ones, the middle or a crop is read."""
    if stored is None or read is None or stored[2] != read[2]:
        return False
    return stored[0] >= read[0] and stored[1] >= read[1]


def _shown(shape: tuple[int, int, int] | None) -> str:
    return " x ".join(map(str, shape or ())) + " (height x width x channels)"
