"""cosFormer2's token mixer; see ``mixers/cosformer2.py``."""

from typing import ClassVar

from lightscale.config.model import ModelConfig
from lightscale.models.specs.gated import GatedMixerSpec, gated_projection_flops
from lightscale.models.specs.interface import ParameterRows, PartSpec, Shapes, chunked_flops
from lightscale.models.specs.tpe import TPESpec


class CosFormer2Spec(GatedMixerSpec):
    """Every layer rotates queries and keys, which doubles their width."""

    operator = "lightning"

    shared: ClassVar[tuple[type[PartSpec], ...]] = (TPESpec,)

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, gate, and attention in chunks."""
        key_width = 2 * model.head_dim
        attention = chunked_flops(
            model, sequence_length, operator=CosFormer2Spec.operator, key_width=key_width, axes=model.axes
        )
        return gated_projection_flops(model, layer) + attention

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Those of the gated mixer, and the angles."""
        return {**GatedMixerSpec.parameter_shapes(model, layer), "lrpe.theta": (model.num_heads, model.head_dim)}

    @staticmethod
    def roles(model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """Those of the gated mixer, and the angles."""
        return {**GatedMixerSpec.roles(model, layer), "angles": ParameterRows(parameter="lrpe.theta")}

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """A state, and a flag per head and axis, forward; a state's cotangent backward."""
        state = 2 * model.hidden_size * model.head_dim
        return state + model.num_heads * model.axes, state

    @staticmethod
    def more_kept_values(model: ModelConfig, layer: int) -> int:
        """Values and outputs of further axes."""
        return 2 * model.hidden_size * (model.axes - 1)
