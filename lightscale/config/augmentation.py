"""[task.augmentation]: the random changes of training images; see ``lightscale.data_pipeline.augmentation``."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lightscale.config.section import Count, Section, Seed, Share, Small, ZeroToOne

_PAIR = Field(min_length=2, max_length=2)
# Beyond it a draw by rejection takes many attempts; published recipes use at most 1.
Alpha = Annotated[float, Field(ge=0, le=2)]


class AugmentationConfig(Section):
    """[task.augmentation]: random changes of training images, in this order; all are off by default."""

    seed: Seed = 0
    """Random seed of the changes, which depend on it and on the image's turn in the data alone."""
    crop_scale: Annotated[list[Share], _PAIR] | None = None
    """Least and most area of a random crop, as a share of the image, such as [0.08, 1.0]; none: no random crop."""
    crop_ratio: Annotated[list[Small], _PAIR] = Field(default=[0.75, 4 / 3])
    """Least and most width of a random crop, as a multiple of its height."""
    horizontal_flip: ZeroToOne = 0.0
    """Probability of a flip from left to right."""
    rand_augment_ops: Annotated[int, Field(ge=0, le=16)] = 0
    """Number of RandAugment's operations per image; 0: off."""
    rand_augment_magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """Strength of RandAugment's operations, from 0 to 30."""
    random_erasing: ZeroToOne = 0.0
    """Probability that a rectangle is erased."""
    erasing_scale: Annotated[list[Share], _PAIR] = Field(default=[0.02, 0.33])
    """Least and most area of the erased rectangle, as a share of the image."""
    erasing_ratio: Annotated[list[Small], _PAIR] = Field(default=[0.3, 3.3])
    """Least and most height of the erased rectangle, as a multiple of its width."""
    erasing_value: Literal["noise", "mean"] = "noise"
    """noise: normal numbers of model.patches.mean and std for each pixel; mean: model.patches.mean."""
    mixup_alpha: Alpha = 0.0
    """Parameter of the Beta distribution of mixup's shares; 0: no mixup."""
    cutmix_alpha: Alpha = 0.0
    """Parameter of the Beta distribution of CutMix's areas; 0: no CutMix."""
    mix_probability: ZeroToOne = 1.0
    """Probability that two neighbours in the data are mixed."""
    cutmix_probability: ZeroToOne = 0.5
    """Probability that a mixed pair takes CutMix, where mixup_alpha and cutmix_alpha are both above 0."""
    workers: Count = 1
    """Threads per rank that change images; the images are the same for any number."""

    @property
    def mixes(self) -> bool:
        """Whether images, and their labels, are mixed."""
        return self.mix_probability > 0 and (self.mixup_alpha > 0 or self.cutmix_alpha > 0)

    @property
    def needs_pillow(self) -> bool:
        """Whether a change is Pillow's."""
        return self.crop_scale is not None or self.rand_augment_ops > 0

    @property
    def only_flips(self) -> bool:
        """Whether an image is at most flipped."""
        return not (self.needs_pillow or self.random_erasing or self.mixes)

    def description(self) -> str:
        """All that decides the images: the keys that differ from their defaults; empty: images stay as they are."""
        decisive = self.model_dump(exclude_defaults=True, exclude={"workers"})
        return ", ".join(f"{name} {value}" for name, value in decisive.items())

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("crop_scale", "crop_ratio", "erasing_scale", "erasing_ratio"):
            if (values := getattr(self, name)) is not None and values[0] > values[1]:
                raise ValueError(f"task.augmentation.{name} = {values}: the least comes first; use {values[::-1]}")
        return self
