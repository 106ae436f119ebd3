"""TransNormerLLM's token mixer; see ``mixers/tnl.py``."""

from lightscale.config.model import ModelConfig
from lightscale.models.specs.gated import GatedMixerSpec, gated_projection_flops
from lightscale.models.specs.interface import ParameterRows, Shapes, chunked_flops


class TNLSpec(GatedMixerSpec):
    """The first layer rotates queries and keys by learned angles, which doubles their width."""

    operator = "lightning"

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, gate, and attention in chunks."""
        chunks = chunked_flops(model, sequence_length, operator=TNLSpec.operator, key_width=_key_width(model, layer))
        return gated_projection_flops(model, layer) + chunks

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Those of the gated mixer, and the first layer's angles."""
        shapes = GatedMixerSpec.parameter_shapes(model, layer)
        return {**shapes, "lrpe.theta": (model.num_heads, model.head_dim)} if layer == 0 else shapes

    @staticmethod
    def roles(model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """Those of the gated mixer, and the first layer's angles."""
        roles = GatedMixerSpec.roles(model, layer)
        return {**roles, "angles": ParameterRows(parameter="lrpe.theta")} if layer == 0 else roles

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """A state and a decay per head forward, a state's cotangent backward."""
        state = _key_width(model, layer) * model.head_dim
        return model.num_heads * (state + 1), model.num_heads * state


def _key_width(model: ModelConfig, layer: int) -> int:
    return 2 * model.head_dim if layer == 0 else model.head_dim
