"""LightNet's token mixer; see ``mixers/lightnet.py``."""

from typing import ClassVar

from lightscale.config.model import ModelConfig
from lightscale.models.specs.gated import GatedMixerSpec, gated_projection_flops
from lightscale.models.specs.interface import PartSpec, chunked_flops
from lightscale.models.specs.tpe import TPESpec


class LightNetSpec(GatedMixerSpec):
    """Every layer rotates queries and keys by fixed angles, which doubles their width."""

    operator = "lightnet"
    activated = 1
    """Queries: the operator takes keys as they are projected."""

    shared: ClassVar[tuple[type[PartSpec], ...]] = (TPESpec,)

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, gate, and attention in chunks."""
        key_width = 2 * model.head_dim
        attention = chunked_flops(model, sequence_length, operator=LightNetSpec.operator, key_width=key_width)
        return gated_projection_flops(model, layer) + attention

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """z, S and a flag forward, their cotangents backward; both halves of S share z."""
        values = model.hidden_size * (2 * model.head_dim + 1)
        return values + 1, values
