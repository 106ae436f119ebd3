"""CausalRN's and BiRN's token mixers; see ``mixers/relation.py``."""

from math import prod
from typing import ClassVar, Literal

from lightscale.config.model import ModelConfig
from lightscale.errors import UserError
from lightscale.models.specs.interface import MixerSpec, ParameterRows, PartSpec, Shapes
from lightscale.models.specs.options import CausalRNOptions, RelationOptions
from lightscale.models.specs.positions import LearnedPositionsSpec

MOST_EXP_WIDTH = 6000
"""Channels of a normalised pair whose exponential, up to e^sqrt(D), may be added up in fp32."""


class CausalRNSpec(MixerSpec):
    """Three projections; the linear form has a state of one number per hidden channel."""

    operator = "log_sum"
    activated = 0
    whole_on_tensor_ranks: ClassVar[frozenset[str]] = frozenset({"out_proj.bias"})

    @classmethod
    def layer_operator(cls, model: ModelConfig, layer: int) -> str:
        """By the form, and over whole documents another."""
        if relation_options(model, layer).form == "quadratic":
            return "relation"
        return "log_sum" if model.direction(layer) == "causal" else "log_sum_whole"

    @classmethod
    def shared_parts(cls, model: ModelConfig, layer: int) -> tuple[type[PartSpec], ...]:
        """Learned positions where the options have them."""
        return () if relation_options(model, layer).positions is None else (LearnedPositionsSpec,)

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Of both sides of a pair, and of the output."""
        d, width = model.hidden_size, hidden_width(model, layer)
        return {
            "b_proj.weight": (width, d),
            "a_proj.weight": (width, d),
            "a_proj.bias": (width,),
            "out_proj.weight": (d, width),
            "out_proj.bias": (d,),
        }

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections; of the quadratic form also the product for the norm's statistics, and the sum over pairs."""
        shapes = CausalRNSpec.parameter_shapes(model, layer)
        projections = sum(2 * prod(shape) for name, shape in shapes.items() if name.endswith(".weight"))
        options = relation_options(model, layer)
        if options.form == "linear":
            return projections
        seen = sequence_length / 2 if model.direction(layer) == "causal" else sequence_length
        products = 2 if pre_norm(options) == "exact" else 1
        return projections + 2 * products * hidden_width(model, layer) * seen

    @staticmethod
    def norms_output(model: ModelConfig, layer: int) -> bool:
        """The post-reduction norm."""
        return post_norm(relation_options(model, layer))

    @staticmethod
    def kept_values(model: ModelConfig, layer: int) -> int:
        """The input of the output projection; of the quadratic form also both sides."""
        return (1 if relation_options(model, layer).form == "linear" else 3) * hidden_width(model, layer)

    @staticmethod
    def fp32_values(model: ModelConfig, layer: int) -> int:
        """Of the linear form logarithms: the sides before their norm, one of them behind it, running sums (those
        of documents are few), exponentials, and these without their mean; of the quadratic form the last alone.
        """
        linear = 6 if model.direction(layer) == "causal" else 5
        return (linear if relation_options(model, layer).form == "linear" else 1) * hidden_width(model, layer)

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """z and a flag forward, its cotangent backward; over whole documents those of either side."""
        if relation_options(model, layer).form == "quadratic":
            return 0, 0
        width = hidden_width(model, layer)
        return (width + 1, width) if model.direction(layer) == "causal" else (2 * width + 1, 2 * width)

    @staticmethod
    def state_heads(model: ModelConfig, layer: int) -> int:
        """Every channel is a separate state."""
        return hidden_width(model, layer)

    @staticmethod
    def roles(model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """Two sides of a pair, each with its matrix; outputs as in all mixers."""
        names = {"a": "a_proj.weight", "a_bias": "a_proj.bias", "b": "b_proj.weight"}
        names |= {"o": "out_proj.weight", "o_bias": "out_proj.bias"}
        return {role: ParameterRows(parameter=name) for role, name in names.items()}

    @staticmethod
    def gathered_values(model: ModelConfig, layer: int) -> int:
        """All hidden channels of the side that is read."""
        return hidden_width(model, layer)


class BiRNSpec(CausalRNSpec):
    """The same over whole documents."""

    operator = "log_sum_whole"


def relation_options(model: ModelConfig, layer: int) -> RelationOptions:
    """Those of layer ``layer`` (from 0), whose mixer is CausalRN or BiRN."""
    options = model.layer_options(layer)
    assert isinstance(options, RelationOptions), type(options)
    return options


def hidden_width(model: ModelConfig, layer: int) -> int:
    """Hidden channels of the perceptron of layer ``layer`` (from 0)."""
    return relation_options(model, layer).expansion * model.hidden_size


def pre_norm(options: RelationOptions) -> Literal["exact", "approximate", "off"]:
    """The norm before the activation, "auto" resolved."""
    if options.pre_norm != "auto":
        return options.pre_norm
    return "approximate" if options.form == "linear" else "exact"


def post_norm(options: RelationOptions) -> bool:
    """Whether there is a norm behind the sum; BiRN always has it."""
    return not isinstance(options, CausalRNOptions) or options.post_norm


def check_relation(model: ModelConfig) -> None:
    """exp of a normalised pair fits fp32."""
    for layer, name in enumerate(model.layers):
        options = model.layer_options(layer)
        if not isinstance(options, RelationOptions) or options.form == "linear" or options.activation != "exp":
            continue
        width = hidden_width(model, layer)
        if width > MOST_EXP_WIDTH:
            raise UserError(
                f"model.mixer_options.{name}.expansion = {options.expansion} and model.hidden_size = "
                f'{model.hidden_size} give {width} hidden channels; with form = "quadratic" and activation = "exp" use '
                f"at most {MOST_EXP_WIDTH}, or fp32 may overflow"
            )
