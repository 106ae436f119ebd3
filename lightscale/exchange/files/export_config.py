"""config.json of an export: what transformers reads of a model's shape, written and read back strictly."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lightscale.config.mixers import mixer_options_type
from lightscale.config.section import MOST_IDS, MOST_LAYERS, MOST_SEQUENCE_TOKENS
from lightscale.errors import UserError
from lightscale.exchange.files import modelling_file
from lightscale.exchange.files.weights import form_of
from lightscale.exchange.plain.decay_mixer import ScalarDecay
from lightscale.exchange.plain.lion import LION_MIXERS, Lion
from lightscale.exchange.plain.mixers import Attention, RopeScaling, ToeplitzForm
from lightscale.exchange.plain.model import FORMS, MixerForm, Shape
from lightscale.exchange.plain.relation import RELATION_MIXERS
from lightscale.files import open_regular
from lightscale.models.specs.decay_attention import DecayAttentionOptions
from lightscale.models.specs.options import RopeScalingOptions, rope_keys
from lightscale.training.checkpoints.reading import parse_object, shown
from lightscale.training.checkpoints.schema import checked

NAME = "config.json"
_MOST_BYTES = 1 << 22
_OF_NORMS = ("norm_placement", "zero_centered_norm", "embedding_multiplier", "final_logit_cap")
"""Fields of ``Shape`` that config.json has where they are not as usual."""
_USUAL = {field.name: field.default for field in fields(Shape)}
_ACTIVATIONS = {"none": "linear", "silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Of LLaMA's linear units, as transformers names them."""

_Width = Annotated[int, Field(ge=1, le=2**20)]
_WidthOrZero = Annotated[int, Field(ge=0, le=2**20)]
_Ids = Annotated[int, Field(ge=1, le=MOST_IDS)]
_Positive = Annotated[float, Field(gt=0, le=1e15)]
_Tokens = Annotated[int, Field(ge=1, le=MOST_SEQUENCE_TOKENS)]
_Eps = Annotated[float, Field(gt=0, le=100)]


class _Known(BaseModel):
    """What every configuration must say; transformers adds keys of its own, which change nothing here."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    vocab_size: _Ids
    hidden_size: _Width
    num_attention_heads: _Width
    intermediate_size: _Width
    rms_norm_eps: _Eps = 1e-6
    max_position_embeddings: _Tokens = 2048


class _Exact(BaseModel):
    """A table of which every key has a meaning: one that is not known could change the model."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class _SoftmaxAttention(_Exact):
    """``Attention``, as our own exports write it."""

    num_key_value_heads: _Width | None
    head_dim: _Width | None
    rope_theta: _Positive
    rope_scaling: RopeScalingOptions | None
    bias: bool
    output_bias: bool
    causal: bool = True
    qk_norm: Literal["none", "head", "all"] = "none"
    zero_centered_norm: bool = False
    positions: Literal["rope", "none"] = "rope"
    rope_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    output_gate: bool = False
    window: _Tokens | None = None
    softmax_scale: _Positive | None = None
    attention_logit_cap: _Positive | None = None
    attention_sinks: bool = False

    def attention(self) -> Attention:
        scaling = None if self.rope_scaling is None else RopeScaling(**self.rope_scaling.model_dump())
        return Attention(**self.model_dump(exclude={"rope_scaling"}), rope_scaling=scaling)


class _Lion(_Exact):
    """``Lion``, as our own exports write it."""

    feature_map: Literal["elu", "silu", "none"]
    scale: bool
    eps: Annotated[float, Field(ge=0, le=100)]
    gate: Literal["leave", "enter"]
    input_gate: bool
    vector_decay: bool = False


class _ScalarDecay(_Exact):
    """``ScalarDecay``."""

    decay: Literal["sigmoid", "softplus", "learned", "fixed", "none"]
    input_gate: bool
    feature_map: Literal["elu", "shifted_silu", "silu", "none"]
    scale: bool
    eps: Annotated[float, Field(ge=0, le=1e15)]
    positions: Literal["none", "rope", "lrpe"]
    short_convolution: Annotated[int, Field(ge=0, le=64)]
    output: Literal["plain", "norm", "gated"]

    @model_validator(mode="after")
    def _check(self) -> Self:
        # What does not go together is refused as in a run's configuration.
        DecayAttentionOptions.model_validate(self.model_dump())
        return self


class _Toeplitz(_Exact):
    """``ToeplitzForm``."""

    form: Literal["residual", "printed"]
    modes: _Width | None


class _Lightscale(_Known):
    architectures: Annotated[list[str], Field(min_length=1, max_length=1)]
    mixers: Annotated[list[str], Field(min_length=1, max_length=MOST_LAYERS)]
    gate_ranks: dict[str, _Width]
    glu_activation: Literal["none", "silu", "gelu_tanh"]
    norm: Literal["srmsnorm", "rmsnorm", "layernorm"]
    norm_placement: Literal["pre", "post", "both"] = "pre"
    zero_centered_norm: bool = False
    embedding_multiplier: _Positive = 1.0
    final_logit_cap: _Positive | None = None
    tie_word_embeddings: bool
    softmax_attention: _SoftmaxAttention | None = None
    local_attention: _SoftmaxAttention | None = None
    lightnet_causal: bool = True
    lion: dict[str, _Lion] = {}
    pooling: Literal["mean", "first", "last"] = "mean"
    id2label: Annotated[dict[str, str], Field(max_length=1_000_000)] = {}
    """Absent where transformers saved two classes without names."""
    scalar_decay: _ScalarDecay | None = None
    intermediate_size: _WidthOrZero
    forms: dict[str, dict[str, Any]] = {}
    """Fields of the types in ``FORMS``, which are options of the mixers of a run, and are checked as those are."""
    final_norm: bool = True
    toeplitz: _Toeplitz | None = None
    learned_positions: Annotated[int, Field(ge=0, le=MOST_SEQUENCE_TOKENS)] = 0


class _Rope(_Exact):
    """Both what transformers 5 writes, and what 4 wrote as rope_scaling."""

    rope_theta: _Positive | None = None
    rope_type: Literal["default", "llama3", "yarn", "linear"] | None = None
    type: Literal["default", "llama3", "yarn", "linear"] | None = None
    """Its older name."""
    factor: _Positive | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    original_max_position_embeddings: _Tokens | None = None
    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    attention_factor: _Positive | None = None
    truncate: bool | None = None
    mscale: _Positive | None = None
    mscale_all_dim: _Positive | None = None
    partial_rotary_factor: Annotated[float, Field(ge=1, le=1)] | None = None


_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    },
}
"""What transformers takes where a configuration says nothing, by model_type; where it is not null for all of them."""


_SLIDING = "sliding_attention"
_WITH_BIASES = ("llama", "qwen3")
"""Models whose attention_bias is of all projections."""


class _Llama(_Known):
    """What is not said has transformers' default."""

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    num_hidden_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    num_key_value_heads: _Width | None = None
    head_dim: _Width | None = None
    hidden_act: Literal["silu", "linear"] = "silu"
    attention_bias: bool = False
    mlp_bias: Literal[False] = False
    tie_word_embeddings: bool = False
    rope_theta: _Positive | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    sliding_window: Annotated[int, Field(ge=1)] | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def attention(self, path: Path) -> Attention:
        """Its softmax attention. UserError for layers that differ in it."""
        heads = self.num_key_value_heads or self.num_attention_heads
        width = self.head_dim or self.hidden_size // self.num_attention_heads
        rope = self.rope_parameters or self.rope_scaling or _Rope()
        return Attention(
            num_key_value_heads=None if heads == self.num_attention_heads else heads,
            head_dim=None if width * self.num_attention_heads == self.hidden_size else width,
            rope_theta=rope.rope_theta or self.rope_theta or 10000.0,
            rope_scaling=_scaling(rope, path),
            # Qwen2 does not say it: queries, keys and values have biases, and outputs none. Mistral has none.
            bias=(self.attention_bias and self.model_type in _WITH_BIASES) or self.model_type == "qwen2",
            output_bias=self.attention_bias and self.model_type in _WITH_BIASES,
            qk_norm="head" if self.model_type == "qwen3" else "none",
            window=self._window(path),
        )

    def _window(self, path: Path) -> int | None:
        """The window of all layers; one that hides nothing is none."""
        window = self.sliding_window
        if window is None or window >= self.max_position_embeddings:
            return None
        if self.model_type not in ("qwen2", "qwen3"):
            return window if self.model_type == "mistral" else None
        layers = range(self.num_hidden_layers)
        kinds = self.layer_types or [_SLIDING if layer >= self.max_window_layers else "full" for layer in layers]
        if not self.use_sliding_window or _SLIDING not in kinds:
            return None
        if {*kinds} != {_SLIDING}:
            raise UserError(
                f"{path}: some layers have sliding_window = {window} and others none, and lightscale's layers of a "
                f"mixer are alike; for texts up to the window, set max_position_embeddings = {window}"
            )
        return window


def _scaling(rope: _Rope, path: Path) -> RopeScaling | None:
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    # transformers ignores keys of other types.
    values = rope.model_dump(include=set(rope_keys(kind)), exclude_none=True) | {"rope_type": kind}
    if kind == "yarn" and rope.attention_factor is None and rope.mscale and rope.mscale_all_dim and rope.factor:
        # As in DeepSeek's models: two factors by which scores grow, one of which the rotation does not have.
        slow = 0.1 * math.log(max(1.0, rope.factor))
        values["attention_factor"] = (rope.mscale * slow + 1) / (rope.mscale_all_dim * slow + 1)
    return RopeScaling(**checked(RopeScalingOptions, values, path, "rope_parameters").model_dump())


_IN_NO_CLASS = (
    "zero_centered_norm",
    "positions",
    "rope_fraction",
    "output_gate",
    "softmax_scale",
    "attention_logit_cap",
    "attention_sinks",
)
"""Fields of ``Attention`` that no class of transformers has here, unless they are as usual."""


def own_class(shape: Shape) -> str | None:
    """Which of transformers' own models computes the model: Llama, Mistral, Qwen2 or Qwen3; None: none of them."""
    attention = shape.attention
    if {*shape.mixers} != {"llama"} or shape.norm != "rmsnorm" or shape.task != "causal" or not attention.causal:
        return None
    if not shape.final_norm or not shape.intermediate_size:
        return None
    if any(getattr(shape, key) != _USUAL[key] for key in _OF_NORMS):
        return None
    usual = Attention()
    if any(getattr(attention, name) != getattr(usual, name) for name in _IN_NO_CLASS) or attention.qk_norm == "all":
        return None
    only_inputs = attention.bias and not attention.output_bias
    if attention.qk_norm == "head":
        return None if only_inputs else "Qwen3"
    if only_inputs:
        return "Qwen2"
    if attention.window is not None:
        return None if attention.bias else "Mistral"
    # transformers' Llama refuses such widths, whatever head_dim says; without biases Mistral is the same model.
    if shape.hidden_size % shape.num_attention_heads:
        return None if attention.bias else "Mistral"
    return "Llama"


_CLASSES = {
    "causal": ("LightscaleForCausalLM", "AutoModelForCausalLM"),
    "masked": ("LightscaleForMaskedLM", "AutoModelForMaskedLM"),
    "classify": ("LightscaleForSequenceClassification", "AutoModelForSequenceClassification"),
}
"""By task: our class in an export, and transformers' class that finds it."""


def auto_class(shape: Shape) -> str:
    """Which of transformers' classes loads the export of a model."""
    return _CLASSES[shape.task][1]


def has_own_class(shape: Shape) -> bool:
    """Whether the model is one that transformers computes without our code."""
    return own_class(shape) is not None


def tensor_name(shape: Shape, name: str) -> str:
    """What the files of an export call the tensor ``name`` of the plain model."""
    return name.replace(".mixer.", ".self_attn.") if has_own_class(shape) else name


@dataclass(frozen=True, kw_only=True)
class ConfigFacts:
    """What config.json says of a model beside its shape."""

    eot_id: int
    """Begins and ends documents."""
    dtype: str
    """Of most weights, as torch names it, such as "bfloat16"."""
    max_tokens: int
    """The length of sequences that the model was trained on."""
    init_std: float
    """Of the initial weights."""
    classes: Sequence[str] = ()
    """The names of a classifier's classes, as far as they are known."""


def config_of(shape: Shape, facts: ConfigFacts) -> dict[str, Any]:
    """The content of config.json for a plain model of ``shape``."""
    common = {
        "dtype": facts.dtype,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": len(shape.mixers),
        "intermediate_size": shape.intermediate_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "initializer_range": facts.init_std,
        "max_position_embeddings": facts.max_tokens,
        "tie_word_embeddings": shape.tied,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), facts.eot_id),
    }
    if (own := own_class(shape)) is not None:
        attention = shape.attention
        scaling = {"rope_type": "default"} if attention.rope_scaling is None else _set(asdict(attention.rope_scaling))
        windows: dict[str, Any] = {"use_sliding_window": attention.window is not None}
        if attention.window is not None:
            layer_types = [_SLIDING] * len(shape.mixers)
            windows |= {"sliding_window": attention.window, "max_window_layers": 0, "layer_types": layer_types}
        of_class: dict[str, dict[str, Any]] = {
            "Llama": {"attention_bias": attention.bias, "mlp_bias": False},
            "Mistral": {"sliding_window": attention.window},
            "Qwen2": windows,
            "Qwen3": {"attention_bias": attention.bias, **windows},
        }
        return {
            "architectures": [f"{own}ForCausalLM"],
            "model_type": own.lower(),
            **common,
            "num_key_value_heads": attention.num_key_value_heads or shape.num_attention_heads,
            "head_dim": attention.head_dim or shape.hidden_size // shape.num_attention_heads,
            "hidden_act": _ACTIVATIONS[shape.glu_activation],
            **of_class[own],
            "rope_parameters": {
                "rope_theta": attention.rope_theta,
                **scaling,
            },
        }
    module, (own_name, auto_name) = modelling_file.NAME.removesuffix(".py"), _CLASSES[shape.task]
    autos = {"AutoConfig": f"{module}.LightscaleConfig", auto_name: f"{module}.{own_name}"}
    if shape.task == "masked":
        # What was trained to fill masks is fine-tuned to classify.
        own_classifier, auto_classifier = _CLASSES["classify"]
        autos[auto_classifier] = f"{module}.{own_classifier}"
    return {
        "architectures": [own_name],
        "model_type": "lightscale",
        "auto_map": autos,
        **common,
        "mixers": list(shape.mixers),
        "gate_ranks": dict(shape.gate_ranks),
        "glu_activation": shape.glu_activation,
        "norm": shape.norm,
        **{key: value for key in _OF_NORMS if (value := getattr(shape, key)) != _USUAL[key]},
        **({} if shape.attention == Attention() else {"softmax_attention": asdict(shape.attention)}),
        **({} if shape.local_attention == Attention() else {"local_attention": asdict(shape.local_attention)}),
        **({} if shape.lightnet_causal else {"lightnet_causal": False}),
        **({"lion": {name: asdict(options) for name, options in shape.lion.items()}} if shape.lion else {}),
        **(_labels(shape, facts.classes) if shape.task == "classify" else {}),
        **({"scalar_decay": asdict(shape.scalar_decay)} if "decay-attention" in shape.mixers else {}),
        **({"forms": {name: asdict(form) for name, form in shape.forms.items()}} if shape.forms else {}),
        **({} if shape.final_norm else {"final_norm": False}),
        **({} if shape.toeplitz == ToeplitzForm() else {"toeplitz": asdict(shape.toeplitz)}),
        **({"learned_positions": shape.learned_positions} if shape.learned_positions else {}),
    }


def _set(scaling: dict[str, Any]) -> dict[str, Any]:
    """Those keys that say something."""
    usual = asdict(RopeScaling(factor=1.0)) | {"rope_type": None, "factor": None}
    return {key: value for key, value in scaling.items() if value != usual[key]}


def _labels(shape: Shape, classes: Sequence[str]) -> dict[str, Any]:
    """What transformers says of classes; those without a name have its own, LABEL_3."""
    names = [classes[number] if number < len(classes) else f"LABEL_{number}" for number in range(shape.num_labels)]
    return {
        "pooling": shape.pooling,
        "problem_type": "single_label_classification",
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def class_names(path: Path) -> list[str]:
    """The names of the classes that ``path``, the config.json of a classifier's export, has, by number; or none."""
    labels = checked(_Lightscale, _content(path), path).id2label
    unnamed = [f"LABEL_{number}" for number in range(len(labels))]
    names = [labels.get(str(number), unnamed[number]) for number in range(len(labels))]
    return [] if names == unnamed else names


def _content(path: Path) -> dict[str, Any]:
    with open_regular(path, what="the configuration of a model", most_bytes=_MOST_BYTES, follow_links=True) as file:
        return parse_object(file.read(), path)


def read_config(path: Path) -> tuple[Shape, int]:
    """The shape of the plain model that ``path``, a config.json, describes, and the length it was trained on.

    UserError for another architecture, which is named with those that work, and for values that none of them has.
    """
    content = _content(path)
    kind = content.get("model_type")
    known: _Known
    if kind == "lightscale":
        known = own = checked(_Lightscale, content, path)
        shape = _shape(
            known,
            mixers=tuple(own.mixers),
            gate_ranks=own.gate_ranks,
            glu_activation=own.glu_activation,
            norm=own.norm,
            **{key: getattr(own, key) for key in _OF_NORMS},
            attention=Attention() if own.softmax_attention is None else own.softmax_attention.attention(),
            local_attention=Attention() if own.local_attention is None else own.local_attention.attention(),
            scalar_decay=ScalarDecay() if own.scalar_decay is None else ScalarDecay(**own.scalar_decay.model_dump()),
            tied=own.tie_word_embeddings,
            lightnet_causal=own.lightnet_causal,
            lion={name: Lion(**options.model_dump()) for name, options in own.lion.items()},
            forms={name: _form(name, options, own, path) for name, options in own.forms.items()},
            final_norm=own.final_norm,
            toeplitz=ToeplitzForm() if own.toeplitz is None else ToeplitzForm(**own.toeplitz.model_dump()),
            learned_positions=own.learned_positions,
            **_predicted(own, path),
        )
        _check_lion(shape, path)
        _check_encodings(shape, path)
    elif isinstance(kind, str) and kind in _DEFAULTS:
        known = llama = checked(_Llama, _DEFAULTS[kind] | content, path)
        activation = {name: ours for ours, name in _ACTIVATIONS.items()}[llama.hidden_act]
        shape = _shape(
            known,
            mixers=("llama",) * llama.num_hidden_layers,
            glu_activation=activation,
            norm="rmsnorm",
            attention=llama.attention(path),
            tied=llama.tie_word_embeddings,
        )
    else:
        kinds = "lightscale, llama, mistral, qwen2 and qwen3"
        raise UserError(f"{path}: model_type = {shown(repr(kind))}; use {kinds}")
    _check_heads(shape, path)
    return shape, known.max_position_embeddings


def _form(name: str, table: dict[str, Any], own: _Lightscale, path: Path) -> MixerForm:
    """UserError for a mixer that the model does not have, and for what is none of its options."""
    if name not in FORMS or name not in own.mixers:
        raise UserError(
            f"{path}: forms.{shown(name)} is not one of the model's mixers, {', '.join(dict.fromkeys(own.mixers))}"
        )
    usual = {field.name: field.default for field in fields(FORMS[name])}
    options = mixer_options_type(name)
    assert options is not None, name
    for key, value in table.items():
        if key not in usual or (key not in options.model_fields and value != usual[key]):
            known = ", ".join(key for key in usual if key in options.model_fields)
            raise UserError(f"{path}: forms.{name}.{shown(key)} = {shown(repr(value))}; use {known}")
    # Whether they go together with what stands elsewhere.
    elsewhere = {"gate_rank": own.gate_ranks.get(name), "causal": own.lightnet_causal}
    values = {key: value for key, value in (table | elsewhere).items() if key in options.model_fields}
    return form_of(name, checked(options, values, path, "forms", name))


def _check_encodings(shape: Shape, path: Path) -> None:
    """UserError for encodings behind the embedding that no layer asks for."""
    if shape.toeplitz != ToeplitzForm() and not shape.encodes():
        raise UserError(f"{path}: toeplitz describes an encoding that no mixer of the model uses")
    if shape.learned_positions and not {*RELATION_MIXERS} & {*shape.mixers}:
        raise UserError(f"{path}: no mixer of the model uses learned_positions")


def _predicted(own: _Lightscale, path: Path) -> dict[str, Any]:
    tasks = {name: task for task, (name, _) in _CLASSES.items()}
    (name,) = own.architectures
    if name not in tasks:
        raise UserError(f"{path}: architectures = {shown(repr([name]))}; use one of {', '.join(tasks)}")
    if tasks[name] != "classify":
        return {"task": tasks[name]}
    # transformers leaves out what it takes for granted: two classes without names.
    return {"task": "classify", "num_labels": len(own.id2label) or 2, "pooling": own.pooling}


def _check_lion(shape: Shape, path: Path) -> None:
    """UserError where LION's mixers and their forms do not belong together, or a causal task has what reads ahead."""
    mixers = {*shape.mixers} & {*LION_MIXERS}
    if mixers != {*shape.lion}:
        raise UserError(f"{path}: lion describes {', '.join(shape.lion) or 'nothing'}, mixers has {', '.join(mixers)}")
    for name, lion in shape.lion.items():
        if lion.vector_decay and (name != "lion-s" or lion.input_gate):
            raise UserError(
                f"{path}: lion.{name}.vector_decay = true: only lion-s supports it, with input_gate = false"
            )
    if shape.task == "causal" and shape.reads_both_ways():
        raise UserError(f"{path}: a model of the next token, {_CLASSES['causal'][0]}, with layers that read it")


def _check_heads(shape: Shape, path: Path) -> None:
    """UserError for heads that no model can have."""
    heads, attentions = shape.num_attention_heads, shape.attentions()
    has_width = {*shape.mixers} == {name for name, attention in attentions.items() if attention.head_dim is not None}
    if shape.hidden_size % heads and not has_width:
        raise UserError(f"{path}: hidden_size = {shape.hidden_size} is not divisible by num_attention_heads = {heads}")
    for attention in attentions.values():
        if (shared := attention.num_key_value_heads) is not None and heads % shared:
            raise UserError(f"{path}: num_attention_heads = {heads} cannot share num_key_value_heads = {shared}")
        width = attention.head_dim or shape.hidden_size // heads
        rotated = int(width * attention.rope_fraction) if attention.positions == "rope" else 0
        if rotated % 2 and rotated < width:
            raise UserError(f"{path}: {rotated} of {width} channels are rotated; rotary positions need an even number")
        if rotated and width % 2:
            raise UserError(f"{path}: heads of {width} channels; rotary positions need an even number")
    width = shape.hidden_size // heads
    if "decay-attention" in shape.mixers and shape.scalar_decay.positions == "rope" and width % 2:
        raise UserError(f"{path}: heads of {width} channels; rotary positions need an even number")


def _shape(known: _Known, **more: Any) -> Shape:
    return Shape(
        vocab_size=known.vocab_size,
        hidden_size=known.hidden_size,
        num_attention_heads=known.num_attention_heads,
        intermediate_size=known.intermediate_size,
        rms_norm_eps=known.rms_norm_eps,
        **more,
    )
