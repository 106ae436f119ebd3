"""From names and specs to the classes that are built."""

from importlib import import_module

from lightscale.config.mixers import imported_class
from lightscale.config.model import ModelConfig
from lightscale.models.layers.shared_parts import EmbeddingPart, SharedPart, StagePart
from lightscale.models.mixers.interface import Mixer
from lightscale.models.registry import shared_specs
from lightscale.models.specs.interface import PartSpec


def mixer_class(name: str) -> type[Mixer]:
    """The mixer ``name``. Raises UserError with the nearest known names if it is unknown."""
    found = imported_class(name)
    assert isinstance(found, type) and issubclass(found, Mixer), f"mixer {name}: {found} is not a Mixer"
    return found


def shared_parts(model: ModelConfig) -> tuple[type[SharedPart], ...]:
    """The classes of ``registry.shared_specs``, in the same order."""
    return tuple(_part_class(spec) for spec in shared_specs(model))


def _part_class(spec: type[PartSpec]) -> type[SharedPart]:
    module, _, name = spec.implementation.partition(":")
    found = getattr(import_module(module), name)
    assert issubclass(found, (EmbeddingPart, StagePart)), f"{found} is neither an EmbeddingPart nor a StagePart"
    assert found.spec is spec, f"{spec.implementation} is described by {found.spec}, not by {spec}"
    return found
