"""Predict the noise in images: training of a diffusion transformer (DDPM, arXiv 2006.11239; DiT, arXiv 2212.09748).

A sequence is one image, as in ``classify_image.py``, noised at a timestep of its own. The loss of a token is the mean
square error over the pixels of its patch. The class of an image is an input, dropped now and then for classifier-free
guidance (arXiv 2207.12598). `lightscale draw` draws images.
"""

from collections.abc import Collection
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lightscale.config.augmentation import AugmentationConfig
from lightscale.config.mixers import BIDIRECTIONAL, CAUSAL
from lightscale.config.model import ModelConfig
from lightscale.config.schema import TaskConfig
from lightscale.config.section import Seed, ZeroToOne
from lightscale.data_pipeline.augmentation.noise import Noise, Prediction, ScheduleName
from lightscale.data_pipeline.loading.images import Images
from lightscale.data_pipeline.store.format import LABEL
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.tasks.classify_image import check_images, images_of
from lightscale.tasks.interface import TrainingTask


class DiffusionTaskConfig(TaskConfig):
    """[task] with name = "diffusion"."""

    name: Literal["diffusion"] = "diffusion"
    schedule: ScheduleName = "linear"
    """Variances that the timesteps add: linear (DDPM, ADM, DiT) or cosine (arXiv 2102.09672)."""
    timesteps: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Number of timesteps."""
    prediction: Prediction = "epsilon"
    """Prediction of the model: the noise ε, or v = sqrt(ᾱ) ε - sqrt(1 - ᾱ) x (arXiv 2202.00512)."""
    label_dropout: ZeroToOne = 0.1
    """Probability that the class of a training image is dropped, for classifier-free guidance."""
    seed: Seed = 0
    """Random seed of timesteps, noise and dropped classes: they depend on it and on the turn of an image."""
    augmentation: AugmentationConfig = AugmentationConfig()
    """Random changes of training images before they are noised; never of those of validation."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.augmentation.mixes:
            raise ValueError(
                'task.augmentation mixes images, whose classes task.name = "diffusion" reads; use mixup_alpha = 0 and '
                "cutmix_alpha = 0"
            )
        return self


class Diffusion(TrainingTask):
    """Noise of images; mixers may read either way."""

    options = DiffusionTaskConfig
    directions = CAUSAL | BIDIRECTIONAL
    reads_images = True
    predicts_noise = True

    def __init__(self, config: DiffusionTaskConfig, model: ModelConfig) -> None:
        self.config, self.model = config, model

    def check_store(self, model: ModelConfig, store: TokenStore, sources: Collection[str]) -> None:
        """The store has images of the model's size, and every one a label of the model's; reads the labels."""
        assert model.diffusion is not None, "checked before"
        check_images(model, store, sources, model.diffusion.num_labels, self.config.augmentation)

    def targets(self, store: TokenStore, *, validation: bool) -> Images:
        """Images are changed, and classes dropped, in training alone."""
        config, diffusion, patches = self.config, self.model.diffusion, self.model.patches
        assert diffusion is not None and patches is not None, "checked before"
        noise = Noise(
            seed=config.seed,
            schedule=config.schedule,
            timesteps=config.timesteps,
            prediction=config.prediction,
            label_dropout=0.0 if validation else config.label_dropout,
            num_labels=diffusion.num_labels,
            mean=patches.mean,
            std=patches.std,
        )
        augmentation = None if validation else config.augmentation
        return images_of(self.model, diffusion.num_labels, augmentation=augmentation, noise=noise)

    def class_names(self, store: TokenStore) -> list[str]:
        """Those of the array of labels."""
        return store.classes.get(LABEL, [])
