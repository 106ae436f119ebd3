"""The options of the mixers, ``[model.mixer_options.NAME]``, and the shapes that some cannot have.

Configurations are read without torch, so this module must not import it: the table in ``lightscale.config.mixers``
names what is here by import strings.
"""

from lightscale.config.schema import ModelConfig, Section, Width
from lightscale.errors import UserError


class GatedMixerOptions(Section):
    """The options of every ``GatedMixer``."""

    gate_rank: Width | None = None
    """Inner width of the low-rank output gate, in channels; none: head_dim."""


def check_rotary(model: ModelConfig) -> None:
    """Rotary positions turn channels in pairs: head_dim must be even."""
    if model.head_dim % 2:
        raise UserError(
            f"model.hidden_size = {model.hidden_size} and model.num_heads = {model.num_heads} give llama heads of "
            f"{model.head_dim} channels, but it rotates channels in pairs; use an even number, such as "
            f"model.hidden_size = {(model.head_dim + 1) * model.num_heads}"
        )
