"""LLaMA's token mixer; see ``mixers/llama.py``."""

from lightscale.config.schema import ModelConfig
from lightscale.models.specs.interface import MixerSpec, Shapes, projection_flops


class LLaMASpec(MixerSpec):
    """Its state, all keys and values, grows: no state of constant size is exchanged."""

    operator = "SDPA"

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, and two products with half of the other tokens on average."""
        return projection_flops(model) + 2 * model.hidden_size * sequence_length

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Projections."""
        d = model.hidden_size
        return {"kv_proj.weight": (2 * d, d), "q_proj.weight": (d, d), "out_proj.weight": (d, d)}
