"""What the mixers with a low-rank output gate have in common."""

from typing import ClassVar

from lightscale.config.model import ModelConfig
from lightscale.models.specs.interface import MixerSpec, ParameterRows, Shapes, projection_flops, rows_by_head
from lightscale.models.specs.options import GatedMixerOptions


class GatedMixerSpec(MixerSpec):
    """A ``GatedMixer``. Its options are ``GatedMixerOptions``, or a subclass."""

    whole_on_tensor_ranks: ClassVar[frozenset[str]] = frozenset({"gate_down.weight"})

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Projections and gate."""
        d, rank = model.hidden_size, gate_rank(model, layer)
        return {
            "kv_proj.weight": (2 * d, d),
            "q_proj.weight": (d, d),
            "gate_down.weight": (rank, d),
            "gate_up.weight": (d, rank),
            "out_proj.weight": (d, d),
        }

    @staticmethod
    def roles(model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """Keys and values stand in one matrix."""
        return {
            "q": ParameterRows(parameter="q_proj.weight"),
            "k": rows_by_head("kv_proj.weight", 0, model.num_heads, model.head_dim),
            "v": rows_by_head("kv_proj.weight", 1, model.num_heads, model.head_dim),
            "o": ParameterRows(parameter="out_proj.weight"),
            "gate_down": ParameterRows(parameter="gate_down.weight"),
            "gate_up": ParameterRows(parameter="gate_up.weight"),
        }


def gate_rank(model: ModelConfig, layer: int) -> int:
    """Inner width of the low-rank gate of layer ``layer`` (from 0), whose mixer is a ``GatedMixer``."""
    options = model.layer_options(layer)
    assert isinstance(options, GatedMixerOptions), f"the options of {model.layers[layer]} have no gate_rank"
    return options.gate_rank or model.head_dim


def gated_projection_flops(model: ModelConfig, layer: int) -> float:
    """Operations of the projections and the gate of one mixer's forward pass, per token."""
    return projection_flops(model) + 2 * 2 * model.hidden_size * gate_rank(model, layer)
