"""A mixer that another package brings, with an option, shared parts and an operator of its own.

This module and ``options`` are imported where configurations are read: neither imports torch.
"""

from lightscale.config.mixers import MixerEntry

ENTRY = MixerEntry(
    cls="toy_mixer.layer:Toy",
    options="toy_mixer.options:ToyOptions",
    axes=frozenset({"tensor", "pipeline", "data"}),
)
