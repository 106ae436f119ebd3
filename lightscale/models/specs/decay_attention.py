"""Attention with a scalar decay per head; see ``mixers/decay_attention.py``. Its options too."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lightscale.config.model import ModelConfig
from lightscale.config.section import Fraction, PositiveOrZero
from lightscale.errors import UserError
from lightscale.kernels.operators import get_operator
from lightscale.models.specs.gated import gate_rank
from lightscale.models.specs.interface import MixerSpec, ParameterRows, Shapes, projection_flops, rows_by_head
from lightscale.models.specs.options import LowRankGateOptions

_NAME = "decay-attention"


class DecayAttentionOptions(LowRankGateOptions):
    """The options of attention with a scalar decay; the defaults are those of causal LION-S."""

    decay: Literal["sigmoid", "softplus", "learned", "fixed", "none"] = "sigmoid"
    """Per head and token, from the input: sigmoid (LION-S), softplus (Mamba-2); per head: learned, fixed (RetNet's)."""
    initial_decay: Fraction = 0.5
    """Initial value of sigmoid decays, between 0 and 1; 0.5 in the code of LION's authors."""
    input_gate: bool = False
    """Multiply keys by the input gate of their token: 1 - decay (sigmoid, Gated RFA), the step (softplus, Mamba-2)."""
    feature_map: Literal["elu", "shifted_silu", "silu", "none"] = "shifted_silu"
    """Feature map of queries and keys: elu(x) + 1; (silu(x) + 1/2) over its 2-norm (LION's silu); silu(x); identity."""
    scale: bool = True
    """Divide outputs by the sum of their scores."""
    eps: PositiveOrZero = 1e-6
    """Added to that sum."""
    positions: Literal["none", "rope", "lrpe"] = "none"
    """Positions in queries and keys: rope, fixed angles, as in RetNet; lrpe, learned angles, with a state twice as
    wide.
    """
    short_convolution: Annotated[int, Field(ge=0, le=64)] = 0
    """Width in tokens of the convolution before queries, keys and values, followed by silu; 0: none. Mamba-2 uses 4."""
    output: Literal["plain", "norm", "gated"] = "plain"
    """Before the output projection: nothing, an RMS norm over all heads, or norm and a low-rank gate."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scale and self.feature_map in ("silu", "none"):
            raise ValueError(
                f'feature_map = "{self.feature_map}" with scale = true divides by sums that may be 0 or negative; use '
                'scale = false, or feature_map = "shifted_silu" or "elu"'
            )
        if self.scale and self.positions != "none":
            raise ValueError(
                f'positions = "{self.positions}" with scale = true divides by sums that may be 0 or negative, because '
                'rotated scores have any sign; use scale = false, or positions = "none"'
            )
        if self.input_gate and self.decay not in ("sigmoid", "softplus"):
            raise ValueError(
                f'input_gate = true needs a decay from the input, not decay = "{self.decay}"; use decay = "sigmoid" or '
                '"softplus", or input_gate = false'
            )
        if self.initial_decay == 0:
            raise ValueError("initial_decay = 0.0: a sigmoid is never 0; use 0.5, or a value above 0")
        if self.short_convolution == 1:
            raise ValueError("short_convolution = 1 covers only the token itself; use at least 2, or 0 for none")
        if self.gate_rank is not None and self.output != "gated":
            raise ValueError(f'gate_rank = {self.gate_rank} needs output = "gated", not "{self.output}"')
        return self


def decay_attention_options(model: ModelConfig, layer: int) -> DecayAttentionOptions:
    """Those of layer ``layer`` (from 0)."""
    options = model.layer_options(layer)
    assert isinstance(options, DecayAttentionOptions), type(options)
    return options


def check_decay_attention(model: ModelConfig) -> None:
    """Rotary positions turn channels in pairs."""
    positions = decay_attention_options(model, model.layers.index(_NAME)).positions
    if positions == "rope" and model.head_dim % 2:
        raise UserError(
            f'model.mixer_options.{_NAME}.positions = "rope" rotates channels in pairs, but model.hidden_size = '
            f"{model.hidden_size} and model.num_heads = {model.num_heads} give heads of {model.head_dim}; use an even "
            f'number, such as model.hidden_size = {(model.head_dim + 1) * model.num_heads}, or positions = "lrpe"'
        )


class DecayAttentionSpec(MixerSpec):
    """Four projections; decays, gate, convolution and angles by option."""

    operator = "lightning"
    other_operators = ("heads",)
    whole_on_tensor_ranks = frozenset({"gate_down.weight"})

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Projections, and the parts that options add."""
        own, d, h = decay_attention_options(model, layer), model.hidden_size, model.num_heads
        shapes: Shapes = {"kv_proj.weight": (2 * d, d), "q_proj.weight": (d, d), "out_proj.weight": (d, d)}
        if own.decay in ("sigmoid", "softplus"):
            shapes |= {"forget_proj.weight": (h, d), "forget_proj.bias": (h,)}
        if own.decay in ("softplus", "learned"):
            shapes |= {"decay.log_rate": (h,)} if own.decay == "softplus" else {"decay.logit": (h,)}
        if own.output == "gated":
            rank = gate_rank(model, layer)
            shapes |= {"gate_down.weight": (rank, d), "gate_up.weight": (d, rank)}
        if own.short_convolution:
            shapes |= {"kv_conv.weight": (2 * d, own.short_convolution), "q_conv.weight": (d, own.short_convolution)}
        return shapes | ({"lrpe.theta": (h, model.head_dim)} if own.positions == "lrpe" else {})

    @staticmethod
    def roles(model: ModelConfig, layer: int) -> dict[str, ParameterRows]:
        """Keys and values stand in one matrix, and in one convolution."""
        h, k = model.num_heads, model.head_dim
        found = {
            "q": ParameterRows(parameter="q_proj.weight"),
            "k": rows_by_head("kv_proj.weight", 0, h, k),
            "v": rows_by_head("kv_proj.weight", 1, h, k),
            "o": ParameterRows(parameter="out_proj.weight"),
            "q_conv": ParameterRows(parameter="q_conv.weight"),
            "k_conv": rows_by_head("kv_conv.weight", 0, h, k),
            "v_conv": rows_by_head("kv_conv.weight", 1, h, k),
            **{role: ParameterRows(parameter=name) for role, name in _WHOLE_ROLES.items()},
        }
        shapes = DecayAttentionSpec.parameter_shapes(model, layer)
        return {role: rows for role, rows in found.items() if rows.parameter in shapes}

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, gate, convolution; 2 C (k + w) in the chunk, 4 k w with the state, w with the sums' column."""
        key, value = key_and_value_width(model, layer)
        groups = key_groups(model, layer)
        chunk = min(get_operator(DecayAttentionSpec.operator).chunk_size, sequence_length)
        shapes = DecayAttentionSpec.parameter_shapes(model, layer)
        others = sum(
            2 * shape[0] * shape[1]
            for name, shape in shapes.items()
            if name.endswith(".weight") and not name.startswith(("kv_proj.", "q_proj.", "out_proj."))
        )
        return (
            projection_flops(model) + others + model.num_heads * (2 * chunk * (key + groups * value) + 4 * key * value)
        )

    @staticmethod
    def norms_output(model: ModelConfig, layer: int) -> bool:
        """Whether a norm follows the operator, by ``output``."""
        return decay_attention_options(model, layer).output != "plain"

    @staticmethod
    def fp32_values(model: ModelConfig, layer: int) -> int:
        """Log decays of tokens, and their inputs."""
        return 3 * model.num_heads * (decay_attention_options(model, layer).decay in ("sigmoid", "softplus"))

    @staticmethod
    def more_kept_values(model: ModelConfig, layer: int) -> int:
        """Values and outputs with the column of sums, and those of further axes."""
        of_sums = 2 * (model.hidden_size + model.num_heads) * decay_attention_options(model, layer).scale
        return of_sums + 2 * model.hidden_size * (key_groups(model, layer) - 1)

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """A state and a decay per head and axis forward, a state's cotangent backward."""
        key, value = key_and_value_width(model, layer)
        return model.num_heads * (key * value + key_groups(model, layer)), model.num_heads * key * value

    @staticmethod
    def tail_values(model: ModelConfig, layer: int) -> int:
        """Queries, keys and values of the tokens that the convolution looks back."""
        return max(0, decay_attention_options(model, layer).short_convolution - 1) * 3 * model.hidden_size


_WHOLE_ROLES = {
    "forget": "forget_proj.weight",
    "forget_bias": "forget_proj.bias",
    "decay_logit": "decay.logit",
    "log_rate": "decay.log_rate",
    "gate_down": "gate_down.weight",
    "gate_up": "gate_up.weight",
    "angles": "lrpe.theta",
}


def key_groups(model: ModelConfig, layer: int) -> int:
    """States of a head: lrpe has one for each axis, with its part of the rows."""
    return model.axes if decay_attention_options(model, layer).positions == "lrpe" else 1


def key_and_value_width(model: ModelConfig, layer: int) -> tuple[int, int]:
    """Rows and columns of a head's state: doubled by lrpe, and with a column for the sum of the scores."""
    own = decay_attention_options(model, layer)
    return model.head_dim * (2 if own.positions == "lrpe" else 1), model.head_dim + own.scale
