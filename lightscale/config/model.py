"""[model], the shape of the network: its fields, the pattern of mixers, and the mixers' options in their own types."""

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

from lightscale.config.arithmetic import near_divisor, near_multiple
from lightscale.config.mixers import Direction, known_mixers, mixer_entry, mixer_options_type
from lightscale.config.section import (
    MOST_LAYERS,
    Extent,
    Finite,
    IdsOrZero,
    Positive,
    Section,
    Small,
    Width,
    WidthOrZero,
    error_inside,
)
from lightscale.errors import shortened

_MIXER_ENTRY = re.compile(r"(?P<name>[a-z][a-z0-9_-]*)(\*(?P<count>[1-9][0-9]*))?")


MOST_CHANNELS = 4096
"""Numbers of a pixel of latents."""
Pooling = Literal["mean", "first", "last"]


class HeadConfig(Section):
    """[model.head]: an output layer that predicts one label per document or pair, in place of the next token."""

    num_labels: Annotated[int, Field(ge=2, le=1_000_000)]
    """Number of classes; labels run from 0 to num_labels - 1."""
    pooling: Pooling = "mean"
    """Input of the head: the mean over a document's tokens, or its first or last token."""
    bias: bool = False
    """Whether a bias is added to the logits, as in ViT and BERT; with pairs also in the hidden layer."""
    pairs: bool = False
    """Whether a label is that of a pair of documents, which the model reads separately, as in Long Range Arena's
    retrieval; a hidden layer combines the two."""


class TPEConfig(Section):
    """[model.tpe]: Toeplitz positional encoding after the embedding, for models with cosFormer2 or LightNet."""

    form: Literal["residual", "printed"] = "residual"
    """residual: x + Σ γ λ^τ x with learned weights γ; printed: Σ λ^τ x alone, LightNet's equation 11."""
    modes: Width | None = None
    """Number of decays λ, shared by all channels; none: head_dim."""


class GridConfig(Section):
    """[model.grid]: documents as grids of tokens, such as images: positions have a coordinate per axis."""

    shape: Annotated[list[Width], Field(min_length=1, max_length=8)]
    """Extents of the axes, in tokens, last one fastest: [rows, columns], [frames, rows, columns]."""
    leading_tokens: WidthOrZero = 1
    """Tokens of a document before its grid; a token store writes the end-of-text token there."""

    @cached_property
    def axes(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Tokens from one coordinate of each axis to the next."""
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(self.axes))

    @cached_property
    def document_tokens(self) -> int:
        """Tokens of a document."""
        return self.leading_tokens + math.prod(self.shape)

    @cached_property
    def first_cell(self) -> int:
        """Index in the grid of a document's first token: leading tokens end full slices in front of the first axis."""
        return -self.leading_tokens % self.strides[0]


class PatchesConfig(Section):
    """[model.patches]: images as inputs; the tokens of the grid are patches of pixels (ViT, arXiv 2010.11929)."""

    size: Annotated[list[Extent], Field(min_length=2, max_length=2)]
    """Height and width of a patch, in pixels; times model.grid.shape they are those of the images."""
    overlap: Annotated[int, Field(ge=0, le=256)] = 0
    """Pixels beyond each side of a patch that its token also reads, as with the overlapping patch embedding of PVT v2
    (arXiv 2106.13797); outside the image its edge is repeated. 0: the patch alone, as in ViT."""
    channels: Annotated[int, Field(ge=1, le=MOST_CHANNELS)] = 3
    """Numbers per pixel; 1: grey, 3: RGB, other numbers: of latents."""
    latents: bool = False
    """Whether images are latents: floats of an encoder, which are not scaled to 0 to 1, cut off or rounded."""
    mean: Annotated[list[Finite], Field(default=[0.5], min_length=1, max_length=MOST_CHANNELS)]
    """Subtracted from pixels, which are 0 to 1, or from latents; one number for all channels, or one per channel."""
    std: Annotated[list[Small], Field(default=[0.5], min_length=1, max_length=MOST_CHANNELS)]
    """Divisor of pixels or latents less their mean; as mean."""
    learned_positions: bool = False
    """Whether a learned vector is added to every token, as in ViT; otherwise only mixers and TPE have positions."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise ValueError(
                    f"model.patches.{name} has {len(values)} numbers for {self.channels} channels "
                    f"(model.patches.channels); use 1 or {self.channels} of them"
                )
        if self.latents:
            return self
        if self.channels not in (1, 3):
            raise ValueError(
                f"model.patches.channels = {self.channels}: pixels have 1 (grey) or 3 (RGB); use one of these, or "
                "model.patches.latents = true"
            )
        if not all(0 <= value <= 1 for value in self.mean):
            raise ValueError(f"model.patches.mean = {self.mean}: pixels are 0 to 1; use numbers from 0 to 1")
        return self


class DiffusionConfig(Section):
    """[model.diffusion]: blocks and output of a diffusion transformer (DiT, arXiv 2212.09748), which predict noise."""

    num_labels: Annotated[int, Field(ge=1, le=1_000_000)]
    """Number of classes that images are drawn of; the vector behind theirs stands for no class."""
    timestep_width: Annotated[int, Field(ge=2, le=65_536, multiple_of=2)] = 256
    """Sines and cosines of a timestep, which the conditioning's perceptron reads; even."""


class MuPConfig(Section):
    """[model.mup]: µP, by which the best learning rate of a narrow model is that of a wide one (arXiv 2203.03466)."""

    base_hidden_size: Width
    """Width that learning rate and initial weights are meant for; a model of this width is as without the table. Heads
    are as wide as the model's: only their number differs."""
    base_num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)] | None = None
    """Number of blocks that they are meant for; none: model.num_layers, so that depth changes nothing."""
    depth_exponent: Annotated[float, Field(ge=0.5, le=1)] = 1.0
    """Exponent of base_num_layers / num_layers in what a block adds; 1: CompleteP (arXiv 2505.01618); 0.5: depth-µP."""


class ModelConfig(Section):
    """[model]: the shape of the network."""

    mixer: str | Annotated[list[str], Field(max_length=MOST_LAYERS)] = "tnl"
    """Token mixer of the layers: a name, or a pattern like ["tnl*7", "llama"], repeated up to num_layers."""
    num_layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    """Number of blocks."""
    hidden_size: Width
    """Width of the residual stream (d_model), in channels."""
    num_heads: Width
    """Number of heads; a divisor of hidden_size, unless all mixers have an option head_dim."""
    intermediate_size: WidthOrZero
    """Inner width of the gated linear unit, in channels; 0: blocks hold only the mixer, as in CausalRN."""
    vocab_size: IdsOrZero = 0
    """Rows of the embedding, in tokens, padding included. The largest published vocabularies have 262,144. Required,
    except with model.patches, which has no such rows: 0."""
    tie_word_embeddings: bool = True
    """Whether embedding and output layer share their weight."""
    head: HeadConfig | None = None
    """Table of the output layer for labels of documents, for task.name = "classify"; none: predict tokens."""
    tpe: TPEConfig | None = None
    """Table of a non-default TPE after the embedding; none: the default one, for mixers that use it."""
    grid: GridConfig | None = None
    """Table of grids, for LRPE and TPE by axes (LightNet's MD-LRPE and MD-TPE); none: documents are rows of tokens."""
    patches: PatchesConfig | None = None
    """Table of patches of images, for task.name = "classify-image"; none: tokens are ids."""
    diffusion: DiffusionConfig | None = None
    """Table of a diffusion transformer, for task.name = "diffusion"; none: nothing is conditioned."""
    gated_linear_unit: bool = True
    """Whether blocks have a gated linear unit; false: two linear maps with the activation between them, as in ViT."""
    glu_activation: Literal["none", "silu", "gelu", "gelu_tanh"] = "none"
    """Activation of the gate in the gated linear unit, or between two linear maps; gelu_tanh: GELU by its formula with
    tanh, as in Gemma."""
    mlp_bias: bool = False
    """Whether the linear maps of the gated linear unit, or the two in its place, have biases."""
    norm: Literal["srmsnorm", "rmsnorm", "layernorm"] = "srmsnorm"
    """Norm of each mixer, of each gated linear unit, and at the end. srmsnorm has no weight; layernorm also subtracts
    the mean, without a weight as in CausalRN."""
    norm_elementwise_affine: bool = False
    """Whether layernorm has a weight and a bias, as in ViT (PyTorch's elementwise_affine)."""
    norm_placement: Literal["pre", "post", "both", "by_mixer"] = "pre"
    """Norms in a block: pre, on the inputs of mixer and gated linear unit; post, on their outputs, before they join the
    residual stream (OLMo 2); both (Gemma 2); by_mixer, post with softmax attention, else pre (OLMo Hybrid)."""
    zero_centered_norm: bool = False
    """Whether the norms multiply by 1 + weight, as in Gemma 2 and Qwen3-Next; false: by the weight. With rmsnorm."""
    final_norm: bool = True
    """Whether a norm precedes the output layer; false as in arXiv 2406.16690, equations 7, 11, 15, 19."""
    norm_eps: Small = 1e-6
    """Constant added to the mean square (or variance) in the norms."""
    embedding_multiplier: Positive = 1.0
    """Factor of embedded tokens, rounded to the dtype of the activations; Gemma: sqrt(hidden_size)."""
    final_logit_cap: Positive | None = None
    """Most of a logit, by tanh, as in Gemma 2 (transformers' final_logit_softcapping); none: no limit."""
    init_std: Small = 0.02
    """Standard deviation of the initial weights; for output projections divided by sqrt(2 num_layers), or by
    sqrt(num_layers) in blocks without a gated linear unit."""
    embedding_std: Small | None = None
    """Standard deviation of the embedding and of learned positions; none: init_std. CausalRN's paper uses 1."""
    mup: MuPConfig | None = None
    """Table of µP: initial weights and learning rates by width and depth; none: the same for all shapes."""
    mixer_options: dict[str, SerializeAsAny[Section]] = Field(default={}, validate_default=True)
    """Options of the mixers in use: one table [model.mixer_options.NAME] per mixer with options."""

    @cached_property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.hidden_size // self.num_heads

    def on_grid(self, shape: Sequence[int]) -> Self:
        """The same model for documents of another ``shape`` of their grid."""
        # Anew: a copy would keep what was computed of the other grid.
        table = self.model_dump()
        return type(self).model_validate(table | {"grid": {**table["grid"], "shape": list(shape)}})

    @cached_property
    def image_shape(self) -> tuple[int, int, int] | None:
        """(height, width, channels) of the images that it reads, in pixels; None: it reads ids."""
        if self.patches is None or self.grid is None:
            return None
        height, width = (patch * number for patch, number in zip(self.patches.size, self.grid.shape, strict=True))
        return height, width, self.patches.channels

    @cached_property
    def axes(self) -> int:
        """Axes of positions: 1 without a grid."""
        return 1 if self.grid is None else self.grid.axes

    @cached_property
    def output_std(self) -> float:
        """Standard deviation of the initial weights of output projections, whose results the residual stream sums."""
        # They start smaller, so that its variance does not grow with the number of such sums; with µP that is done by
        # the depth's own factor (models/mup.py).
        layers = self.num_layers if self.mup is None else self.mup.base_num_layers or self.num_layers
        return self.init_std / math.sqrt((2 if self.intermediate_size else 1) * layers)

    @cached_property
    def width_ratio(self) -> float:
        """Width over that of model.mup; 1: there is no such table."""
        return 1.0 if self.mup is None else self.hidden_size / self.mup.base_hidden_size

    @cached_property
    def depth_ratio(self) -> float:
        """Number of blocks over that of model.mup; 1: there is none."""
        base = None if self.mup is None else self.mup.base_num_layers
        return 1.0 if base is None else self.num_layers / base

    @property
    def ties_weights(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.tie_word_embeddings and self.head is None and self.diffusion is None

    @property
    def input_multiplier(self) -> float:
        """Factor of embedded tokens: embedding_multiplier, and where µP gives a tied embedding the output layer's
        weights, the one that undoes it at the input."""
        return self.embedding_multiplier * (self.width_ratio if self.ties_weights else 1.0)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The mixer's name for each layer, first to last; length num_layers."""
        period = _mixer_period(self.mixer)
        return tuple(period * (self.num_layers // len(period)))

    def layer_options(self, layer: int) -> Section:
        """Options of the mixer of layer ``layer`` (from 0), in the mixer's own type."""
        return self.mixer_options.get(self.layers[layer], Section())

    def direction(self, layer: int) -> Direction:
        """Direction in which layer ``layer`` (from 0) reads a document."""
        directions = mixer_entry(self.layers[layer]).directions
        if len(directions) == 1:
            (only,) = directions
            return only
        causal: bool = getattr(self.layer_options(layer), "causal")  # noqa: B009 - of the mixer's own type
        return "causal" if causal else "bidirectional"

    @field_validator("mixer")
    @classmethod
    def _known(cls, mixer: str | list[str]) -> str | list[str]:
        for name in dict.fromkeys(_mixer_period(mixer)):
            mixer_entry(name)
        return mixer

    @field_validator("mixer_options", mode="plain")
    @classmethod
    def _typed_options(cls, tables: Any, info: ValidationInfo) -> dict[str, Section]:
        """Of every mixer in use its options, complete with defaults, in its own type."""
        # Fields are checked in their order: `mixer` is there, unless it is wrong, and then that is the error to show.
        if "mixer" not in info.data:
            return {}
        if not isinstance(tables, dict):
            raise PydanticKnownError("dict_type")
        used = dict.fromkeys(_mixer_period(info.data["mixer"]))
        errors = [_unused_options(name, tables[name], list(used)) for name in tables if name not in used]
        typed = {}
        for name in used:
            try:
                options = (mixer_options_type(name) or Section).model_validate(tables.get(name, {}))
            except ValidationError as error:
                # Under the mixer's name, so that messages name the whole key.
                errors += [error_inside(name, dict(item)) for item in error.errors(include_url=False)]
                continue
            assert isinstance(options, Section), f"{type(options)} of mixer {name} is no Section"
            if type(options).model_fields:
                typed[name] = options
        if errors:
            raise ValidationError.from_exception_data("mixer_options", errors)
        return typed

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_embedding()
        self._check_diffusion()
        if self.zero_centered_norm and self.norm != "rmsnorm":
            raise ValueError(
                f'model.zero_centered_norm = true with model.norm = "{self.norm}", which has no weight; use '
                'model.norm = "rmsnorm"'
            )
        if self.norm_elementwise_affine and self.norm != "layernorm":
            raise ValueError(
                f'model.norm_elementwise_affine = true with model.norm = "{self.norm}": it is an option of layernorm; '
                'use model.norm = "layernorm"'
            )
        self._check_linear_unit()
        if self.final_logit_cap is not None and self.head is not None:
            raise ValueError(
                f"model.final_logit_cap = {self.final_logit_cap} with model.head: logits of labels have no limit; "
                "remove model.final_logit_cap"
            )
        if self.depth_ratio != 1 and self.norm_placement != "pre":
            raise ValueError(
                f"model.mup.base_num_layers = {self.mup and self.mup.base_num_layers} with model.norm_placement = "
                f'"{self.norm_placement}": norms behind a block undo the factor of its outputs; use '
                'model.norm_placement = "pre", or base_num_layers = "none"'
            )
        has_width = (getattr(self.mixer_options.get(name), "head_dim", None) for name in {*self.layers})
        if self.hidden_size % self.num_heads and not all(has_width):
            raise ValueError(
                f"model.hidden_size = {self.hidden_size} is not divisible by model.num_heads = {self.num_heads}; "
                f"use {near_divisor(self.hidden_size, self.num_heads)} heads"
            )
        if self.head_dim % self.axes:
            raise ValueError(
                f"model.grid.shape has {self.axes} axes, which share the {self.head_dim} channels of a head evenly "
                "(model.hidden_size / model.num_heads); use a head width that is a multiple of "
                f"{self.axes}, such as {near_multiple(self.head_dim, self.axes)}"
            )
        period = len(_mixer_period(self.mixer))
        if self.num_layers % period:
            raise ValueError(
                f"model.num_layers = {self.num_layers} is not divisible by the {period} layers of the "
                f"pattern model.mixer = {self.mixer}; use {near_multiple(self.num_layers, period)}"
            )
        return self

    def _check_linear_unit(self) -> None:
        """Raise ValueError for two linear maps that are one, and for options of a unit that is not there."""
        if self.intermediate_size == 0 and (not self.gated_linear_unit or self.mlp_bias):
            key = "mlp_bias = true" if self.mlp_bias else "gated_linear_unit = false"
            raise ValueError(
                f"model.{key} with model.intermediate_size = 0, where blocks hold only the mixer; remove it"
            )
        if not self.gated_linear_unit and self.glu_activation == "none":
            raise ValueError(
                'model.gated_linear_unit = false with model.glu_activation = "none": two linear maps in a row are one; '
                'use model.glu_activation = "gelu"'
            )

    def _check_embedding(self) -> None:
        """Raise ValueError unless there is one kind of inputs: ids, or patches on a grid."""
        if self.patches is None:
            if not self.vocab_size:
                raise ValueError("model.vocab_size is missing; it must be a number of tokens, or use [model.patches]")
            return
        if self.vocab_size:
            raise ValueError(
                f"model.vocab_size = {self.vocab_size} with model.patches: images have no ids; use model.vocab_size = 0"
            )
        if self.grid is None or self.grid.axes != 2:
            found = "no model.grid" if self.grid is None else f"model.grid.shape = {self.grid.shape}"
            raise ValueError(
                f"model.patches with {found}: patches stand in rows and columns; use model.grid.shape = [ROWS, COLUMNS]"
            )
        if self.head is not None and self.head.pairs:
            raise ValueError("model.head.pairs = true with model.patches: images are classified one by one; use false")
        if self.patches.overlap and self.diffusion is not None:
            raise ValueError(
                f"model.patches.overlap = {self.patches.overlap} with model.diffusion: each pixel is drawn once; use 0"
            )
        if self.head is None and self.diffusion is None:
            raise ValueError(
                "model.patches without model.head: images are classified; set model.head.num_labels, or "
                "model.diffusion.num_labels to draw them"
            )
        if self.embedding_multiplier != 1:
            raise ValueError(
                f"model.embedding_multiplier = {self.embedding_multiplier} with model.patches: it is a factor of "
                "embedded ids; use 1.0"
            )

    def _check_diffusion(self) -> None:
        """Raise ValueError unless blocks and inputs are those that timestep and class can condition."""
        if self.diffusion is None:
            return
        checks = [
            (self.patches is None, "model.patches is missing: images are drawn by patches; add the table"),
            (self.head is not None, "model.head is set: noise is predicted, and no label; remove the table"),
            (
                self.grid is not None and self.grid.leading_tokens > 0,
                "model.grid.leading_tokens: an image has patches alone; use 0",
            ),
            (
                self.norm_placement != "pre",
                f'model.norm_placement = "{self.norm_placement}": the norms before mixer and gated linear unit are '
                'shifted and scaled; use "pre"',
            ),
            (
                self.intermediate_size == 0,
                "model.intermediate_size = 0: a block has a mixer and a gated linear unit; use 1 or more",
            ),
            (
                not self.final_norm,
                "model.final_norm = false: the norm before the output is shifted and scaled; use true",
            ),
            (self.final_logit_cap is not None, "model.final_logit_cap: noise has no limit; remove it"),
            (self.mup is not None, "model.mup: the matrices of modulations and timesteps have no factors; remove it"),
        ]
        for wrong, fault in checks:
            if wrong:
                raise ValueError(f"model.diffusion with {fault}")


def _unused_options(name: str, table: object, used: list[str]) -> InitErrorDetails:
    """The error of options for a mixer that no layer has."""
    if not isinstance(table, dict):
        text = f"use a table [model.mixer_options.NAME] with NAME a mixer of the model: {', '.join(used)}"
    else:
        what = "no layer uses this mixer" if name in known_mixers() else "no mixer has this name"
        near = difflib.get_close_matches(name, used, n=1)
        text = f"{what}; did you mean {near[0]}?" if near else f"{what}; the model has {', '.join(used)}"
    error = PydanticCustomError("value_error", "{error}", {"error": text})
    return InitErrorDetails(type=error, loc=(name,), input=table)


def _mixer_period(mixer: str | Iterable[str]) -> list[str]:
    """["tnl*2", "llama"] -> ["tnl", "tnl", "llama"]."""
    entries = [mixer] if isinstance(mixer, str) else list(mixer)
    period: list[str] = []
    for entry in entries:
        match = _MIXER_ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f'"{shortened(entry)}" must be NAME or NAME*COUNT, like "tnl" or "tnl*7"')
        # By its digits first: it may have thousands.
        digits = match["count"] or "1"
        if len(digits) > len(str(MOST_LAYERS)) or len(period) + int(digits) > MOST_LAYERS:
            raise ValueError(f'"{shortened(entry)}" gives a pattern of more than {MOST_LAYERS:_} layers')
        period += [match["name"]] * int(digits)
    if not period:
        raise ValueError('must name a mixer; use a name or a list of names, like "tnl"')
    return period
