"""A mixer that another package brings, with an option, shared parts and an operator of its own.

This module, ``options`` and ``spec`` are imported where configurations are read and runs planned: none imports torch.
"""

from lightscale.config.mixers import MixerEntry

ENTRY = MixerEntry(
    cls="toy_mixer.layer:Toy",
    spec="toy_mixer.spec:ToySpec",
    options="toy_mixer.options:ToyOptions",
    axes=frozenset({"tensor", "pipeline", "data"}),
)
