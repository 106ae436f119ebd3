"""Models that transformers computes with its own classes: the config.json of each, read and written.

A class reads its configuration as a ``Shape``, and writes one for any shape. It computes a shape if the configuration
that it writes reads as the same shape: no list of differences can forget one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from lightscale.config.section import MOST_LAYERS, MOST_SEQUENCE_TOKENS
from lightscale.errors import UserError
from lightscale.exchange.files.config_fields import (
    ACTIVATIONS,
    Exact,
    Known,
    Positive,
    Share,
    Tokens,
    Width,
    shape_of,
    sizes_of,
)
from lightscale.exchange.files.recut import recut
from lightscale.exchange.files.weights import TensorRows, tensor_shapes
from lightscale.exchange.plain.delta_mixer import DeltaForm
from lightscale.exchange.plain.model import SOFTMAX_MIXERS, Shape
from lightscale.exchange.plain.softmax_mixer import Attention, RopeScaling
from lightscale.models.specs.options import RopeScalingOptions, rope_keys
from lightscale.training.checkpoints.directories import WEIGHTS_PREFIX
from lightscale.training.checkpoints.header import Entry
from lightscale.training.checkpoints.schema import checked

_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_DELTA = "gated-delta-net"
_NAMES = {activation: ours for ours, activation in ACTIVATIONS.items()}


def _fixed_angles(kind: Any) -> Any:
    """``kind``, of rotary positions. PydanticCustomError for one whose angles depend on the length of the text."""
    if kind in ("longrope", "su", "dynamic"):
        raise PydanticCustomError(
            "rope_type",
            "its angles depend on the length of each text, and lightscale has one set of angles for all; use a model "
            "of rope_type default, linear, llama3 or yarn",
        )
    return kind


_FixedAngles = BeforeValidator(_fixed_angles)


class _Rope(Exact):
    """Both what transformers 5 writes, and what 4 wrote as rope_scaling."""

    rope_theta: Positive | None = None
    rope_type: Annotated[Literal["default", "llama3", "yarn", "linear"] | None, _FixedAngles] = None
    type: Annotated[Literal["default", "llama3", "yarn", "linear"] | None, _FixedAngles] = None
    """Its older name."""
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Tokens | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    truncate: bool | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    partial_rotary_factor: Annotated[float, Field(ge=1, le=1)] | None = None

    def scaling(self, path: Path) -> RopeScaling | None:
        """None: unscaled."""
        kind = self.rope_type or self.type or "default"
        if kind == "default":
            return None
        # transformers ignores keys of other types.
        values = self.model_dump(include=set(rope_keys(kind)), exclude_none=True) | {"rope_type": kind}
        if kind == "yarn" and self.attention_factor is None and self.mscale and self.mscale_all_dim and self.factor:
            # As in DeepSeek's models: two factors by which scores grow, one of which the rotation does not have.
            slow = 0.1 * math.log(max(1.0, self.factor))
            values["attention_factor"] = (self.mscale * slow + 1) / (self.mscale_all_dim * slow + 1)
        return RopeScaling(**checked(RopeScalingOptions, values, path, "rope_parameters").model_dump())


def _rope_keys(attention: Attention) -> dict[str, Any]:
    usual = asdict(RopeScaling(factor=1.0)) | {"rope_type": None, "factor": None}
    scaling = {} if attention.rope_scaling is None else asdict(attention.rope_scaling)
    said = {key: value for key, value in scaling.items() if value != usual[key]}
    return {"rope_theta": attention.rope_theta, "rope_type": "default"} | said


def _window_keys(layers: Sequence[Attention]) -> dict[str, Any]:
    """The window, and the layers that have it."""
    windows = [one.window for one in layers if one.window is not None]
    types = [_FULL if one.window is None else _SLIDING for one in layers]
    return {"sliding_window": windows[0] if windows else None, "layer_types": types}


class _Whole(NamedTuple):
    """A tensor of a layer, as transformers' class has it."""

    groups: int
    """It has so many groups of rows, in each of which the parts follow each other: heads, or 1."""
    parts: tuple[str, ...]
    """Tensors of the plain model's layer, whose rows it has."""


class WholePart(NamedTuple):
    """Consecutive rows of such a tensor."""

    rows: range
    name: str
    """The plain model's tensor that they are rows of."""
    first: int
    """Of that, the row that is the first of them."""


class _Layered(Known):
    """The configuration of one of transformers' models: ``shape`` reads it, ``keys`` writes it.

    Missing keys have transformers' defaults: ``defaults`` lists those that are not null in all models. Subclasses
    change a model's attention, by layer (from 0), its blocks, and its keys.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    needs_even_heads: ClassVar[bool] = False
    """Whether the class refuses a hidden_size that num_attention_heads does not divide, whatever head_dim is."""
    is_hybrid: ClassVar[bool] = False
    """Whether layers of the gated delta rule stand among those that attend by softmax."""
    other_names: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of names of a module, each of which files have."""
    sequences: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Tensors of a layer whose rows follow each other, by the name of the whole. Files cut them at any row."""
    num_hidden_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    hidden_act: Literal["silu", "linear", "gelu", "gelu_pytorch_tanh"] = "silu"
    attention_bias: bool = False
    mlp_bias: Literal[False] = False
    tie_word_embeddings: bool = False
    rope_theta: Positive = 10000.0
    sliding_window: Annotated[int, Field(ge=1)] | None = None
    layer_types: list[Literal["sliding_attention", "full_attention"]] | None = None

    def rope(self, layer: int) -> _Rope:
        """The rotary positions of a layer."""
        return _Rope()

    def slides(self, layer: int) -> bool:
        """Whether a layer has the window, if there is one."""
        return False

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has the gated delta rule."""
        return False

    def delta(self, path: Path) -> DeltaForm:
        """The sizes of those layers."""
        return DeltaForm()

    def attention(self, layer: int, path: Path) -> dict[str, Any]:
        """``Attention`` of a layer."""
        heads = self.num_key_value_heads or self.num_attention_heads
        width = self.head_dim or self.hidden_size // self.num_attention_heads
        # A window that hides nothing is none.
        is_hidden = self.sliding_window is not None and self.sliding_window < self.max_position_embeddings
        rope = self.rope(layer)
        return {
            "num_key_value_heads": None if heads == self.num_attention_heads else heads,
            "head_dim": None if width * self.num_attention_heads == self.hidden_size else width,
            "rope_theta": rope.rope_theta or self.rope_theta,
            "rope_scaling": rope.scaling(path),
            "bias": self.attention_bias,
            "output_bias": self.attention_bias,
            "window": self.sliding_window if is_hidden and self.slides(layer) else None,
        }

    def blocks(self) -> dict[str, Any]:
        """Other fields of ``Shape``."""
        return {"glu_activation": _NAMES[self.hidden_act]}

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        """Keys of ``shape``, with the attention of each of its softmax ``layers``, beside those that all have."""
        return {}

    @classmethod
    def wholes(cls, shape: Shape, mixer: str) -> dict[str, "_Whole"]:
        """Tensors of a layer with ``mixer`` that hold the rows of others, or have another name, by their names."""
        return {}

    def shape(self, path: Path) -> Shape:
        """The model of this configuration. UserError for one that lightscale lacks."""
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise UserError(
                f"{path}: layer_types has {len(self.layer_types)} entries; use {self.num_hidden_layers}, as "
                "num_hidden_layers has it"
            )
        layers = [
            None if self.is_linear(layer) else Attention(**self.attention(layer, path))
            for layer in range(self.num_hidden_layers)
        ]
        kinds = list(dict.fromkeys(one for one in layers if one is not None)) or [Attention()]
        if len(kinds) > len(SOFTMAX_MIXERS):
            raise UserError(
                f"{path}: {len(kinds)} kinds of softmax layers, which differ in windows or positions; use at most two"
            )
        # Those with a window are local; of others the first kind is "llama".
        kinds.sort(key=lambda one: one.window is not None)
        names = dict(zip(kinds, SOFTMAX_MIXERS, strict=False))
        delta = self.delta(path)
        return shape_of(
            self,
            mixers=tuple(_DELTA if layer is None else names[layer] for layer in layers),
            forms={_DELTA: delta} if None in layers and delta != DeltaForm() else {},
            norm="rmsnorm",
            attention=kinds[0],
            local_attention=kinds[1] if len(kinds) > 1 else Attention(),
            tied=self.tie_word_embeddings,
            **self.blocks(),
        )


class _Llama(_Layered):
    needs_even_heads: ClassVar[bool] = True
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None

    def rope(self, layer: int) -> _Rope:
        return self.rope_parameters or self.rope_scaling or _Rope()

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        return {"attention_bias": layers[0].bias, "mlp_bias": False}


class _Mistral(_Llama):
    needs_even_heads: ClassVar[bool] = False
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    }

    def slides(self, layer: int) -> bool:
        return True

    def attention(self, layer: int, path: Path) -> dict[str, Any]:
        return super().attention(layer, path) | {"bias": False, "output_bias": False}

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        return {"sliding_window": layers[0].window}


class _Qwen2(_Llama):
    needs_even_heads: ClassVar[bool] = False
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    }
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def slides(self, layer: int) -> bool:
        if not self.use_sliding_window:
            return False
        return layer >= self.max_window_layers if self.layer_types is None else self.layer_types[layer] == _SLIDING

    def attention(self, layer: int, path: Path) -> dict[str, Any]:
        # It does not say it: queries, keys and values have biases, and outputs none.
        return super().attention(layer, path) | {"bias": True, "output_bias": False}

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        found = _window_keys(layers)
        is_on = found["sliding_window"] is not None
        # Of a window that is off no key is written.
        return {"use_sliding_window": is_on} | ({**found, "max_window_layers": 0} if is_on else {})


class _Qwen3(_Qwen2):
    defaults: ClassVar[dict[str, Any]] = {**_Qwen2.defaults, "head_dim": 128}

    def attention(self, layer: int, path: Path) -> dict[str, Any]:
        biases = {"bias": self.attention_bias, "output_bias": self.attention_bias}
        return super().attention(layer, path) | biases | {"qk_norm": "head"}

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        return {"attention_bias": layers[0].bias, **super().keys(shape, layers)}


class _Olmo2(_Llama):
    needs_even_heads: ClassVar[bool] = False
    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5}

    def attention(self, layer: int, path: Path) -> dict[str, Any]:
        return super().attention(layer, path) | {"qk_norm": "all"}

    def blocks(self) -> dict[str, Any]:
        return super().blocks() | {"norm_placement": "post"}

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        return {"attention_bias": layers[0].bias}


class _RopeOfKinds(Exact):
    full_attention: _Rope | None = None
    sliding_attention: _Rope | None = None


class _Olmo3(_Layered):
    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096}
    rope_scaling: _Rope | None = None
    rope_parameters: _RopeOfKinds | None = None

    def slides(self, layer: int) -> bool:
        return (layer + 1) % 4 != 0 if self.layer_types is None else self.layer_types[layer] == _SLIDING

    def rope(self, layer: int) -> _Rope:
        if self.rope_parameters is None:
            # Layers with a window are not scaled.
            return _Rope() if self.slides(layer) else self.rope_scaling or _Rope()
        of_kinds = self.rope_parameters
        return (of_kinds.sliding_attention if self.slides(layer) else of_kinds.full_attention) or _Rope()

    def attention(self, layer: int, path: Path) -> dict[str, Any]:
        return super().attention(layer, path) | {"qk_norm": "all"}

    def blocks(self) -> dict[str, Any]:
        return super().blocks() | {"norm_placement": "post"}

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        local, whole = ([one for one in layers if (one.window is None) == is_whole] for is_whole in (False, True))
        rope = {_FULL: _rope_keys((whole or local)[0]), _SLIDING: _rope_keys((local or whole)[0])}
        return {"attention_bias": layers[0].bias, **_window_keys(layers), "rope_parameters": rope}


class _SmolLM3(_Llama):
    needs_even_heads: ClassVar[bool] = False
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    }
    use_sliding_window: bool = False
    no_rope_layers: list[Literal[0, 1]] | None = None
    """1 for each layer with rotary positions."""
    no_rope_layer_interval: Annotated[int, Field(ge=1)] = 4

    def turns(self, layer: int) -> bool:
        """Whether a layer has rotary positions."""
        every = self.no_rope_layers
        return (layer + 1) % self.no_rope_layer_interval != 0 if every is None else bool(every[layer])

    def slides(self, layer: int) -> bool:
        if not self.use_sliding_window:
            return False
        return not self.turns(layer) if self.layer_types is None else self.layer_types[layer] == _SLIDING

    def attention(self, layer: int, path: Path) -> dict[str, Any]:
        if self.no_rope_layers is not None and len(self.no_rope_layers) != self.num_hidden_layers:
            raise UserError(
                f"{path}: no_rope_layers has {len(self.no_rope_layers)} entries; use {self.num_hidden_layers}, as "
                "num_hidden_layers has it"
            )
        found = super().attention(layer, path)
        if self.turns(layer):
            return found
        usual = Attention()
        return found | {"positions": "none", "rope_theta": usual.rope_theta, "rope_scaling": None}

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        turned = [int(one.positions == "rope") for one in layers]
        # Each key is written: transformers derives missing ones from the positions.
        windows = {"use_sliding_window": any(one.window for one in layers), **_window_keys(layers)}
        return {**super().keys(shape, layers), "no_rope_layers": turned, **windows}


class _Gemma2(_Llama):
    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
    hidden_activation: Literal["silu", "linear", "gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    query_pre_attn_scalar: Annotated[int, Field(ge=1)] = 256
    final_logit_softcapping: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    use_bidirectional_attention: Literal[False] | None = None

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0 if self.layer_types is None else self.layer_types[layer] == _SLIDING

    def attention(self, layer: int, path: Path) -> dict[str, Any]:
        width = self.head_dim or self.hidden_size // self.num_attention_heads
        scalar = self.query_pre_attn_scalar
        return super().attention(layer, path) | {
            "softmax_scale": None if scalar == width else scalar**-0.5,
            "attention_logit_cap": self.attn_logit_softcapping,
        }

    def blocks(self) -> dict[str, Any]:
        return {
            "glu_activation": _NAMES[self.hidden_activation],
            "norm_placement": "both",
            "zero_centered_norm": True,
            "embedding_multiplier": math.sqrt(self.hidden_size),
            "final_logit_cap": self.final_logit_softcapping,
        }

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        first = layers[0]
        width = first.head_dim or shape.hidden_size // shape.num_attention_heads
        windows = _window_keys(layers)
        if windows["sliding_window"] is None:
            # The class makes a mask of it, which no layer takes.
            windows["sliding_window"] = cls.defaults["sliding_window"]
        return {
            "attention_bias": first.bias,
            "hidden_activation": ACTIVATIONS[shape.glu_activation],
            "query_pre_attn_scalar": width if first.softmax_scale is None else max(1, round(first.softmax_scale**-2)),
            "final_logit_softcapping": shape.final_logit_cap,
            "attn_logit_softcapping": first.attention_logit_cap,
            **windows,
        }


class _PartialRope(_Rope):
    partial_rotary_factor: Share | None = None


class _Partial(_Layered):
    """Rotary positions on some of a head's channels."""

    rope_scaling: _PartialRope | None = None
    rope_parameters: _PartialRope | None = None
    partial_rotary_factor: Share = 1.0

    def rope(self, layer: int) -> _PartialRope:
        return self.rope_parameters or self.rope_scaling or _PartialRope()

    def attention(self, layer: int, path: Path) -> dict[str, Any]:
        share = self.rope(layer).partial_rotary_factor or self.partial_rotary_factor
        return super().attention(layer, path) | {"rope_fraction": share}

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        rope = {**_rope_keys(layers[0]), "partial_rotary_factor": layers[0].rope_fraction}
        return {"rope_parameters": rope}


class _PhiRope(_PartialRope):
    """transformers refuses other types, or takes them for longrope."""

    rope_type: Annotated[Literal["default"] | None, _FixedAngles] = None
    type: Annotated[Literal["default"] | None, _FixedAngles] = None


class _Phi3(_Partial):
    rope_scaling: _PhiRope | None = None
    rope_parameters: _PhiRope | None = None
    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}

    def slides(self, layer: int) -> bool:
        return True

    def attention(self, layer: int, path: Path) -> dict[str, Any]:
        return super().attention(layer, path) | {"bias": False, "output_bias": False}

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        return {"sliding_window": layers[0].window, **super().keys(shape, layers)}

    @classmethod
    def wholes(cls, shape: Shape, mixer: str) -> dict[str, _Whole]:
        return {
            "self_attn.qkv_proj.weight": _Whole(1, tuple(f"mixer.{name}_proj.weight" for name in "qkv")),
            "mlp.gate_up_proj.weight": _Whole(1, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
        }


class _Hybrid(_Layered):
    """Layers of the gated delta rule, and softmax layers."""

    is_hybrid: ClassVar[bool] = True
    # The convolutions have it too.
    hidden_act: Literal["silu"] = "silu"
    layer_types: list[Literal["linear_attention", "full_attention"]] | None = None  # type: ignore[assignment]
    linear_conv_kernel_dim: Annotated[int, Field(ge=2, le=64)] = 4
    linear_key_head_dim: Width | None = None
    linear_value_head_dim: Width | None = None
    linear_num_key_heads: Width | None = None
    linear_num_value_heads: Width | None = None

    def delta(self, path: Path) -> DeltaForm:
        heads = self.linear_num_key_heads or self.num_attention_heads
        values = self.linear_num_value_heads or self.num_attention_heads
        key_width = self.linear_key_head_dim or int(0.75 * self.hidden_size / heads)
        value_width = self.linear_value_head_dim or 2 * key_width
        if heads != self.num_attention_heads:
            raise UserError(
                f"{path}: linear_num_key_heads = {heads} and num_attention_heads = {self.num_attention_heads}; both "
                "kinds of layers must have the same number of heads of queries"
            )
        if values % heads:
            raise UserError(f"{path}: linear_num_value_heads = {values} is not a multiple of {heads}, those of keys")
        usual = self.hidden_size / heads
        return DeltaForm(
            key_head_dim=None if key_width == usual else key_width,
            value_head_dim=None if value_width == usual else value_width,
            num_value_heads=None if values == heads else values,
            short_convolution=self.linear_conv_kernel_dim,
            output_norm_eps=self.rms_norm_eps,
        )

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        form, heads = shape.forms.get(_DELTA, DeltaForm()), shape.num_attention_heads
        assert isinstance(form, DeltaForm), type(form)
        return {
            **super().keys(shape, layers),
            "attention_bias": layers[0].bias,
            "layer_types": [_LINEAR if mixer == _DELTA else _FULL for mixer in shape.mixers],
            "linear_conv_kernel_dim": form.short_convolution,
            "linear_key_head_dim": form.key_head_dim or shape.hidden_size // heads,
            "linear_value_head_dim": form.value_head_dim or shape.hidden_size // heads,
            "linear_num_key_heads": heads,
            "linear_num_value_heads": form.num_value_heads or heads,
        }


class _GatedHybrid(_Hybrid, _Partial):
    """As Qwen3.5 has them: the softmax layers are gated."""

    defaults: ClassVar[dict[str, Any]] = {
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "partial_rotary_factor": 0.25,
    }
    full_attention_interval: Annotated[int, Field(ge=1)] = 4
    linear_key_head_dim: Width = 128
    linear_value_head_dim: Width = 128
    linear_num_key_heads: Width = 16
    linear_num_value_heads: Width = 32

    def is_linear(self, layer: int) -> bool:
        if self.layer_types is None:
            return (layer + 1) % self.full_attention_interval != 0
        return self.layer_types[layer] == _LINEAR

    def attention(self, layer: int, path: Path) -> dict[str, Any]:
        return super().attention(layer, path) | {"qk_norm": "head", "zero_centered_norm": True, "output_gate": True}

    def blocks(self) -> dict[str, Any]:
        return super().blocks() | {"zero_centered_norm": True}

    @classmethod
    def wholes(cls, shape: Shape, mixer: str) -> dict[str, _Whole]:
        if mixer != _DELTA:
            # Of each head its query, and its gate.
            return {
                f"self_attn.q_proj.{kind}": _Whole(
                    shape.num_attention_heads, (f"mixer.q_proj.{kind}", f"mixer.gate_proj.{kind}")
                )
                for kind in ("weight", "bias")
            }
        return {
            **cls.projections(shape),
            "linear_attn.conv1d.weight": _Whole(1, ("mixer.q_conv", "mixer.k_conv", "mixer.v_conv")),
            "linear_attn.norm.weight": _Whole(1, ("mixer.o_norm",)),
            "linear_attn.out_proj.weight": _Whole(1, ("mixer.o_proj.weight",)),
            "linear_attn.A_log": _Whole(1, ("mixer.A_log",)),
            "linear_attn.dt_bias": _Whole(1, ("mixer.dt_bias",)),
        }

    @classmethod
    def projections(cls, shape: Shape) -> dict[str, _Whole]:
        """Those of the inputs of a layer of the gated delta rule."""
        alone = {"z": "gate", "b": "b", "a": "f"}
        return {
            "linear_attn.in_proj_qkv.weight": _Whole(1, tuple(f"mixer.{name}_proj.weight" for name in "qkv")),
            **{
                f"linear_attn.in_proj_{own}.weight": _Whole(1, (f"mixer.{name}_proj.weight",))
                for own, name in alone.items()
            },
        }


class _RopeOfGrids(_PartialRope):
    """With a text's tokens all three positions of a grid are the same one."""

    mrope_section: list[int] | None = None
    mrope_interleaved: bool | None = None


class _Qwen35(_GatedHybrid):
    defaults: ClassVar[dict[str, Any]] = {**_GatedHybrid.defaults, "num_key_value_heads": 4}
    rope_scaling: _RopeOfGrids | None = None
    rope_parameters: _RopeOfGrids | None = None


class _Qwen3Next(_GatedHybrid):
    defaults: ClassVar[dict[str, Any]] = {**_GatedHybrid.defaults, "num_key_value_heads": 2, "num_experts": 512}
    num_experts: Annotated[int, Field(ge=0)]
    decoder_sparse_step: Annotated[int, Field(ge=1)] = 1
    mlp_only_layers: list[int] | None = None

    def shape(self, path: Path) -> Shape:
        layers = {*range(self.decoder_sparse_step - 1, self.num_hidden_layers, self.decoder_sparse_step)}
        if self.num_experts and (sparse := sorted(layers - {*(self.mlp_only_layers or ())})):
            raise UserError(
                f"{path}: num_experts = {self.num_experts}: layer {sparse[0]} has experts; use a model without experts"
            )
        return super().shape(path)

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        return {**super().keys(shape, layers), "num_experts": 0, "mlp_only_layers": []}

    @classmethod
    def projections(cls, shape: Shape) -> dict[str, _Whole]:
        heads = shape.num_attention_heads
        return {
            "linear_attn.in_proj_qkvz.weight": _Whole(
                heads, tuple(f"mixer.{name}_proj.weight" for name in ("q", "k", "v", "gate"))
            ),
            "linear_attn.in_proj_ba.weight": _Whole(heads, ("mixer.b_proj.weight", "mixer.f_proj.weight")),
        }


class _OlmoHybrid(_Hybrid, _Llama):
    needs_even_heads: ClassVar[bool] = False
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 65_536}
    other_names: ClassVar[tuple[tuple[str, str], ...]] = (
        ("input_layernorm", "attention_layer_norm"),
        ("post_attention_layernorm", "feedforward_layer_norm"),
    )
    sequences: ClassVar[dict[str, tuple[str, ...]]] = {
        "linear_attn.conv1d.weight": tuple(f"linear_attn.{name}_conv1d.weight" for name in "qkv")
    }
    rope_theta: Positive | None = 10000.0  # type: ignore[assignment]
    """null, here or in rope_parameters: no positions."""
    linear_allow_neg_eigval: bool = True

    def is_linear(self, layer: int) -> bool:
        if self.layer_types is None:
            # A softmax layer stands last where none would be.
            return layer % 4 != 3 and not (self.num_hidden_layers < 4 and layer == self.num_hidden_layers - 1)
        return self.layer_types[layer] == _LINEAR

    def delta(self, path: Path) -> DeltaForm:
        # Not that of the configuration: transformers' class has the number of flash-linear-attention.
        usual = DeltaForm().output_norm_eps
        return replace(super().delta(path), negative_eigenvalues=self.linear_allow_neg_eigval, output_norm_eps=usual)

    def attention(self, layer: int, path: Path) -> dict[str, Any]:
        found = super().attention(layer, path) | {"qk_norm": "all"}
        rope = self.rope(layer)
        theta = rope.rope_theta if "rope_theta" in rope.model_fields_set else self.rope_theta
        if theta is not None:
            return found
        usual = Attention()
        return found | {"positions": "none", "rope_theta": usual.rope_theta, "rope_scaling": None}

    def blocks(self) -> dict[str, Any]:
        return super().blocks() | {"norm_placement": "by_mixer"}

    @classmethod
    def keys(cls, shape: Shape, layers: Sequence[Attention]) -> dict[str, Any]:
        form, rope = shape.forms.get(_DELTA, DeltaForm()), _rope_keys(layers[0])
        assert isinstance(form, DeltaForm), type(form)
        return {
            **super().keys(shape, layers),
            "rope_parameters": rope if layers[0].positions == "rope" else {**rope, "rope_theta": None},
            "linear_allow_neg_eigval": form.negative_eigenvalues,
        }

    @classmethod
    def wholes(cls, shape: Shape, mixer: str) -> dict[str, _Whole]:
        # The names of published files; transformers renames them as it reads.
        if mixer != _DELTA:
            return {}
        projections = {**{name: name for name in "qkvbo"}, "a": "f", "g": "gate"}
        alone = {
            **{f"linear_attn.{own}_proj.weight": f"mixer.{name}_proj.weight" for own, name in projections.items()},
            **{f"linear_attn.{name}_conv1d.weight": f"mixer.{name}_conv" for name in "qkv"},
            "linear_attn.o_norm.weight": "mixer.o_norm",
            "linear_attn.A_log": "mixer.A_log",
            "linear_attn.dt_bias": "mixer.dt_bias",
            **{f"{own}.weight": f"{name}.weight" for name, own in cls.other_names},
        }
        return {own: _Whole(1, (name,)) for own, name in alone.items()}


_CLASSES: dict[str, tuple[str, type[_Layered]]] = {
    "llama": ("Llama", _Llama),
    "mistral": ("Mistral", _Mistral),
    "qwen2": ("Qwen2", _Qwen2),
    "qwen3": ("Qwen3", _Qwen3),
    "olmo2": ("Olmo2", _Olmo2),
    "olmo3": ("Olmo3", _Olmo3),
    "smollm3": ("SmolLM3", _SmolLM3),
    "gemma2": ("Gemma2", _Gemma2),
    "phi3": ("Phi3", _Phi3),
    "qwen3_5_text": ("Qwen3_5", _Qwen35),
    "qwen3_next": ("Qwen3Next", _Qwen3Next),
    "olmo_hybrid": ("OlmoHybrid", _OlmoHybrid),
}
"""By model_type: transformers' name, and its configuration. Of two that compute the same the first is written."""
OWN_TYPES = tuple(_CLASSES)


def read_own(content: dict[str, Any], path: Path) -> tuple[Shape, int]:
    """The shape that ``content``, of one of ``OWN_TYPES``, describes, and the longest sequence. UserError otherwise."""
    _, kind = _CLASSES[content["model_type"]]
    own = checked(kind, kind.defaults | content, path)
    return own.shape(path), own.max_position_embeddings


def own_type(shape: Shape) -> str | None:
    """The model_type of transformers' own model that computes ``shape``; None: there is none."""
    mixers = {*shape.mixers}
    if shape.image is not None:
        return None
    if not mixers <= {*SOFTMAX_MIXERS, _DELTA} or mixers == {_DELTA} or not shape.intermediate_size:
        return None
    for name, (_, kind) in _CLASSES.items():
        if kind.is_hybrid != (_DELTA in mixers):
            continue
        if kind.needs_even_heads and shape.hidden_size % shape.num_attention_heads:
            continue
        content = sizes_of(shape) | own_keys(shape, name) | {"max_position_embeddings": MOST_SEQUENCE_TOKENS}
        try:
            found = kind.model_validate(kind.defaults | content).shape(Path())
        except (ValidationError, UserError):
            continue
        if found == shape:
            return name
    return None


def own_class(name: str) -> str:
    """What transformers calls the model ``name`` of ``OWN_TYPES``, such as "Llama"."""
    return _CLASSES[name][0]


def tensor_places(shape: Shape, name: str | None) -> dict[str, TensorRows]:
    """Of every tensor of the plain model, where the files of an export have it.

    ``name``: of ``OWN_TYPES``; None: files that are read by our own class.
    """
    sizes, found = tensor_shapes(shape), dict[str, TensorRows]()
    wholes = [{} if name is None else _CLASSES[name][1].wholes(shape, mixer) for mixer in shape.mixers]
    for plain in sizes:
        if name is None or not plain.startswith("model.layers."):
            found[plain] = TensorRows(key=plain)
            continue
        *layer, part = plain.split(".", 3)
        where = ".".join(layer)
        usual = part.replace("mixer.", "self_attn.", 1), _Whole(1, (part,))
        own, whole = next((one for one in wholes[int(layer[-1])].items() if part in one[1].parts), usual)
        each = [sizes[f"{where}.{one}"][0] // whole.groups for one in whole.parts]
        at = whole.parts.index(part)
        starts = [group * sum(each) + sum(each[:at]) for group in range(whole.groups)]
        ranges = tuple((start, start + each[at]) for start in starts)
        found[plain] = TensorRows(key=f"{where}.{own}", ranges=ranges if len(each) > 1 else None)
    return found


def renamed_and_recut(
    headers: Mapping[str, Sequence[Entry]], expected: Mapping[str, tuple[int, ...]], name: str | None
) -> dict[str, list[Entry]]:
    """The tensors in each file, with the names and cuts of ``expected`` where the files have others.

    Args:
        headers: the tensors by file.
        expected: shapes of tensors, see ``whole_shapes``.
        name: of ``OWN_TYPES``; None: nothing changes.
    """
    kind = _Layered if name is None else _CLASSES[name][1]
    both = [pair for one in kind.other_names for pair in (one, one[::-1])]
    found = {file: [_renamed(entry, expected, both) for entry in entries] for file, entries in headers.items()}
    for whole, parts in kind.sequences.items():
        for first in [key for key in expected if key.endswith(f".{parts[0]}")]:
            layer = first.removesuffix(parts[0])
            found = recut(found, layer + whole, {layer + part: expected[layer + part] for part in parts})
    return found


def _renamed(entry: Entry, expected: Mapping[str, tuple[int, ...]], pairs: Sequence[tuple[str, str]]) -> Entry:
    own = entry.box.key.removeprefix(WEIGHTS_PREFIX)
    if own in expected:
        return entry
    others = (own.replace(f".{one}.", f".{other}.") for one, other in pairs)
    key = next((other for other in others if other in expected), own)
    return replace(entry, box=replace(entry.box, key=f"{WEIGHTS_PREFIX}{key}"))


def whole_shapes(places: Mapping[str, TensorRows], sizes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that hold ``places``, by their names there; ``sizes``: of the plain model's."""
    found: dict[str, tuple[int, ...]] = {}
    for plain, place in places.items():
        rows, *rest = sizes[plain]
        # A convolution reads one channel.
        inner = (1, *rest) if place.key.endswith("conv1d.weight") else tuple(rest)
        found[place.key] = (rows + (found[place.key][0] if place.key in found else 0), *inner)
    return found


def whole_parts(places: Mapping[str, TensorRows], sizes: Mapping[str, tuple[int, ...]]) -> dict[str, list[WholePart]]:
    """The parts of those tensors, in the order of their rows."""
    found: dict[str, list[WholePart]] = {}
    for plain, place in places.items():
        first = 0
        for start, stop in place.ranges or ((0, sizes[plain][0]),):
            found.setdefault(place.key, []).append(WholePart(range(start, stop), plain, first))
            first += stop - start
    return {key: sorted(parts, key=lambda part: part.rows.start) for key, parts in found.items()}


def own_keys(shape: Shape, name: str) -> dict[str, Any]:
    """Keys of config.json beside the sizes, of the model ``name`` of ``OWN_TYPES``; of another model, the nearest."""
    attentions = shape.attentions()
    layers = [attentions[mixer] for mixer in shape.mixers if mixer in attentions]
    first = layers[0]
    keys = {
        "num_key_value_heads": first.num_key_value_heads or shape.num_attention_heads,
        "head_dim": first.head_dim or shape.hidden_size // shape.num_attention_heads,
        "hidden_act": ACTIVATIONS[shape.glu_activation],
        "rope_parameters": _rope_keys(next((one for one in layers if one.positions == "rope"), first)),
    }
    return keys | _CLASSES[name][1].keys(shape, layers)
