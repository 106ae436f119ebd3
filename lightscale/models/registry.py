"""From a model's configuration to the classes of its mixers and shared parts, and what they refuse.

Which mixers there are stands in ``lightscale.config.mixers``, without torch.
"""

from lightscale.config.layout import check_mixers
from lightscale.config.mixers import imported_class
from lightscale.config.schema import ModelConfig, ParallelConfig
from lightscale.errors import UserError
from lightscale.models.layers.shared_parts import EmbeddingPart, SharedPart, StagePart
from lightscale.models.mixers.interface import Mixer


def mixer_class(name: str) -> type[Mixer]:
    """The mixer called ``name``; UserError with the nearest known names otherwise."""
    found = imported_class(name)
    assert isinstance(found, type) and issubclass(found, Mixer), f"mixer {name}: {found} is no Mixer"
    return found


def shared_parts(model: ModelConfig) -> tuple[type[SharedPart], ...]:
    """What the model holds once because one of its mixers needs it, by name: see ``Mixer.shared``.

    UserError where mixers of several packages have different parts of one name.
    """
    parts: dict[str, type[SharedPart]] = {}
    for name in dict.fromkeys(model.layers):
        for part in mixer_class(name).shared:
            assert issubclass(part, (EmbeddingPart, StagePart)), f"{part} is neither an EmbeddingPart nor a StagePart"
            if parts.setdefault(part.name, part) is not part:
                raise UserError(
                    f"model.mixer: {name} and another mixer of the model have different shared parts named "
                    f"{part.name!r}; use mixers that share one class"
                )
    # In one order for every stack: the order of parameters decides how the distributed optimizer cuts them up.
    return tuple(parts[name] for name in sorted(parts))


def check_model(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse what ``config.layout.check_mixers`` refuses, and shapes that a shared part cannot have; builds nothing."""
    check_mixers(model, parallel)
    for part in shared_parts(model):
        part.check(model)
