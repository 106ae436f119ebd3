"""Common base of the mixers with a low-rank output gate."""

from math import prod
from typing import ClassVar

from lightscale.config.model import ModelConfig
from lightscale.models.specs.interface import MixerSpec, ParameterRows, Shapes, rows_by_head
from lightscale.models.specs.options import GatedMixerOptions, LightNetOptions, LowRankGateOptions


class GatedMixerSpec(MixerSpec):
    """A ``GatedMixer``. Its options are ``GatedMixerOptions``, or a subclass."""

    whole_on_tensor_ranks: ClassVar[frozenset[str]] = frozenset({"gate_down.weight"})

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Projections and gate."""
        d, rank, options = model.hidden_size, gate_rank(model, layer), gated_options(model, layer)
        low_rank: Shapes = {"gate_down.weight": (rank, d), "gate_up.weight": (d, rank)}
        return {
            "kv_proj.weight": (2 * d, d),
            "q_proj.weight": (d, d),
            **({"gate_proj.weight": (d, d)} if has_full_rank_gate(options) else low_rank),
            **({"out_proj.weight": (d, d)} if options.output_projection else {}),
        }

    @staticmethod
    def roles(model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """Keys and values stand in one matrix. A gate of full rank has a role that no other has."""
        found = {
            "q": ParameterRows(parameter="q_proj.weight"),
            "k": rows_by_head("kv_proj.weight", 0, model.num_heads, model.head_dim),
            "v": rows_by_head("kv_proj.weight", 1, model.num_heads, model.head_dim),
            "o": ParameterRows(parameter="out_proj.weight"),
            "gate_down": ParameterRows(parameter="gate_down.weight"),
            "gate_up": ParameterRows(parameter="gate_up.weight"),
            "gate": ParameterRows(parameter="gate_proj.weight"),
        }
        shapes = GatedMixerSpec.parameter_shapes(model, layer)
        return {role: rows for role, rows in found.items() if rows.parameter in shapes}


def gated_options(model: ModelConfig, layer: int) -> GatedMixerOptions:
    """Those of layer ``layer`` (from 0), whose mixer is a ``GatedMixer``."""
    options = model.layer_options(layer)
    assert isinstance(options, GatedMixerOptions), f"{model.layers[layer]} is not a gated mixer"
    return options


def has_full_rank_gate(options: GatedMixerOptions) -> bool:
    """Whether the gate is one matrix."""
    return isinstance(options, LightNetOptions) and options.full_rank_gate


def gate_rank(model: ModelConfig, layer: int) -> int:
    """Inner width of the low-rank gate of layer ``layer`` (from 0), whose mixer has one."""
    options = model.layer_options(layer)
    assert isinstance(options, LowRankGateOptions), f"the options of {model.layers[layer]} have no gate_rank"
    return options.gate_rank or model.head_dim


def gated_projection_flops(model: ModelConfig, layer: int) -> float:
    """Operations of the projections and the gate of one mixer's forward pass, per token."""
    return sum(2 * prod(shape) for shape in GatedMixerSpec.parameter_shapes(model, layer).values())
