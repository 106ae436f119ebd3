"""The formats that `lightscale export` writes, and where each is implemented: of which library the classes are.

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
    """How a library has a model: its weights by their names, its configuration, and the code it needs."""

    @abstractmethod
    def check(self, shape: "Shape") -> None:
        """UserError for a model that the library's classes do not compute, with the formula that differs."""

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
        """The files of code that an export brings, by their names."""

    @abstractmethod
    def usage(self, shape: "Shape") -> str:
        """How the export is loaded, for its card: Markdown, where PATH is its directory."""


def format_named(name: str) -> ExportFormat:
    """The format ``name`` of ``FORMATS``; imports torch. UserError where there is none."""
    if name not in FORMATS:
        raise UserError(f"unknown export format {name!r}; use one of {', '.join(FORMATS)}")
    module, _, cls = FORMATS[name].partition(":")
    found: ExportFormat = getattr(importlib.import_module(module), cls)()
    return found
