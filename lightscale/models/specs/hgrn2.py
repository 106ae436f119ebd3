"""HGRN2's token mixer and its lower bounds; see ``mixers/hgrn2.py``."""

from math import prod
from typing import ClassVar

from lightscale.config.model import ModelConfig
from lightscale.models.specs.interface import (
    MixerSpec,
    ParameterRows,
    PartParameter,
    PartSpec,
    Shapes,
    StagePartSpec,
    chunked_flops,
    num_scans,
    rows_by_head,
)
from lightscale.models.specs.options import HGRN2Options


class LowerBoundsSpec(StagePartSpec):
    """The table of a model from which the lower bounds of all layers come."""

    name = "lower_bounds"
    implementation = "lightscale.models.mixers.hgrn2:LowerBounds"

    @staticmethod
    def parameters_of(model: ModelConfig) -> dict[str, PartParameter]:
        """One ``table`` (l, d) that all layers read."""
        shape = (model.num_layers, model.hidden_size)
        table = PartParameter(shape=shape, term="lower bounds", split_dim=1, keep_wide=True, weight_decay=False)
        return {"table": table}


class HGRN2Spec(MixerSpec):
    """No gate on the output, no positions."""

    operator = "gla"
    other_operators: ClassVar[tuple[str, ...]] = ("forget_gate", "heads")

    shared: ClassVar[tuple[type[PartSpec], ...]] = (LowerBoundsSpec,)

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, and attention in chunks, of each scan."""
        attention = chunked_flops(model, sequence_length, operator=HGRN2Spec.operator, key_width=model.head_dim)
        attention *= num_scans(model, layer)
        return sum(2 * prod(shape) for shape in HGRN2Spec.parameter_shapes(model, layer).values()) + attention

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Projections; the lower bounds belong to the model."""
        d = model.hidden_size
        shapes: Shapes = {"fv_proj.weight": (2 * d, d), "q_proj.weight": (d, d)}
        return {**shapes, "out_proj.weight": (d, d)} if hgrn2_options(model).output_projection else shapes

    @staticmethod
    def roles(model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """Keys are one minus the decays: no projection is theirs alone."""
        found = {
            "q": ParameterRows(parameter="q_proj.weight"),
            "forget": rows_by_head("fv_proj.weight", 0, model.num_heads, model.head_dim),
            "v": rows_by_head("fv_proj.weight", 1, model.num_heads, model.head_dim),
            "o": ParameterRows(parameter="out_proj.weight"),
        }
        shapes = HGRN2Spec.parameter_shapes(model, layer)
        return {role: rows for role, rows in found.items() if rows.parameter in shapes}

    @staticmethod
    def fp32_values(model: ModelConfig, layer: int) -> int:
        """Log decays."""
        return model.hidden_size

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """A state of each scan and a decay per channel forward, the states' cotangents backward."""
        states = num_scans(model, layer) * model.hidden_size * model.head_dim
        return states + model.hidden_size, states


def hgrn2_options(model: ModelConfig) -> HGRN2Options:
    """Those of a model that has layers of HGRN2."""
    options = model.mixer_options["hgrn2"]
    assert isinstance(options, HGRN2Options), type(options)
    return options
