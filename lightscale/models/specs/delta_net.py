"""DeltaNet, gated DeltaNet and Kimi Delta Attention; see ``mixers/delta_net.py``. Their options too."""

from dataclasses import dataclass
from math import prod
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lightscale.config.arithmetic import near_multiple
from lightscale.config.model import ModelConfig
from lightscale.config.section import Positive, Section, Width
from lightscale.errors import UserError
from lightscale.kernels.operators import get_operator
from lightscale.models.specs.gated import gate_rank
from lightscale.models.specs.interface import MixerSpec, ParameterRows, Shapes
from lightscale.models.specs.options import LowRankGateOptions


class DeltaNetOptions(Section):
    """The options of every mixer of the delta rule; the defaults are DeltaNet's."""

    key_head_dim: Width | None = None
    """Width of the model.num_heads heads of queries and keys; none: head_dim."""
    num_value_heads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Heads of values, decays and states, a multiple of model.num_heads; none: model.num_heads."""
    value_head_dim: Width | None = None
    """Width of a head of values; none: head_dim."""
    negative_eigenvalues: bool = False
    """Allow β up to 2, so a state can change its sign (arXiv 2411.12537), as in OLMo-Hybrid; false: up to 1."""
    short_convolution: Annotated[int, Field(ge=0, le=64)] = 4
    """Width in tokens of the convolution before queries, keys and values; 0: none. SiLU follows in both cases."""
    output_norm_eps: Positive = 1e-5
    """Added to the mean square in the norm of each head's output."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.short_convolution == 1:
            raise ValueError("short_convolution = 1 covers only the token itself; use at least 2, or 0 for none")
        return self


class KimiDeltaOptions(DeltaNetOptions, LowRankGateOptions):
    """The options of Kimi Delta Attention."""

    gate_rank: Width | None = None
    """Inner width of the matrices to decays and to the output's gate, in channels; none: head_dim."""


class DeltaNetSpec(MixerSpec):
    """No decay, no gate on the output."""

    operator = "delta_rule"
    decay: ClassVar[Literal["none", "head", "channel"]] = "none"
    gate: ClassVar[Literal["none", "silu", "sigmoid"]] = "none"
    """Activation of the output gate."""
    whole_on_tensor_ranks = frozenset({"output_norm.weight"})

    @classmethod
    def parameter_shapes(cls, model: ModelConfig, layer: int) -> Shapes:
        """Projections, convolutions, and the norm that all heads share; decays and gate where there are any."""
        s, d = delta_sizes(model, layer), model.hidden_size
        shapes: Shapes = {
            "kv_proj.weight": (cls._kv_rows(s), d),
            "q_proj.weight": (cls._q_rows(s), d),
            "output_norm.weight": (s.value_width,),
            "out_proj.weight": (d, s.values),
        }
        if s.convolution:
            shapes |= {
                "kv_conv.weight": (s.keys + s.values, s.convolution),
                "q_conv.weight": (s.keys, s.convolution),
            }
        if cls.decay != "none":
            of_channels = (s.key_width,) if cls.decay == "channel" else ()
            shapes |= {"decay.A_log": (s.value_heads,), "step.dt_bias": (s.value_heads, *of_channels)}
        if cls.decay == "channel":
            rank = gate_rank(model, layer)
            shapes |= {
                "forget_down.weight": (rank, d),
                "forget_up.weight": (s.value_heads * s.key_width, rank),
                "gate_down.weight": (rank, d),
                "gate_up.weight": (s.values, rank),
            }
        return shapes

    @classmethod
    def _kv_rows(cls, s: "DeltaSizes") -> int:
        """Keys, values, β, and a decay per head."""
        return s.keys + s.values + s.value_heads * (2 if cls.decay == "head" else 1)

    @classmethod
    def _q_rows(cls, s: "DeltaSizes") -> int:
        """Queries, and a gate of full rank."""
        return s.keys + (s.values if cls.gate == "silu" else 0)

    @classmethod
    def roles(cls, model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """Rows are ordered by heads of keys: written tensors (k, v, β, decays) together, and q with the gate."""
        s = delta_sizes(model, layer)
        of_values = [("v", s.groups * s.value_width), ("beta", s.groups)]
        written = [("k", s.key_width), *of_values, *([("forget", s.groups)] if cls.decay == "head" else [])]
        reads = [("q", s.key_width), *([("gate", s.groups * s.value_width)] if cls.gate == "silu" else [])]
        convolved = [("k_conv", s.key_width), ("v_conv", s.groups * s.value_width)]
        found = {
            **_by_head("kv_proj.weight", written, s.heads),
            **_by_head("q_proj.weight", reads, s.heads),
            **_by_head("kv_conv.weight", convolved, s.heads),
            "q_conv": ParameterRows(parameter="q_conv.weight"),
            "o": ParameterRows(parameter="out_proj.weight"),
            "output_norm": ParameterRows(parameter="output_norm.weight"),
            "A_log": ParameterRows(parameter="decay.A_log"),
            "dt_bias": ParameterRows(parameter="step.dt_bias"),
            **{name: ParameterRows(parameter=f"{name}.weight") for name in _LOW_RANK},
        }
        shapes = cls.parameter_shapes(model, layer)
        return {role: rows for role, rows in found.items() if rows.parameter in shapes}

    @classmethod
    def forward_flops_per_token(cls, model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections and convolutions; per head of values, in chunks of C, 2 C (3 k + 2 v) + C² inside, 6 k v with the
        state: scores of queries and keys, the inverse and its products with both, outputs; read twice, written once."""
        s = delta_sizes(model, layer)
        shapes = cls.parameter_shapes(model, layer)
        projections = sum(2 * prod(shape) for name, shape in shapes.items() if name.endswith(_PRODUCTS))
        chunk = min(get_operator(cls.operator).chunk_size, sequence_length)
        k, v = s.key_width, s.value_width
        return projections + s.value_heads * (2 * chunk * (3 * k + 2 * v) + chunk**2 + 6 * k * v)

    @staticmethod
    def norms_output(model: ModelConfig, layer: int) -> bool:
        """Of each head: no tensor rank needs another for it."""
        return False

    @classmethod
    def kept_values(cls, model: ModelConfig, layer: int) -> int | None:
        """Queries, keys and values before and behind the convolution, those of unit length and values once more, the
        output, that behind norm and gate, and the gate."""
        s = delta_sizes(model, layer)
        gate = 0 if cls.gate == "none" else s.values
        ranks = 2 * gate_rank(model, layer) if cls.decay == "channel" else 0
        return 6 * s.keys + 5 * s.values + gate + ranks

    @classmethod
    def fp32_values(cls, model: ModelConfig, layer: int) -> int:
        """β, log decays and their inputs, and the divisors of the norms of queries, keys and outputs."""
        s = delta_sizes(model, layer)
        decays = {"none": 0, "head": 3, "channel": 3 * s.key_width}[cls.decay]
        return s.value_heads * (2 + decays) + 2 * s.heads

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """A state and the matrix by which a segment acts on it forward, a state's cotangent backward."""
        s = delta_sizes(model, layer)
        state = s.value_heads * s.key_width * s.value_width
        return state + s.value_heads * s.key_width**2, state

    @staticmethod
    def state_heads(model: ModelConfig, layer: int) -> int:
        """Those of values."""
        return delta_sizes(model, layer).value_heads

    @staticmethod
    def tail_values(model: ModelConfig, layer: int) -> int:
        """Queries, keys and values of the tokens that the convolution looks back."""
        s = delta_sizes(model, layer)
        return max(0, s.convolution - 1) * (2 * s.keys + s.values)


class GatedDeltaNetSpec(DeltaNetSpec):
    """A decay per head; the output times silu of a gate of full rank."""

    decay = "head"
    gate = "silu"


class KimiDeltaSpec(DeltaNetSpec):
    """A decay per channel; the output times the sigmoid of a gate; both of low rank."""

    decay = "channel"
    gate = "sigmoid"
    whole_on_tensor_ranks = frozenset({"output_norm.weight", "forget_down.weight", "gate_down.weight"})


_LOW_RANK = ("forget_down", "forget_up", "gate_down", "gate_up")
_PRODUCTS = ("_proj.weight", "_conv.weight", *(f"{name}.weight" for name in _LOW_RANK))


@dataclass(frozen=True, kw_only=True)
class DeltaSizes:
    """Sizes of a layer of the delta rule."""

    heads: int
    """Of queries and keys."""
    key_width: int
    value_heads: int
    value_width: int
    convolution: int
    """Tokens that it sees; 0 where there is none."""

    @property
    def groups(self) -> int:
        """Heads of values for each of keys."""
        return self.value_heads // self.heads

    @property
    def keys(self) -> int:
        """Channels of all heads of keys."""
        return self.heads * self.key_width

    @property
    def values(self) -> int:
        """Channels of all heads of values."""
        return self.value_heads * self.value_width


def delta_options(model: ModelConfig, layer: int) -> DeltaNetOptions:
    """Those of layer ``layer`` (from 0)."""
    options = model.layer_options(layer)
    assert isinstance(options, DeltaNetOptions), type(options)
    return options


def delta_sizes(model: ModelConfig, layer: int) -> DeltaSizes:
    """Those of layer ``layer`` (from 0)."""
    options = delta_options(model, layer)
    return DeltaSizes(
        heads=model.num_heads,
        key_width=options.key_head_dim or model.head_dim,
        value_heads=options.num_value_heads or model.num_heads,
        value_width=options.value_head_dim or model.head_dim,
        convolution=options.short_convolution,
    )


def check_delta_net(model: ModelConfig) -> None:
    """Heads of values share out those of keys."""
    for layer, name in enumerate(model.layers):
        options = model.layer_options(layer)
        if not isinstance(options, DeltaNetOptions) or options.num_value_heads is None:
            continue
        if options.num_value_heads % model.num_heads:
            raise UserError(
                f"model.mixer_options.{name}.num_value_heads = {options.num_value_heads} is not a multiple of "
                f"model.num_heads = {model.num_heads}; use {near_multiple(options.num_value_heads, model.num_heads)}"
            )


def _by_head(parameter: str, parts: list[tuple[str, int]], heads: int) -> dict[str, ParameterRows]:
    """Of matrices whose rows stand in ``parameter`` head by head, each of so many rows a head."""
    found, rows, first = {}, sum(size for _, size in parts), 0
    for role, size in parts:
        starts = [head * rows + first for head in range(heads)]
        ranges = tuple((start, start + size) for start in starts)
        found[role] = ParameterRows(parameter=parameter, ranges=ranges if len(parts) > 1 else None)
        first += size
    return found
