"""From a model's configuration to the specs and checks of its mixers and shared parts; without torch.

Which mixers there are stands in ``lightscale.config.mixers``; the classes that the specs describe, in ``classes.py``.
"""

from lightscale.config.layout import check_mixers
from lightscale.config.mixers import imported_spec
from lightscale.config.model import ModelConfig
from lightscale.config.schema import ParallelConfig
from lightscale.errors import UserError
from lightscale.models.specs.diffusion import ConditioningSpec
from lightscale.models.specs.interface import EmbeddingPartSpec, MixerSpec, PartSpec, StagePartSpec
from lightscale.models.specs.patches import PatchesSpec
from lightscale.models.specs.positions import LearnedPositionsSpec
from lightscale.models.specs.tpe import TPESpec


def mixer_spec(name: str) -> type[MixerSpec]:
    """The spec of the mixer ``name``. Raises UserError with the nearest known names if it is unknown."""
    found = imported_spec(name)
    assert isinstance(found, type) and issubclass(found, MixerSpec), f"mixer {name}: {found} is not a MixerSpec"
    return found


def layer_operators(model: ModelConfig) -> tuple[str, ...]:
    """The name of the operator of each layer."""
    return tuple(mixer_spec(name).layer_operator(model, layer) for layer, name in enumerate(model.layers))


def shared_specs(model: ModelConfig) -> tuple[type[PartSpec], ...]:
    """Parts that the model holds once because a mixer or its inputs need them, by name: see ``MixerSpec.shared``.

    UserError where mixers of several packages have different parts of one name.
    """
    parts: dict[str, type[PartSpec]] = {}
    for name in dict.fromkeys(model.layers):
        # All layers of a mixer have the same options.
        for part in mixer_spec(name).shared_parts(model, model.layers.index(name)):
            kinds = (EmbeddingPartSpec, StagePartSpec)
            assert issubclass(part, kinds), f"{part} is neither an EmbeddingPartSpec nor a StagePartSpec"
            if parts.setdefault(part.name, part) is not part:
                raise UserError(
                    f"model.mixer: {name} and another mixer of the model have different shared parts named "
                    f"{part.name!r}; use mixers that share one class"
                )
    if model.patches is not None:
        parts[PatchesSpec.name] = PatchesSpec
        if model.patches.learned_positions:
            parts.setdefault(LearnedPositionsSpec.name, LearnedPositionsSpec)
    if model.diffusion is not None:
        parts[ConditioningSpec.name] = ConditioningSpec
    # In one order for every stack: the order of parameters decides how the distributed optimizer cuts them up.
    return tuple(parts[name] for name in sorted(parts))


def check_model(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise the errors of ``config.layout.check_mixers`` and of shapes that a shared part refuses; builds no model."""
    check_mixers(model, parallel)
    parts = shared_specs(model)
    if model.tpe is not None and TPESpec not in parts:
        raise UserError(
            f"model.tpe: no layer of model.mixer = {model.mixer!r} uses the positional encoding; remove the table"
        )
    for part in parts:
        part.check(model)
