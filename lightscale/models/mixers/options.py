"""The options of the mixers, ``[model.mixer_options.NAME]``.

Configurations are read without torch, so this module must not import it: the table in ``lightscale.config.mixers``
names these types by import strings.
"""

from lightscale.config.schema import Count, Section


class GatedMixerOptions(Section):
    """What every ``GatedMixer`` can be told."""

    gate_rank: Count | None = None
    """Inner width of the low-rank output gate, in channels; none: head_dim."""
