"""Interface of generators: documents by a rule, each a function of seed and number, and their tokens."""

import argparse
import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.errors import UserError

GENERATORS = {
    "copying": "lightscale.data_pipeline.generators.copying:Copying",
    "listops": "lightscale.data_pipeline.generators.listops:ListOps",
    "mqar": "lightscale.data_pipeline.generators.mqar:MQAR",
    "pathfinder": "lightscale.data_pipeline.generators.pathfinder:Pathfinder",
}
"""Name, which is that of its command ``lightscale data NAME`` and of the source, to "module:class"."""


@dataclass(frozen=True, kw_only=True)
class MadeDocument:
    """A generated document."""

    text: str
    label: int | None = None
    """Its class, where the generator has ``classes``."""
    pixels: NDArray[np.uint8] | None = None
    """(height, width, channels), where documents are images."""
    counts: NDArray[np.uint8] | None = None
    """(n,) 1 where a token counts as a label, where the generator ``has_loss_mask``."""


class Generator(ABC):
    """Generates documents, as a data class with its options; imports no torch."""

    help: ClassVar[str]
    """A line about it, for the list of commands."""
    has_images: ClassVar[bool] = False
    """Whether documents are images, which a store can hold as such in place of their tokens."""
    has_loss_mask: ClassVar[bool] = False
    """Whether documents have a mask of the tokens that count."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes that labels are the numbers of; none: documents have no labels."""
        return ()

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """(height, width, channels) of documents that are images."""
        return None

    @staticmethod
    @abstractmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declare the options of its documents."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """Generator for these arguments, one for each field; ``UserError`` for impossible ones."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})  # type: ignore[arg-type]

    @abstractmethod
    def tokenizer(self) -> TiktokenTokenizer:
        """Tokenizer with the symbols of the documents as tokens."""

    def settings(self) -> dict[str, Any]:
        """Everything that determines its documents except seed and number, for the report."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @abstractmethod
    def make(self, random: Random) -> MadeDocument:
        """One document, determined only by the numbers of ``random``."""

    def document(self, seed: int, split: str, number: int) -> MadeDocument:
        """Document ``number`` of a split, independent of all other documents."""
        # Of a text, Python's generator begins alike on every machine and in every version; so do its `random()`s.
        return self.make(Random(f"{seed} {split} {number}"))


def generator_class(name: str) -> type[Generator]:
    """Class of ``GENERATORS[name]``."""
    module, _, attribute = GENERATORS[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert issubclass(found, Generator), f"{GENERATORS[name]} is no Generator"
    return found


def require_range(option: str, value: int, least: int, most: int) -> None:
    """``UserError`` unless ``value``, of ``--option``, is from ``least`` to ``most``."""
    if not least <= value <= most:
        raise UserError(f"--{option} {value}: must be {least} to {most:,}")


def integer(random: Random, least: int, most: int) -> int:
    """Uniform random integer from ``least`` to ``most``."""
    return least + int(random.random() * (most - least + 1))
