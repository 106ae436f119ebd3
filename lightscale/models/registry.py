"""The token mixers by name. A new architecture is one file, one line here, one kernel folder, one configuration."""

import difflib

from lightscale.config.schema import ModelConfig, ParallelConfig
from lightscale.errors import UserError
from lightscale.models.mixers.cosformer2 import CosFormer2
from lightscale.models.mixers.hgrn2 import HGRN2
from lightscale.models.mixers.interface import Mixer
from lightscale.models.mixers.lightnet import LightNet
from lightscale.models.mixers.llama import LLaMA
from lightscale.models.mixers.tnl import TNL

MIXERS: dict[str, type[Mixer]] = {
    "tnl": TNL,
    "hgrn2": HGRN2,
    "cosformer2": CosFormer2,
    "lightnet": LightNet,
    "llama": LLaMA,
}


def mixer_class(name: str) -> type[Mixer]:
    """The mixer called ``name``; UserError with the nearest known names otherwise."""
    if name not in MIXERS:
        near = difflib.get_close_matches(name, MIXERS, n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(f"model.mixer = {name!r}: no such mixer; {hint}known: {', '.join(sorted(MIXERS))}")
    return MIXERS[name]


def shared_parts(model: ModelConfig) -> frozenset[str]:
    """What the model holds once because one of its mixers needs it: see ``Mixer.shared``."""
    return frozenset().union(*(mixer_class(name).shared for name in model.layers))


def check_mixers(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse unknown mixers, shapes that one cannot have, and axes that a layer cannot be split on; builds nothing."""
    for layer, name in enumerate(model.layers):
        mixer = mixer_class(name)
        mixer.check(model)
        for axis in ("tensor", "pipeline", "sequence"):
            degree = getattr(parallel, axis)
            if degree > 1 and axis not in mixer.axes:
                able = ", ".join(sorted(mixer.axes - {"data"})) or "none"
                raise UserError(
                    f"parallel.{axis} = {degree}: layer {layer} ({name}) cannot be split along {axis} yet; "
                    f"parallel.{axis} = 1 would work, with more data ranks or another axis of: {able}"
                )
