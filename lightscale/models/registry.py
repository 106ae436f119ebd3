"""The token mixers by name. A new architecture is one file, one line here, one kernel folder, one configuration."""

import difflib

from lightscale.config import ModelConfig
from lightscale.errors import UserError
from lightscale.models.mixer import Mixer
from lightscale.models.tnl import TNL

MIXERS: dict[str, type[Mixer]] = {"tnl": TNL}


def mixer_class(name: str) -> type[Mixer]:
    """The mixer called ``name``; UserError with the nearest known names otherwise."""
    if name not in MIXERS:
        near = difflib.get_close_matches(name, MIXERS, n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UserError(f"model.mixer = {name!r}: no such mixer; {hint}known: {', '.join(sorted(MIXERS))}")
    return MIXERS[name]


def check_mixers(model: ModelConfig) -> None:
    """Refuse unknown mixers before anything is built."""
    for name in model.layers:
        mixer_class(name)
