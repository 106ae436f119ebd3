"""The options of the mixers, ``[model.mixer_options.NAME]``, and the shapes that some cannot have.

Configurations are read without torch, so this module must not import it: the table in ``lightscale.config.mixers``
names what is here by import strings.
"""

from typing import Literal, Self

from pydantic import model_validator

from lightscale.config.arithmetic import near_divisor
from lightscale.config.model import ModelConfig
from lightscale.config.section import Fraction, Positive, PositiveOrZero, Section, SequenceLength, Share, Width
from lightscale.errors import UserError


class LowRankGateOptions(Section):
    """The option of every low-rank output gate."""

    gate_rank: Width | None = None
    """Inner width of the low-rank output gate, in channels; none: head_dim."""


class GatedMixerOptions(LowRankGateOptions):
    """The options of every ``GatedMixer``."""

    gate_input: Literal["normalised", "raw"] = "normalised"
    """Input of the gate: the block's normalised input, or raw, the block's input (equations 9, 17)."""
    output_projection: bool = True
    """Whether a matrix W_o follows norm and gate; false: none, as in equations 9 and 17, which declare it."""


class TNLOptions(GatedMixerOptions):
    """The options of TransNormerLLM."""

    causal: bool = True
    """Whether tokens see those up to themselves; false: all of their document, by two scans whose outputs are added."""
    decay: Literal["alibi", "linear", "minimax"] = "alibi"
    """-log of the decays: ALiBi's slopes times 1 - l/(L-1); 8h/H (1 - l/L), h from 0; or as MiniMax-Text-01 has it."""
    lrpe: Literal["first", "all", "none"] = "first"
    """Layers that rotate queries and keys by learned angles, the only positions of the model."""


class HGRN2Options(Section):
    """The options of HGRN2."""

    causal: bool = True
    """Whether tokens see those up to themselves; false: all of their document, by two scans whose outputs are added."""
    query_activation: Literal["silu", "none"] = "silu"
    """Activation of the queries; none: as in equation 13."""
    lower_bounds: Literal["from_zero", "to_one"] = "from_zero"
    """Sums without the table's first row, 0 in the first layer; to_one: with it (equation 12), 1 in the last."""
    output_projection: bool = True
    """Whether a matrix W_o follows the norm; false: none, as in equation 13, which declares it."""


class LightNetOptions(GatedMixerOptions):
    """The options of LightNet: the switches of its ablation, and the direction."""

    causal: bool = True
    """Whether tokens see those up to themselves; false: all of their document, for tasks that read both ways."""
    decay: bool = True
    """Additive decay; false: silu on the keys and plain sums, the paper's "w/o Decay"."""
    shared_decay: bool = True
    """Whether keys and decays have the same weights; false: "LightNet no share", with silu on the keys and the decays
    by two matrices through head_dim channels (printed counts imply about 6M more of 379M)."""
    lrpe: bool = True
    """Whether queries and keys are rotated by angles, fixed ones unless learned_angles; false: "w/o LRPE"."""
    learned_angles: bool = False
    """Whether the angles of each layer, head and channel are learned."""
    tpe: bool = True
    """Whether the layers ask for the positional encoding behind the embedding; false: "w/o TPE"."""
    output_norm: bool = True
    """Whether a norm stands between operator and gate; false: "w/o Norm"."""
    full_rank_gate: bool = False
    """Whether the gate is one matrix d x d instead of two through gate_rank: "w full rank output gate"."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.full_rank_gate and self.gate_rank is not None:
            raise ValueError(f"full_rank_gate = true excludes gate_rank = {self.gate_rank}; remove one of them")
        if self.learned_angles and not self.lrpe:
            raise ValueError("learned_angles = true with lrpe = false: the model has no angles; use lrpe = true")
        if not self.shared_decay and not (self.decay and self.causal):
            key = "causal" if self.decay else "decay"
            raise ValueError(
                f"shared_decay = false with {key} = false: a separate decay needs a causal decay; use causal = true "
                "and decay = true, or shared_decay = true"
            )
        if not self.decay and not self.causal:
            raise ValueError(
                "decay = false sums over the tokens up to each, and causal = false reads the whole document; use "
                "decay = true with causal = false"
            )
        return self


class LionOptions(Section):
    """The options of LION's mixers."""

    feature_map: Literal["elu", "silu", "none"] = "silu"
    """Feature map of queries and keys: elu, elu(x) + 1; silu, (silu(x) + 1/2) over its 2-norm; none, identity."""
    scale: bool = True
    """Divide outputs by the sum of their scores; false: an RMS norm over all heads instead, as in RetNet."""
    eps: PositiveOrZero = 1e-6
    """Added to that sum, once."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Projections with a bias: queries, keys and values, or also outputs, as in ViT."""
    patch_order: Literal["raster", "alternating"] = "raster"
    """Order of an image's patches: raster, row by row; alternating, the mean of masks in two orders, along rows and
    along columns, every second of them backwards (C.8, LION-S (v2))."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.feature_map == "none" and self.scale:
            raise ValueError(
                'feature_map = "none" with scale = true divides by sums that may be 0 or negative; use scale = false, '
                'or feature_map = "silu" or "elu"'
            )
        return self


class LionLITOptions(LionOptions):
    """Those of LION-LIT, which has the feature map of linear transformers."""

    feature_map: Literal["elu", "silu", "none"] = "elu"
    """Feature map of queries and keys: elu, elu(x) + 1; silu, (silu(x) + 1/2) over its 2-norm; none, identity."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.patch_order != "raster":
            raise ValueError(
                'patch_order = "alternating": without decays all orders give the same; use patch_order = "raster", or '
                "lion-retnet or lion-s"
            )
        return self


class LionSOptions(LionOptions):
    """Those of LION-S, whose decays come from the input."""

    gate: Literal["leave", "enter"] = "leave"
    """Of two tokens whose decay counts between them, either way: the one that is left, as in the code, or entered."""
    input_gate: bool = False
    """Multiply keys by 1 - a of their token, as in Gated RFA (equation 135)."""
    initial_decay: Fraction | Literal["s4d-real"] = 0.5
    """Initial value of decays, between 0 and 1; 0.5 in the authors' code; s4d-real, with vector_decay: exp(-(n + 1) Δ)
    in channel n of a head, with Δ of each head drawn log-uniformly from 0.001 to 0.1, as in S4D (arXiv 2206.11893)."""
    vector_decay: bool = False
    """Use one decay per value channel of a head and token, not one for all channels (C.7, equation 136)."""

    @model_validator(mode="after")
    def _check_decay(self) -> Self:
        if self.initial_decay == 0:
            raise ValueError("initial_decay = 0.0: a sigmoid is never 0; use 0.5, or a value above 0")
        if self.initial_decay == "s4d-real" and not self.vector_decay:
            raise ValueError(
                'initial_decay = "s4d-real" with vector_decay = false: decays differ by channel; use vector_decay = '
                "true, or a number"
            )
        if self.vector_decay and self.input_gate:
            raise ValueError(
                "input_gate = true with vector_decay = true: keys are multiplied by one number (equation 135); use "
                "vector_decay = false, or input_gate = false"
            )
        return self


class RelationOptions(Section):
    """The options of relation networks, CausalRN and BiRN."""

    form: Literal["linear", "quadratic"] = "linear"
    """linear: exp of the sum of two normalised sides, in linear time; quadratic: every pair separately."""
    activation: Literal["exp", "relu", "elu", "silu"] = "exp"
    """Of the hidden channels of a pair; others than exp need the quadratic form."""
    pre_norm: Literal["auto", "exact", "approximate", "off"] = "auto"
    """Norm before the activation: exact, of each pair; approximate, of its two sides; off; auto: approximate where the
    form is linear, exact where it is quadratic."""
    eps: PositiveOrZero = 1e-6
    """Added to the variance in the norms; 0 as in the paper, where a vector of equal numbers becomes NaN."""
    expansion: Width = 1
    """Hidden channels by channel of the stream: the state expansion of figure 4d; base models of the paper have 4."""
    positions: SequenceLength | None = None
    """Rows of a table of learned positions, added to the embedding; none: no positions."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.form == "linear" and self.activation != "exp":
            raise ValueError(
                f'activation = "{self.activation}" with form = "linear": only exp has a linear form; use '
                'activation = "exp", or form = "quadratic"'
            )
        if self.form == "linear" and self.pre_norm == "exact":
            raise ValueError(
                'pre_norm = "exact" with form = "linear": a norm of each pair needs form = "quadratic"; use '
                'pre_norm = "approximate"'
            )
        if self.form == "quadratic" and self.activation == "exp" and self.pre_norm in ("approximate", "off"):
            raise ValueError(
                f'pre_norm = "{self.pre_norm}" with form = "quadratic" and activation = "exp": form = "linear" '
                'computes the same without overflow; use form = "linear", or pre_norm = "exact"'
            )
        return self


class CausalRNOptions(RelationOptions):
    """Those of CausalRN."""

    post_norm: bool = True
    """Apply a norm after the sum over pairs; false: mean over pairs, as printed in equation 5."""


_OF_ROPE_TYPE: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "linear": (frozenset(), frozenset()),
    "llama3": (
        frozenset({"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        frozenset({"original_max_position_embeddings"}),
        frozenset({"beta_fast", "beta_slow", "attention_factor", "truncate"}),
    ),
}
"""Keys that a type needs beside its factor, and others that it can have."""


def rope_keys(rope_type: str) -> frozenset[str]:
    """Keys that ``RopeScalingOptions`` of a type can have."""
    needed, others = _OF_ROPE_TYPE[rope_type]
    return needed | others | {"rope_type", "factor"}


class RopeScalingOptions(Section):
    """Rotary positions slowed down for sequences longer than those that the model was first trained on."""

    rope_type: Literal["llama3", "yarn", "linear"] = "llama3"
    """llama3: scaling of Llama 3.1; waves with few turns in the first length are slowed down by the factor. yarn: the
    same by channels between two numbers of turns, with larger scores (arXiv 2309.00071). linear: all waves."""
    factor: Positive
    """Factor by which the slowest waves are slowed down."""
    low_freq_factor: Positive | None = None
    """Of llama3: waves with fewer turns in the first length are slowed down by the full factor."""
    high_freq_factor: Positive | None = None
    """Of llama3: waves with more turns do not change; between the two limits both are mixed."""
    original_max_position_embeddings: SequenceLength | None = None
    """The first length, in tokens; of llama3 and yarn."""
    beta_fast: Positive | None = None
    """Of yarn: waves with more turns in the first length do not change; none: 32."""
    beta_slow: Positive | None = None
    """Of yarn: waves with fewer turns are slowed down by the full factor; none: 1."""
    attention_factor: Positive | None = None
    """Of yarn: factor of rotated queries and of rotated keys; none: 0.1 ln(factor) + 1, at least 1."""
    truncate: bool = True
    """Of yarn: whether the limits between channels are rounded away from each other; gpt-oss has false."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed, known = _OF_ROPE_TYPE[self.rope_type][0], rope_keys(self.rope_type)
        fields = type(self).model_fields
        if missing := [key for key in fields if key in needed and getattr(self, key) is None]:
            raise ValueError(f'rope_type = "{self.rope_type}" needs {missing[0]}; set it')
        if spare := [key for key in fields if key not in known and getattr(self, key) != fields[key].default]:
            raise ValueError(f'rope_type = "{self.rope_type}" has no {spare[0]}; remove it')
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and high <= low:
            raise ValueError(f"high_freq_factor = {high} must be above low_freq_factor = {low}")
        if (self.beta_fast or 32.0) <= (self.beta_slow or 1.0):
            raise ValueError(f"beta_fast = {self.beta_fast or 32.0} must be above beta_slow = {self.beta_slow or 1.0}")
        return self


class LLaMAOptions(Section):
    """The options of LLaMA's attention, named as transformers names them."""

    causal: bool = True
    """Whether tokens see those up to themselves; false: all of their document, for tasks that read both ways."""
    num_key_value_heads: Width | None = None
    """Heads of keys and values, each shared by as many heads of queries; divides num_heads; none: num_heads."""
    head_dim: Width | None = None
    """Channels per head, an even number; none: hidden_size / num_heads."""
    rope_theta: Positive = 10000.0
    """Base of the rotary positions: the slowest wave turns once in nearly 2 pi times as many tokens."""
    rope_scaling: RopeScalingOptions | None = None
    """Rotary positions for longer sequences, a table; none: unscaled."""
    positions: Literal["rope", "none"] = "rope"
    """Rotations of queries and keys; none: no positions (NoPE, arXiv 2305.19466)."""
    rope_fraction: Share = 1.0
    """Share of each head's channels that are rotated, its first ones (transformers' partial_rotary_factor)."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Projections with a bias: queries, keys and values (as in Qwen2), or also outputs."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """RMS norm of queries and keys before the rotation: head, of each head, with a weight that all heads share (Qwen3);
    all, over the channels of all heads together (OLMo 2)."""
    zero_centered_norm: bool = False
    """Whether that norm multiplies by 1 + weight, as in Qwen3-Next and Gemma 3; false: by the weight."""
    window: SequenceLength | None = None
    """Tokens that one sees, itself the last of them (transformers' sliding_window); none: all before it."""
    softmax_scale: Positive | None = None
    """Factor of scores; none: head_dim ^ -0.5. Gemma 2: its query_pre_attn_scalar ^ -0.5."""
    attention_logit_cap: Positive | None = None
    """Most of a score before the softmax, by tanh, as in Gemma 2; none: scores are not limited."""
    attention_sinks: bool = False
    """Whether a learned logit of each head joins the softmax's sum, as in gpt-oss."""
    output_gate: bool = False
    """Multiply each head's output by the sigmoid of a gate, a linear map of the mixer's input, as in Qwen3-Next."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.zero_centered_norm and self.qk_norm == "none":
            raise ValueError(
                'zero_centered_norm = true with qk_norm = "none": there is no norm; use qk_norm = "head", or '
                "zero_centered_norm = false"
            )
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta = {self.rope_theta} with yarn: waves must differ; use a value above 1")
        if self.window is not None and not self.causal:
            raise ValueError(f"window = {self.window} with causal = false: a window looks back; use causal = true")
        unused = ("rope_theta", "rope_scaling", "rope_fraction")
        fields = type(self).model_fields
        if self.positions == "none" and (spare := [n for n in unused if getattr(self, n) != fields[n].default]):
            raise ValueError(f'positions = "none" with {spare[0]}: nothing is rotated; remove {spare[0]}')
        return self


def llama_options(model: ModelConfig, layer: int) -> LLaMAOptions:
    """Those of layer ``layer`` (from 0), whose mixer is LLaMA's."""
    options = model.layer_options(layer)
    assert isinstance(options, LLaMAOptions), type(options)
    return options


def llama_heads(model: ModelConfig, layer: int) -> tuple[int, int]:
    """Of layer ``layer`` (from 0), whose mixer is LLaMA's: heads of keys and values, and channels per head."""
    options = llama_options(model, layer)
    return options.num_key_value_heads or model.num_heads, options.head_dim or model.head_dim


def rotary_width(model: ModelConfig, layer: int) -> int:
    """Of layer ``layer`` (from 0), whose mixer is LLaMA's: channels of a head that are rotated; 0: none."""
    options = llama_options(model, layer)
    return int(llama_heads(model, layer)[1] * options.rope_fraction) if options.positions == "rope" else 0


def check_lion(model: ModelConfig) -> None:
    """Other orders are those of the patches of images."""
    for name, options in model.mixer_options.items():
        if isinstance(options, LionOptions) and options.patch_order != "raster" and model.patches is None:
            raise UserError(
                f'model.mixer_options.{name}.patch_order = "{options.patch_order}" without model.patches: it orders '
                'the patches of images; use "raster"'
            )


def check_llama(model: ModelConfig) -> None:
    """Heads of keys and values are shared evenly, and rotary positions turn channels in pairs."""
    for name, options in model.mixer_options.items():
        if isinstance(options, LLaMAOptions):
            _check_heads(model, name, options)


def _check_heads(model: ModelConfig, name: str, options: LLaMAOptions) -> None:
    key, layer = f"model.mixer_options.{name}", model.layers.index(name)
    heads, width = llama_heads(model, layer)
    rotated = rotary_width(model, layer)
    if model.num_heads % heads:
        raise UserError(
            f"{key}.num_key_value_heads = {heads} does not divide model.num_heads = {model.num_heads}; use "
            f"{near_divisor(model.num_heads, heads)}"
        )
    if options.positions == "none":
        return
    if options.rope_fraction < 1 and (rotated < 2 or rotated % 2):
        pairs = max(1, round(rotated / 2))
        raise UserError(
            f"{key}.rope_fraction = {options.rope_fraction} of {width} channels is {rotated}, but {name} rotates "
            f"channels in pairs; use {2 * pairs / width}"
        )
    if rotated % 2 and options.head_dim is not None:
        raise UserError(f"{key}.head_dim = {width}: {name} rotates channels in pairs; use {width + 1}")
    if rotated % 2:
        raise UserError(
            f"model.hidden_size = {model.hidden_size} and model.num_heads = {model.num_heads} give {name} heads of "
            f"{width} channels, but it rotates channels in pairs; use an even number, such as "
            f"model.hidden_size = {(width + 1) * model.num_heads}, or {key}.head_dim"
        )
