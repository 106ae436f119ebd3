"""Which rows of a checkpoint's tensors are which tensor of an export; one table for both directions.

A run keeps the keys and values of a mixer in one matrix, head by head, and the two halves of a gated linear unit above
each other; transformers keeps each apart. So a tensor of an export is some ranges of the rows of one tensor of the run,
in order, and nothing is computed: what was exported in fp32 comes back bitwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn
from torch.overrides import TorchFunctionMode

from lightscale.config.fields import toml_value
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.exchange.plain.decay_mixer import ScalarDecay
from lightscale.exchange.plain.lion import LionForm
from lightscale.exchange.plain.model import (
    BLOCK_NORMS,
    FORMS,
    MIXER_NAMES,
    SOFTMAX_MIXERS,
    MixerForm,
    PlainModel,
    Shape,
    model_of,
)
from lightscale.exchange.plain.patches import ImageInputs
from lightscale.exchange.plain.relation import RelationForm
from lightscale.exchange.plain.softmax_mixer import Attention, RopeScaling
from lightscale.exchange.plain.toeplitz import ToeplitzForm
from lightscale.models.accounting import block_norms, norm_parameters, norm_placement
from lightscale.models.registry import mixer_spec, shared_specs
from lightscale.models.specs.decay_attention import DecayAttentionOptions
from lightscale.models.specs.gated import gate_rank
from lightscale.models.specs.interface import EmbeddingPartSpec
from lightscale.models.specs.options import (
    LightNetOptions,
    LionOptions,
    LLaMAOptions,
    LowRankGateOptions,
    RelationOptions,
    llama_heads,
)
from lightscale.models.specs.positions import LearnedPositionsSpec, num_positions
from lightscale.models.specs.relation import post_norm, pre_norm

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""The run's names of weights with a row for each id. They have padding rows, which exports leave out."""
_ROLES = {
    "q": "q_proj.weight",
    "k": "k_proj.weight",
    "v": "v_proj.weight",
    "o": "o_proj.weight",
    "forget": "f_proj.weight",
    "forget_bias": "f_proj.bias",
    "gate_down": "gate_down.weight",
    "gate_up": "gate_up.weight",
    "gate": "gate_proj.weight",
    "decay_down": "decay_down.weight",
    "decay_up": "decay_up.weight",
    "angles": "theta",
    "gate_bias": "gate_proj.bias",
    "q_bias": "q_proj.bias",
    "k_bias": "k_proj.bias",
    "v_bias": "v_proj.bias",
    "o_bias": "o_proj.bias",
    "a": "a_proj.weight",
    "a_bias": "a_proj.bias",
    "b": "b_proj.weight",
    "beta": "b_proj.weight",
    "forget_down": "forget_down.weight",
    "forget_up": "forget_up.weight",
    "output_norm": "o_norm",
    "q_norm": "q_norm.weight",
    "k_norm": "k_norm.weight",
    **{name: name for name in ("sinks", "decay_logit", "log_rate", "A_log", "dt_bias", "q_conv", "k_conv", "v_conv")},
}
"""Names in the plain mixers, by the roles in the training ones (``MixerSpec.roles``)."""
_PARTS = {
    "positions.table": "model.positions.weight",
    "tpe.decay_logit": "model.tpe.decay_logit",
    "tpe.gamma": "model.tpe.gamma",
    "lower_bounds.table": "model.lower_bounds.table",
    "patches.weight": "model.embed_patches.projection.weight",
    "patches.bias": "model.embed_patches.projection.bias",
    "patches.leading": "model.embed_patches.leading",
    "conditioning.time_in": "conditioning.time_in.weight",
    "conditioning.time_in_bias": "conditioning.time_in.bias",
    "conditioning.time_out": "conditioning.time_out.weight",
    "conditioning.time_out_bias": "conditioning.time_out.bias",
    "conditioning.labels": "conditioning.labels.weight",
}
"""What the plain model calls the parameters of parts that a model holds once."""
_ELSEWHERE = frozenset({"gate_rank", "causal", "positions"})
"""Options of mixers that stand in ``Shape`` outside of its ``forms``."""
_OF_HEADS = frozenset({"num_key_value_heads", "head_dim", "rope_scaling"})
_SAME_IN_LLAMA = frozenset({field.name for field in fields(Attention)} & LLaMAOptions.model_fields.keys()) - _OF_HEADS
"""Options of LLaMA's attention that ``Attention`` has with the same values."""
_OF_LLAMA = _SAME_IN_LLAMA | _OF_HEADS | {"attention_bias"}
"""Those of LLaMA's attention."""
_OF_MODEL = frozenset(
    {
        *("mixer", "num_layers", "hidden_size", "num_heads", "intermediate_size", "vocab_size", "tie_word_embeddings"),
        *("head", "tpe", "glu_activation", "norm", "final_norm", "norm_eps", "mixer_options"),
        *("norm_placement", "zero_centered_norm", "embedding_multiplier", "final_logit_cap"),
        # Of initial weights and steps; what it changes in the forward pass is part of the embedding's multiplier.
        "mup",
        *("gated_linear_unit", "mlp_bias", "norm_elementwise_affine"),
    }
)
"""What of a model's configuration is read here."""
_WIDE = ("theta", "decay_logit", "log_rate", "A_log", "dt_bias", "o_norm", "table", "sinks")


@dataclass(frozen=True, kw_only=True)
class TensorRows:
    """Rows of the tensor ``key`` of a run, by its name in the model."""

    key: str
    ranges: tuple[tuple[int, int], ...] | None = None
    """First and last + 1 of each; None: all rows there are."""

    def part(self, first: int, count: int) -> "TensorRows":
        """``count`` of these rows, from the row ``first`` among them."""
        if self.ranges is None:
            return TensorRows(key=self.key, ranges=((first, first + count),))
        found, at = [], 0
        for start, stop in self.ranges:
            low, high = max(first, at), min(first + count, at + stop - start)
            if low < high:
                found.append((start + low - at, start + high - at))
            at += stop - start
        return TensorRows(key=self.key, ranges=tuple(found))


def run_shape(config: RunConfig, *, num_ids: int) -> Shape:
    """The shape of the plain model of a run whose tokenizer has ``num_ids``; see ``shape_of``."""
    # The mask is the id behind the tokenizer's last.
    is_masked = config.task.name == "masked"
    return shape_of(config.model, vocab_size=num_ids + is_masked, task="masked" if is_masked else "causal")


def shape_of(model: ModelConfig, *, vocab_size: int, task: str = "causal") -> Shape:
    """The shape of the plain model of ``model``, of whose embedding the first ``vocab_size`` rows are in use.

    ``task`` is that of a model which predicts tokens: causal or masked.

    UserError where one of its mixers, or something else that its options say, has no plain form.
    """
    if unknown := [name for name in dict.fromkeys(model.layers) if name not in MIXER_NAMES]:
        raise UserError(f"model.mixer: {unknown[0]} cannot be loaded or exported; use one of {', '.join(MIXER_NAMES)}")
    _require_known(model)
    ranks, attentions, scalar_decay = {}, dict[str, Attention](), ScalarDecay()
    lion, lightnet_causal, forms = dict[str, LionForm](), True, dict[str, MixerForm]()
    for layer, name in enumerate(model.layers):
        options = model.layer_options(layer)
        if name in FORMS and (form := form_of(name, options)) != FORMS[name]():
            forms[name] = form
        has_rank = getattr(options, "output", "gated") == "gated" and not getattr(options, "full_rank_gate", False)
        if isinstance(options, LowRankGateOptions) and has_rank:
            ranks[name] = gate_rank(model, layer)
        if isinstance(options, LightNetOptions):
            lightnet_causal = options.causal
        elif isinstance(options, LionOptions):
            lion[name] = LionForm(**options.model_dump(exclude={"initial_decay"}))
        elif isinstance(options, DecayAttentionOptions):
            scalar_decay = ScalarDecay(**options.model_dump(exclude={"gate_rank", "initial_decay"}))
        elif isinstance(options, LLaMAOptions):
            attentions[name] = _attention(model, layer, options)
    return Shape(
        # Images have no ids.
        vocab_size=vocab_size if model.patches is None else 0,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        intermediate_size=model.intermediate_size,
        mixers=model.layers,
        gate_ranks=ranks,
        glu_activation=model.glu_activation,
        gated_linear_unit=model.gated_linear_unit,
        mlp_bias=model.mlp_bias,
        norm=model.norm,
        norm_elementwise_affine=model.norm_elementwise_affine,
        norm_placement=model.norm_placement,
        zero_centered_norm=model.zero_centered_norm,
        embedding_multiplier=model.input_multiplier,
        final_logit_cap=model.final_logit_cap,
        rms_norm_eps=model.norm_eps,
        attention=attentions.get("llama", Attention()),
        local_attention=attentions.get("llama-local", Attention()),
        scalar_decay=scalar_decay,
        tied=model.tie_word_embeddings,
        lightnet_causal=lightnet_causal,
        lion=lion,
        forms=forms,
        final_norm=model.final_norm,
        toeplitz=ToeplitzForm() if model.tpe is None else ToeplitzForm(**model.tpe.model_dump()),
        learned_positions=num_positions(model) if LearnedPositionsSpec in shared_specs(model) else 0,
        **_predicted(model, task),
    )


def form_of(name: str, options: BaseModel) -> MixerForm:
    """What is otherwise in the mixer ``name`` of ``FORMS`` with ``options``, which have fields of the same names."""
    if isinstance(options, RelationOptions):
        own = options.model_dump(include={"form", "activation", "eps", "expansion"})
        return RelationForm(**own, pre_norm=pre_norm(options), post_norm=post_norm(options))
    return FORMS[name](**options.model_dump(include={field.name for field in fields(FORMS[name])}))


def _predicted(model: ModelConfig, task: str) -> dict[str, Any]:
    head = model.head
    if (noise := model.diffusion) is not None:
        of_noise = {"num_labels": noise.num_labels, "timestep_width": noise.timestep_width}
        return {**of_noise, "task": "diffusion", "image": image_inputs(model)}
    if head is None:
        return {"task": task}
    of_head = {"num_labels": head.num_labels, "pooling": head.pooling, "head_bias": head.bias}
    image = image_inputs(model)
    return {**of_head, "task": "classify"} if image is None else {**of_head, "task": "classify-image", "image": image}


def image_inputs(model: ModelConfig) -> ImageInputs | None:
    """How ``model`` reads images; None: it reads ids."""
    if model.patches is None or model.grid is None:
        return None
    (rows, columns), (height, width) = model.grid.shape, model.patches.size
    return ImageInputs(
        grid=(rows, columns),
        patch_size=(height, width),
        overlap=model.patches.overlap,
        num_channels=model.patches.channels,
        leading_tokens=model.grid.leading_tokens,
        image_mean=tuple(model.patches.mean),
        image_std=tuple(model.patches.std),
        latents=model.patches.latents,
    )


def _require_known(model: ModelConfig) -> None:
    """UserError for a formula that the plain model lacks."""
    # A grid without images has no plain form.
    of_model = _OF_MODEL if model.patches is None else _OF_MODEL | {"grid", "patches", "diffusion"}
    tables: list[tuple[str, BaseModel, frozenset[str]]] = [("model", model, of_model)]
    for name in dict.fromkeys(model.layers):
        if name in FORMS or name in SOFTMAX_MIXERS:
            known = _OF_LLAMA if name in SOFTMAX_MIXERS else _ELSEWHERE | {one.name for one in fields(FORMS[name])}
            tables.append((f"model.mixer_options.{name}", model.layer_options(model.layers.index(name)), known))
    if model.head is not None:
        tables.append(("model.head", model.head, frozenset({"num_labels", "pooling", "bias"})))
    for table, values, known in tables:
        for key, field in type(values).model_fields.items():
            # The standard deviations draw initial weights.
            if key not in known and not key.endswith("_std") and (value := getattr(values, key)) != field.default:
                raise UserError(
                    f"{table}.{key} = {toml_value(value)} cannot be loaded or exported; use {toml_value(field.default)}"
                )


def _attention(model: ModelConfig, layer: int, options: LLaMAOptions) -> Attention:
    heads, width = llama_heads(model, layer)
    scaling = options.rope_scaling
    return Attention(
        # One form for one shape, so that shapes can be compared.
        num_key_value_heads=None if heads == model.num_heads else heads,
        head_dim=None if width * model.num_heads == model.hidden_size else width,
        rope_scaling=None if scaling is None else RopeScaling(**scaling.model_dump()),
        bias=options.attention_bias != "none",
        output_bias=options.attention_bias == "all",
        **options.model_dump(include=set(_SAME_IN_LLAMA)),
    )


def exported_tensors(model: ModelConfig, *, vocab_size: int) -> dict[str, TensorRows]:
    """Every tensor of the plain form of ``model`` by its name there, in the order in which files hold them.

    ``vocab_size``: how many rows of the embedding are in use.
    """
    return dict(_exported(model, vocab_size))


@dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive rows of a tensor of a run, and where an export has them."""

    rows: range
    name: str | None
    """The export's tensor; None: no export has these rows, which are padding of the vocabulary."""
    first: int = 0
    """Of the export's tensor, the row that is the first of ``rows``."""


def stored_parts(model: ModelConfig, *, vocab_size: int) -> dict[str, list[Part]]:
    """The inverse of ``exported_tensors``: every tensor of a run by its name, as parts in the order of its rows.

    Args:
        model: of the run.
        vocab_size: how many rows of its embedding are in use.
    """
    sizes, found = tensor_shapes(shape_of(model, vocab_size=vocab_size)), dict[str, list[Part]]()
    for name, rows in exported_tensors(model, vocab_size=vocab_size).items():
        first = 0
        for start, stop in rows.ranges or ((0, sizes[name][0]),):
            found.setdefault(rows.key, []).append(Part(rows=range(start, stop), name=name, first=first))
            first += stop - start
    if model.patches is None and model.vocab_size > vocab_size:
        # Where labels are predicted, the output layer has a row for each of these.
        for key in found.keys() & {*(_VOCABULARY if model.head is None else _VOCABULARY[:1])}:
            found[key].append(Part(rows=range(vocab_size, model.vocab_size), name=None))
    return {key: sorted(parts, key=lambda part: part.rows.start) for key, parts in found.items()}


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The shapes of the same tensors, as the plain model has them."""
    return {name: tuple(weight.shape) for name, weight in empty_model(shape).named_parameters()}


def empty_model(shape: Shape) -> PlainModel:
    """The plain model, whose matrices have neither memory nor values yet."""
    with _NoMemory():
        return model_of(shape)


class _NoMemory(TorchFunctionMode):
    """What is made empty and then initialised has no memory; the few numbers that are computed are.

    On the meta device these would be computed by parts of PyTorch that take a second to import.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        if func is torch.empty:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def kept_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Of the tensor ``name`` in a model of ``dtype``: angles, decays and bounds are fp32 at least, as in training."""
    return torch.promote_types(dtype, torch.float32) if name.endswith(_WIDE) else dtype


def _exported(model: ModelConfig, vocab_size: int) -> Iterator[tuple[str, TensorRows]]:
    embedding, output = (TensorRows(key=key, ranges=((0, vocab_size),)) for key in _VOCABULARY)
    if model.patches is None:
        yield "model.embed_tokens.weight", embedding
    for part in shared_specs(model):
        there = "embedding." if issubclass(part, EmbeddingPartSpec) else ""
        for name in (f"{part.name}.{parameter}" for parameter in part.parameters_of(model)):
            yield _PARTS[name], TensorRows(key=f"{there}{name}")
    of_norm = norm_parameters(model)
    for layer, mixer in enumerate(model.layers):
        there, here = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        names = BLOCK_NORMS[norm_placement(model, mixer)]
        for name, own in zip(names, block_norms(model, mixer), strict=False):
            for kind in of_norm if own is not None else ():
                yield f"{here}{name}.{kind}", TensorRows(key=f"{there}{own}.{kind}")
        for role, rows in mixer_spec(mixer).roles(model, layer).items():
            key = f"{there}self_attention.{rows.parameter}"
            yield f"{here}mixer.{_ROLES[role]}", TensorRows(key=key, ranges=rows.ranges)
        yield from _linear_unit(model, there, here)
        for kind in ("weight", "bias") if model.diffusion is not None else ():
            yield f"{here}modulation.{kind}", TensorRows(key=f"{there}modulation.{kind}")
    for kind in of_norm if model.final_norm else ():
        yield f"model.norm.{kind}", TensorRows(key=f"decoder.final_layernorm.{kind}")
    if model.head is not None:
        for kind in ("weight", "bias") if model.head.bias else ("weight",):
            yield f"score.{kind}", TensorRows(key=f"output_layer.{kind}")
    elif model.diffusion is not None:
        for kind in ("weight", "bias"):
            yield f"modulation.{kind}", TensorRows(key=f"output_layer.modulation.{kind}")
            yield f"proj_out.{kind}", TensorRows(key=f"output_layer.{kind}")
    elif not model.tie_word_embeddings:
        yield "lm_head.weight", output


def _linear_unit(model: ModelConfig, there: str, here: str) -> Iterator[tuple[str, TensorRows]]:
    """Tensors of the gated linear unit of a layer, or of the two maps in its place."""
    if not model.intermediate_size:
        return
    inner, kinds = model.intermediate_size, ("weight", "bias") if model.mlp_bias else ("weight",)
    for kind in kinds:
        both = f"{there}mlp.linear_fc1.{kind}"
        if model.gated_linear_unit:
            yield f"{here}mlp.gate_proj.{kind}", TensorRows(key=both, ranges=((0, inner),))
            yield f"{here}mlp.up_proj.{kind}", TensorRows(key=both, ranges=((inner, 2 * inner),))
        else:
            yield f"{here}mlp.up_proj.{kind}", TensorRows(key=both)
        yield f"{here}mlp.down_proj.{kind}", TensorRows(key=f"{there}mlp.linear_fc2.{kind}")
