"""The request of ``lightscale draw``, without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightscale.evaluation.chosen_run import ChosenRun
from lightscale.evaluation.drawing.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A classifier that images are measured by."""

    chosen: ChosenRun
    source: str
    """Source of the drawing run's store with the images that drawn ones are compared with."""
    store: Path


@dataclass(frozen=True, kw_only=True)
class DrawingRequest:
    """Images to draw."""

    chosen: ChosenRun
    sampler: Sampler
    classes: Sequence[int]
    """Of each image."""
    class_names: Sequence[str]
    """By number, as far as they are known."""
    average: str | None
    """Name in ``optimizer.ema``; None: the weights."""
    columns: int
    scale: int
    """Pixels of the picture for each of an image, in both directions."""
    row_tokens: int
    out: Path | None
    """Where the picture of all images goes; None: latents are drawn."""
    latents: Path | None
    """Where latents go, with the names of their classes."""
    folder: Path | None
    """Where single images go, as CLASS/NUMBER.png."""
    judge: Judge | None
    as_json: bool

    def class_name(self, number: int) -> str:
        """That of class ``number``, or the number where it has none."""
        return self.class_names[number] if number < len(self.class_names) else str(number)
