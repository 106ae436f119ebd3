"""config.json of an export: what transformers reads of a model's shape, written and read back strictly."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lightscale.config.mixers import mixer_options_type
from lightscale.config.section import MOST_LAYERS, MOST_SEQUENCE_TOKENS
from lightscale.errors import UserError
from lightscale.exchange.files import modelling_file, own_vit
from lightscale.exchange.files.config_fields import (
    Exact,
    Known,
    Positive,
    Share,
    Tokens,
    Width,
    WidthOrZero,
    shape_of,
    sizes_of,
)
from lightscale.exchange.files.own_classes import (
    OWN_TYPES,
    own_class,
    own_keys,
    own_type,
    read_own,
    tensor_places,
)
from lightscale.exchange.files.weights import TensorRows, form_of
from lightscale.exchange.plain.decay_mixer import ScalarDecay
from lightscale.exchange.plain.lion import LION_MIXERS, LionForm
from lightscale.exchange.plain.model import FORMS, MixerForm, Shape
from lightscale.exchange.plain.patches import ImageInputs
from lightscale.exchange.plain.relation import RELATION_MIXERS
from lightscale.exchange.plain.softmax_mixer import Attention, RopeScaling
from lightscale.exchange.plain.toeplitz import ToeplitzForm
from lightscale.files import open_regular
from lightscale.models.specs.decay_attention import DecayAttentionOptions
from lightscale.models.specs.options import RopeScalingOptions
from lightscale.training.checkpoints.reading import parse_object, shown
from lightscale.training.checkpoints.schema import checked

NAME = "config.json"
_MOST_BYTES = 1 << 22
_OF_BLOCKS = (
    *("norm_placement", "zero_centered_norm", "embedding_multiplier", "final_logit_cap", "gated_linear_unit"),
    *("mlp_bias", "norm_elementwise_affine", "head_bias"),
)
"""Fields of ``Shape`` that config.json has where they are not as usual."""
_USUAL = {field.name: field.default for field in fields(Shape)}


class _SoftmaxAttention(Exact):
    """``Attention``, as our own exports write it."""

    num_key_value_heads: Width | None
    head_dim: Width | None
    rope_theta: Positive
    rope_scaling: RopeScalingOptions | None
    bias: bool
    output_bias: bool
    causal: bool = True
    qk_norm: Literal["none", "head", "all"] = "none"
    zero_centered_norm: bool = False
    positions: Literal["rope", "none"] = "rope"
    rope_fraction: Share = 1.0
    output_gate: bool = False
    window: Tokens | None = None
    softmax_scale: Positive | None = None
    attention_logit_cap: Positive | None = None
    attention_sinks: bool = False

    def attention(self) -> Attention:
        scaling = None if self.rope_scaling is None else RopeScaling(**self.rope_scaling.model_dump())
        return Attention(**self.model_dump(exclude={"rope_scaling"}), rope_scaling=scaling)


class _Lion(Exact):
    """``LionForm``, as our own exports write it."""

    feature_map: Literal["elu", "silu", "none"]
    scale: bool
    eps: Annotated[float, Field(ge=0, le=100)]
    gate: Literal["leave", "enter"]
    input_gate: bool
    vector_decay: bool = False
    attention_bias: Literal["none", "qkv", "all"] = "none"
    patch_order: Literal["raster", "alternating"] = "raster"


class _ScalarDecay(Exact):
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


class _Toeplitz(Exact):
    """``ToeplitzForm``."""

    form: Literal["residual", "printed"]
    modes: Width | None


class _Image(Exact):
    """``ImageInputs``."""

    grid: Annotated[list[Width], Field(min_length=2, max_length=2)]
    patch_size: Annotated[list[Width], Field(min_length=2, max_length=2)]
    overlap: WidthOrZero = 0
    num_channels: Literal[1, 3]
    leading_tokens: WidthOrZero
    image_mean: Annotated[list[float], Field(min_length=1, max_length=3)]
    image_std: Annotated[list[Positive], Field(min_length=1, max_length=3)]
    latents: Literal[False] = False

    def form(self) -> ImageInputs:
        (rows, columns), (height, width) = self.grid, self.patch_size
        return ImageInputs(
            grid=(rows, columns),
            patch_size=(height, width),
            overlap=self.overlap,
            num_channels=self.num_channels,
            leading_tokens=self.leading_tokens,
            image_mean=tuple(self.image_mean),
            image_std=tuple(self.image_std),
        )


class _Lightscale(Known):
    architectures: Annotated[list[str], Field(min_length=1, max_length=1)]
    mixers: Annotated[list[str], Field(min_length=1, max_length=MOST_LAYERS)]
    gate_ranks: dict[str, Width]
    vocab_size: WidthOrZero
    """0: of images."""
    glu_activation: Literal["none", "silu", "gelu", "gelu_tanh"]
    gated_linear_unit: bool = True
    mlp_bias: bool = False
    norm_elementwise_affine: bool = False
    head_bias: bool = False
    image: _Image | None = None
    norm: Literal["srmsnorm", "rmsnorm", "layernorm"]
    norm_placement: Literal["pre", "post", "both", "by_mixer"] = "pre"
    zero_centered_norm: bool = False
    embedding_multiplier: Positive = 1.0
    final_logit_cap: Positive | None = None
    tie_word_embeddings: bool
    softmax_attention: _SoftmaxAttention | None = None
    local_attention: _SoftmaxAttention | None = None
    lightnet_causal: bool = True
    lion: dict[str, _Lion] = Field(default={})
    pooling: Literal["mean", "first", "last"] = "mean"
    id2label: dict[str, str] = Field(default={}, max_length=1_000_000)
    """Absent where transformers saved two classes without names."""
    scalar_decay: _ScalarDecay | None = None
    intermediate_size: WidthOrZero
    forms: dict[str, dict[str, Any]] = Field(default={})
    """Fields of the types in ``FORMS``, which are options of the mixers of a run, and are checked as those are."""
    final_norm: bool = True
    toeplitz: _Toeplitz | None = None
    learned_positions: Annotated[int, Field(ge=0, le=MOST_SEQUENCE_TOKENS)] = 0


class _Labels(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    id2label: dict[str, str] = Field(default={}, max_length=1_000_000)


_CLASSES = {
    "causal": ("LightscaleForCausalLM", "AutoModelForCausalLM"),
    "masked": ("LightscaleForMaskedLM", "AutoModelForMaskedLM"),
    "classify": ("LightscaleForSequenceClassification", "AutoModelForSequenceClassification"),
    "classify-image": ("LightscaleForImageClassification", "AutoModelForImageClassification"),
}
"""By task: our class in an export, and transformers' class that finds it."""

_POOLING = {"causal": "last", "masked": "mean"}
"""The states of a row that a classifier sees which is fine-tuned from a model of the task."""


def auto_class(shape: Shape) -> str:
    """Which of transformers' classes loads the export of a model."""
    return _CLASSES[shape.task][1]


def has_own_class(shape: Shape) -> bool:
    """Whether the model is one that transformers computes without our code."""
    return own_vit.computes(shape) or own_type(shape) is not None


def written_places(shape: Shape) -> dict[str, TensorRows]:
    """Of every tensor of the plain model, where the files of its export for transformers have it."""
    return own_vit.places(shape) if own_vit.computes(shape) else tensor_places(shape, own_type(shape))


@dataclass(frozen=True, kw_only=True)
class ConfigFacts:
    """Facts of config.json beside the shape of the model."""

    eot_id: int
    """Begins and ends documents."""
    dtype: str
    """Of most weights, as torch names it, such as "bfloat16"."""
    max_tokens: int
    """The length of sequences that the model was trained on."""
    init_std: float
    """Of the initial weights."""
    classes: Sequence[str] = ()
    """Names of a classifier's classes, where the run has them."""


def config_of(shape: Shape, facts: ConfigFacts) -> dict[str, Any]:
    """The content of config.json for a plain model of ``shape``."""
    common = {
        "dtype": facts.dtype,
        **sizes_of(shape),
        "initializer_range": facts.init_std,
        "max_position_embeddings": facts.max_tokens,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), facts.eot_id),
    }
    if shape.image is not None:
        # Without tokens that begin and end documents.
        common = {key: value for key, value in common.items() if not key.endswith("_token_id")}
        del common["max_position_embeddings"]
    if own_vit.computes(shape):
        return own_vit.config_of(shape, common) | _labels(shape, facts.classes)
    if (kind := own_type(shape)) is not None:
        keys = own_keys(shape, kind)
        # A window that is longer than all sequences hides nothing in training, and would be taken for none.
        widest = max(attention.window or 0 for attention in shape.attentions().values())
        most = max(facts.max_tokens, widest + 1)
        architecture = {"architectures": [f"{own_class(kind)}ForCausalLM"], "model_type": kind}
        return {**architecture, **common, **keys, "max_position_embeddings": most}
    module, (own_name, _) = modelling_file.NAME.removesuffix(".py"), _CLASSES[shape.task]
    base = "LightscaleModel" if shape.image is None else "LightscaleImageModel"
    autos = {"AutoConfig": "LightscaleConfig", "AutoModel": base}
    # Every model of texts can be fine-tuned to classify.
    tasks = (shape.task, "classify") if shape.image is None else (shape.task,)
    autos |= {auto: own for own, auto in (_CLASSES[task] for task in tasks)}
    return {
        "architectures": [own_name],
        "model_type": "lightscale",
        "auto_map": {auto: f"{module}.{own}" for auto, own in autos.items()},
        **common,
        "mixers": list(shape.mixers),
        "gate_ranks": dict(shape.gate_ranks),
        "glu_activation": shape.glu_activation,
        "norm": shape.norm,
        **{key: value for key in _OF_BLOCKS if (value := getattr(shape, key)) != _USUAL[key]},
        **({} if shape.attention == Attention() else {"softmax_attention": asdict(shape.attention)}),
        **({} if shape.local_attention == Attention() else {"local_attention": asdict(shape.local_attention)}),
        **({} if shape.lightnet_causal else {"lightnet_causal": False}),
        **({"lion": {name: asdict(options) for name, options in shape.lion.items()}} if shape.lion else {}),
        **(_labels(shape, facts.classes) if shape.num_labels else {"pooling": _POOLING[shape.task]}),
        **({} if shape.image is None else {"image": asdict(shape.image)}),
        **({"scalar_decay": asdict(shape.scalar_decay)} if "decay-attention" in shape.mixers else {}),
        **({"forms": {name: asdict(form) for name, form in shape.forms.items()}} if shape.forms else {}),
        **({} if shape.final_norm else {"final_norm": False}),
        **({} if shape.toeplitz == ToeplitzForm() else {"toeplitz": asdict(shape.toeplitz)}),
        **({"learned_positions": shape.learned_positions} if shape.learned_positions else {}),
    }


def _labels(shape: Shape, classes: Sequence[str]) -> dict[str, Any]:
    """transformers' keys of classes; a class without a name has a default one, LABEL_3."""
    names = [classes[number] if number < len(classes) else f"LABEL_{number}" for number in range(shape.num_labels)]
    return {
        "pooling": shape.pooling,
        "problem_type": "single_label_classification",
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def class_names(path: Path) -> list[str]:
    """The names of the classes that ``path``, the config.json of a classifier's export, has, by number; or none."""
    labels = checked(_Labels, _content(path), path).id2label
    unnamed = [f"LABEL_{number}" for number in range(len(labels))]
    names = [labels.get(str(number), unnamed[number]) for number in range(len(labels))]
    return [] if names == unnamed else names


def _content(path: Path) -> dict[str, Any]:
    with open_regular(path, what="the configuration of a model", most_bytes=_MOST_BYTES, follow_links=True) as file:
        return parse_object(file.read(), path)


def read_config(path: Path) -> tuple[Shape, int, str | None]:
    """Of the model that ``path``, a config.json, describes: the plain shape, the length it was trained on, its type.

    The last is one of ``OWN_TYPES``, or ViT's; None: of our own class.

    UserError for another architecture, which is named with those that work, and for values that none of them has.
    """
    content = _content(path)
    kind = content.get("model_type")
    if kind == "lightscale":
        own = checked(_Lightscale, content, path)
        shape, most = _lightscale_shape(own, path), own.max_position_embeddings
        if shape.image is not None:
            most = shape.image.tokens
    elif isinstance(kind, str) and kind in OWN_TYPES:
        shape, most = read_own(content, path)
    elif kind == own_vit.TYPE:
        shape = own_vit.read(content, path)
        assert shape.image is not None
        most = shape.image.tokens
    else:
        kinds = ", ".join(("lightscale", own_vit.TYPE, *OWN_TYPES[:-1]))
        raise UserError(f"{path}: model_type = {shown(repr(kind))}; use {kinds} or {OWN_TYPES[-1]}")
    _check_heads(shape, path)
    return shape, most, None if kind == "lightscale" else kind


def _lightscale_shape(own: _Lightscale, path: Path) -> Shape:
    shape = shape_of(
        own,
        mixers=tuple(own.mixers),
        gate_ranks=own.gate_ranks,
        glu_activation=own.glu_activation,
        norm=own.norm,
        **{key: getattr(own, key) for key in _OF_BLOCKS},
        attention=Attention() if own.softmax_attention is None else own.softmax_attention.attention(),
        local_attention=Attention() if own.local_attention is None else own.local_attention.attention(),
        scalar_decay=ScalarDecay() if own.scalar_decay is None else ScalarDecay(**own.scalar_decay.model_dump()),
        tied=own.tie_word_embeddings,
        lightnet_causal=own.lightnet_causal,
        lion={name: LionForm(**options.model_dump()) for name, options in own.lion.items()},
        forms={name: _form(name, options, own, path) for name, options in own.forms.items()},
        final_norm=own.final_norm,
        toeplitz=ToeplitzForm() if own.toeplitz is None else ToeplitzForm(**own.toeplitz.model_dump()),
        learned_positions=own.learned_positions,
        **_predicted(own, path),
    )
    _check_lion(shape, path)
    _check_encodings(shape, path)
    return shape


def _form(name: str, table: dict[str, Any], own: _Lightscale, path: Path) -> MixerForm:
    """UserError for a mixer that the model does not have, and for unknown options."""
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
    elsewhere = {"gate_rank": own.gate_ranks.get(name)} | (
        {"causal": own.lightnet_causal} if name == "lightnet" else {}
    )
    values = {key: value for key, value in (table | elsewhere).items() if key in options.model_fields}
    return form_of(name, checked(options, values, path, "forms", name))


def _check_encodings(shape: Shape, path: Path) -> None:
    """UserError for encodings behind the embedding that no layer asks for."""
    if shape.toeplitz != ToeplitzForm() and not shape.encodes():
        raise UserError(f"{path}: toeplitz describes an encoding that no mixer of the model uses")
    if shape.image is None and shape.learned_positions and not {*RELATION_MIXERS} & {*shape.mixers}:
        raise UserError(f"{path}: no mixer of the model uses learned_positions")


def _predicted(own: _Lightscale, path: Path) -> dict[str, Any]:
    tasks = {name: task for task, (name, _) in _CLASSES.items()}
    (name,) = own.architectures
    if name not in tasks:
        raise UserError(f"{path}: architectures = {shown(repr([name]))}; use one of {', '.join(tasks)}")
    _check_image(own, tasks[name], path)
    if not tasks[name].startswith("classify"):
        return {"task": tasks[name]}
    # transformers leaves out what it takes for granted: two classes without names.
    found = {"task": tasks[name], "num_labels": len(own.id2label) or 2, "pooling": own.pooling}
    return found if own.image is None else {**found, "image": own.image.form()}


def _check_image(own: _Lightscale, task: str, path: Path) -> None:
    """UserError for a model of images without these, one of texts with them, and means of other channels."""
    if (own.image is None) != (own.vocab_size > 0) or (own.image is not None) != (task == "classify-image"):
        raise UserError(
            f"{path}: image, vocab_size = {own.vocab_size} and architectures = {own.architectures} do not go together; "
            f"{_CLASSES['classify-image'][0]} has image and no ids, and others have ids"
        )
    if own.image is None:
        return
    tokens = own.image.form().tokens
    if own.learned_positions not in (0, tokens) and not {*RELATION_MIXERS} & {*own.mixers}:
        raise UserError(f"{path}: learned_positions = {own.learned_positions}, and an image has {tokens} tokens; use 0")
    for key, values in (("image_mean", own.image.image_mean), ("image_std", own.image.image_std)):
        if len(values) not in (1, own.image.num_channels):
            raise UserError(f"{path}: image.{key} has {len(values)} numbers for {own.image.num_channels} channels")


def _check_lion(shape: Shape, path: Path) -> None:
    """UserError where LION's mixers and their forms do not belong together, or a causal task has what reads ahead."""
    mixers = {*shape.mixers} & {*LION_MIXERS}
    if mixers != {*shape.lion}:
        raise UserError(f"{path}: lion describes {', '.join(shape.lion) or 'nothing'}, mixers has {', '.join(mixers)}")
    for name, lion in shape.lion.items():
        if lion.patch_order != "raster" and (shape.image is None or name == "lion-lit"):
            why = "lion-lit has no decays" if name == "lion-lit" else "the model reads no images"
            raise UserError(f"{path}: lion.{name}.patch_order = {lion.patch_order!r}: {why}; use 'raster'")
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
