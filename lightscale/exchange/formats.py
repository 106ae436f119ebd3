"""Formats of `lightscale export`, one per library of model classes, and their implementations.

Import strings, because the command's arguments are checked without torch.
"""

import importlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from lightscale.errors import UserError

if TYPE_CHECKING:
    import torch

    from lightscale.exchange.files.export_config import ConfigFacts
    from lightscale.exchange.files.safetensors_files import Written
    from lightscale.exchange.plain.model import Shape
    from lightscale.exchange.trained import TrainedRun

FORMATS: dict[str, str] = {
    "transformers": "lightscale.exchange.transformers_format:TransformersFormat",
    "fla": "lightscale.exchange.fla_format:FlaFormat",
    "diffusers": "lightscale.exchange.diffusers_format:DiffusersFormat",
}
"""Name to "module:class"."""


class ExportFormat(ABC):
    """Representation of a model in a library: weights by name, configuration, and the code that it needs."""

    folder: ClassVar[str] = ""
    """Of weights and config.json in an export; it ends with "/"."""
    stem: ClassVar[str] = "model"
    """What the files of weights begin with."""

    @abstractmethod
    def check(self, shape: "Shape") -> None:
        """Raise ``UserError``, with the formula that differs, for a model that the library's classes do not compute."""

    @abstractmethod
    def config(self, shape: "Shape", facts: "ConfigFacts") -> dict[str, Any]:
        """The content of config.json for a plain model of `shape`."""

    @abstractmethod
    def tensors(self, run: "TrainedRun", dtype: "torch.dtype") -> "list[Written]":
        """Every weight, in the order in which files hold them; angles, decays and bounds are fp32 at least."""

    @abstractmethod
    def beside(self, run: "TrainedRun") -> dict[str, str]:
        """Further files of an export, by their paths in it: code, and what describes inputs."""

    @abstractmethod
    def usage(self, shape: "Shape") -> str:
        """Instructions to load the export, for its model card: Markdown with PATH for its directory."""


def usual_format(predicts_noise: bool) -> str:
    """The format of an export for which none was chosen."""
    return "diffusers" if predicts_noise else "transformers"


def format_named(name: str) -> ExportFormat:
    """The format ``name`` of ``FORMATS``; imports torch. UserError where there is none."""
    if name not in FORMATS:
        raise UserError(f"unknown export format {name!r}; use one of {', '.join(FORMATS)}")
    module, _, cls = FORMATS[name].partition(":")
    found: ExportFormat = getattr(importlib.import_module(module), cls)()
    return found
