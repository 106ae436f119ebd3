"""Formats of `lightscale export`, one per library of model classes, and their implementations.

Import strings, because the command's arguments are checked without torch.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightscale.errors import UserError

if TYPE_CHECKING:
    import torch

    from lightscale.exchange.files.safetensors_files import Written
    from lightscale.exchange.plain.model import Shape
    from lightscale.exchange.trained import TrainedRun

FORMATS: dict[str, str] = {
    "transformers": "lightscale.exchange.transformers_format:TransformersFormat",
    "fla": "lightscale.exchange.fla_format:FlaFormat",
}
"""Name to "module:class". The first is the default."""


class ExportFormat(ABC):
    """Representation of a model in a library: weights by name, configuration, and the code that it needs."""

    @abstractmethod
    def check(self, shape: "Shape") -> None:
        """Raise ``UserError``, with the formula that differs, for a model that the library's classes do not compute."""

    @abstractmethod
    def config(
        self,
        shape: "Shape",
        *,
        eot_id: int,
        dtype: str,
        max_tokens: int,
        init_std: float,
        classes: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The content of config.json.

        Args:
            shape: of the plain model.
            eot_id: begins and ends documents.
            dtype: of most weights, as torch names it, such as "bfloat16".
            max_tokens: the length of sequences that the model was trained on.
            init_std: of the initial weights.
            classes: the names of a classifier's classes, as far as they are known.
        """

    @abstractmethod
    def tensors(self, run: "TrainedRun", dtype: "torch.dtype") -> "list[Written]":
        """Every weight, in the order in which files hold them; angles, decays and bounds are fp32 at least."""

    @abstractmethod
    def code(self, shape: "Shape") -> dict[str, str]:
        """Code files of an export, by name."""

    @abstractmethod
    def usage(self, shape: "Shape") -> str:
        """Instructions to load the export, for its model card: Markdown with PATH for its directory."""


def format_named(name: str) -> ExportFormat:
    """The format ``name`` of ``FORMATS``; imports torch. UserError where there is none."""
    if name not in FORMATS:
        raise UserError(f"unknown export format {name!r}; use one of {', '.join(FORMATS)}")
    module, _, cls = FORMATS[name].partition(":")
    found: ExportFormat = getattr(importlib.import_module(module), cls)()
    return found
