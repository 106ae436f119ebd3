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

    @classmethod
    def layer_operator(cls, model: ModelConfig, layer: int) -> str:
        """Over whole documents it is another."""
        return cls.operator if model.direction(layer) == "causal" else "lightnet_noncausal"

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, gate, and attention in chunks; over whole documents one product with all and one of all."""
        key_width = 2 * model.head_dim
        if model.direction(layer) != "causal":
            return gated_projection_flops(model, layer) + model.num_heads * 4 * key_width * model.head_dim
        attention = chunked_flops(model, sequence_length, operator=LightNetSpec.operator, key_width=key_width)
        return gated_projection_flops(model, layer) + attention

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """z, S and a flag forward, their cotangents backward; both halves of S share z.

        Over whole documents z and S of either side, and the cotangents of S.
        """
        values = model.hidden_size * (2 * model.head_dim + 1)
        if model.direction(layer) == "causal":
            return values + 1, values
        return 2 * values + 1, 2 * (values - model.hidden_size)

    @staticmethod
    def carried_values(model: ModelConfig, layer: int) -> int:
        """z of either side, whose cotangents are known where the tokens are."""
        return 0 if model.direction(layer) == "causal" else 2 * model.hidden_size
