"""The model: embedding, blocks of mixer and gated linear unit, norm, output layer of what it was trained to predict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.exchange.plain.decay_mixer import DecayMixer, ScalarDecay
from lightscale.exchange.plain.delta_mixer import DELTA_MIXERS, DeltaForm
from lightscale.exchange.plain.diffusion import ConditionEmbedding, ModulationMap, modulated
from lightscale.exchange.plain.lion import LION_MIXERS, LionForm
from lightscale.exchange.plain.mixers import (
    CosFormer2Mixer,
    GatedForm,
    HGRN2Form,
    HGRN2Mixer,
    LightNetForm,
    LightNetMixer,
    State,
    TNLForm,
    TNLMixer,
)
from lightscale.exchange.plain.operators import wide_dtype
from lightscale.exchange.plain.patches import (
    ImageInputs,
    PatchMap,
    alternating_orders,
    coordinates,
    image_inputs_from,
    interpolated,
    pixels_of,
)
from lightscale.exchange.plain.relation import RELATION_MIXERS, RelationForm
from lightscale.exchange.plain.softmax_mixer import Attention, SoftmaxMixer, attention_from
from lightscale.exchange.plain.toeplitz import ToeplitzEncoding, ToeplitzForm
from lightscale.exchange.plain.units import (
    BoundTable,
    GatedUnit,
    LabelScores,
    Norm,
    Perceptron,
    PositionTable,
    TokenEmbedding,
    pooled,
    soft_capped,
)

SOFTMAX_MIXERS = ("llama", "llama-local")
"""Two kinds of layers that attend by softmax, each with a shape of its own."""
MIXER_NAMES = (
    *("tnl", "hgrn2", "cosformer2", "lightnet", "decay-attention"),
    *(*SOFTMAX_MIXERS, *LION_MIXERS, *RELATION_MIXERS, *DELTA_MIXERS),
)
"""What ``Shape.mixers`` can name."""
MixerForm = GatedForm | HGRN2Form | RelationForm | DeltaForm
FORMS: dict[str, type[MixerForm]] = {
    "tnl": TNLForm,
    "cosformer2": GatedForm,
    "lightnet": LightNetForm,
    "hgrn2": HGRN2Form,
    **dict.fromkeys(RELATION_MIXERS, RelationForm),
    **dict.fromkeys(DELTA_MIXERS, DeltaForm),
}
"""The type of what can be otherwise in a mixer, ``Shape.forms``, by its name."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a model."""

    vocab_size: int
    """Rows of the embedding; where masks are filled, the last one is the mask's, which is never predicted."""
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    """Of the gated linear units; 0: blocks are the mixer alone."""
    mixers: Sequence[str]
    """The mixer of each layer, first to last; see ``MIXER_NAMES``."""
    gate_ranks: Mapping[str, int] = field(default_factory=dict)
    """Inner width of the output gate, by mixer; hidden_size / num_attention_heads where it is not said."""
    glu_activation: str = "none"
    """Of the gate in the gated linear units, or between two linear maps: none, silu, gelu or gelu_tanh."""
    gated_linear_unit: bool = True
    """Whether blocks have a gated linear unit; false: two linear maps with the activation between them."""
    mlp_bias: bool = False
    """Whether these maps have biases."""
    norm: str = "srmsnorm"
    """srmsnorm, which has no weight, rmsnorm, or layernorm."""
    norm_elementwise_affine: bool = False
    """Whether layernorm has a weight and a bias."""
    norm_placement: str = "pre"
    """Norms in a block: pre, on the inputs of mixer and gated linear unit; post, on their outputs; both; by_mixer, post
    with softmax attention and pre with others."""
    zero_centered_norm: bool = False
    """Whether rmsnorm multiplies by 1 + weight."""
    embedding_multiplier: float = 1.0
    """Factor of embedded tokens."""
    final_logit_cap: float | None = None
    """Most of a logit, by tanh; None: no limit."""
    rms_norm_eps: float = 1e-6
    attention: Attention = field(default_factory=Attention)
    """Of the layers "llama", which attend by softmax."""
    local_attention: Attention = field(default_factory=Attention)
    """Of the layers "llama-local", a second kind of these."""
    scalar_decay: ScalarDecay = field(default_factory=ScalarDecay)
    """Of the layers that have one."""
    tied: bool = True
    """Whether the output layer is the embedding."""
    lightnet_causal: bool = True
    """Whether LightNet's layers read up to each token; otherwise the whole row."""
    lion: Mapping[str, LionForm] = field(default_factory=dict)
    """The form of LION's mixers, by their names."""
    forms: Mapping[str, MixerForm] = field(default_factory=dict)
    """Of the other mixers those that are not as usual, by their names; see ``FORMS``."""
    final_norm: bool = True
    """Whether a norm stands before the output layer."""
    toeplitz: ToeplitzForm = field(default_factory=ToeplitzForm)
    """Of the positional encoding that cosFormer2 and LightNet ask for."""
    learned_positions: int = 0
    """Rows of a table of positions, which is added to the embedding; 0: none."""
    task: str = "causal"
    """What is predicted: causal, the next token; masked, tokens that were hidden; classify, a label of the row;
    classify-image, a label of the image; diffusion, the noise in an image."""
    num_labels: int = 0
    """Classes, of a classifier, or that images are drawn of."""
    timestep_width: int = 0
    """Sines and cosines of a timestep, of a model that predicts noise."""
    pooling: str = "mean"
    """What a classifier sees of a row: the mean of its tokens' states, or that of the first or last."""
    head_bias: bool = False
    """Whether its output layer has a bias."""
    image: ImageInputs | None = None
    """Of a model that reads images, how; None: it reads token ids."""

    def reads_both_ways(self) -> bool:
        """Whether a layer reads what comes behind a token; such a model has no states, and cannot continue a text."""
        whole = {*LION_MIXERS, "bi-rn"}
        if not self.lightnet_causal:
            whole.add("lightnet")
        whole.update(name for name, form in self.forms.items() if not getattr(form, "causal", True))
        whole.update(name for name, attention in self.attentions().items() if not attention.causal)
        return bool(whole & {*self.mixers})

    def attentions(self) -> dict[str, Attention]:
        """Those of the softmax layers that the model has, by mixer."""
        both = zip(SOFTMAX_MIXERS, (self.attention, self.local_attention), strict=True)
        return {name: attention for name, attention in both if name in self.mixers}

    def encodes(self) -> bool:
        """Whether a layer asks for the positional encoding behind the embedding."""
        lightnet = self.forms.get("lightnet", LightNetForm())
        assert isinstance(lightnet, LightNetForm), type(lightnet)
        return "cosformer2" in self.mixers or ("lightnet" in self.mixers and lightnet.tpe)


def shape_from(table: Mapping[str, Any]) -> Shape:
    """The shape with the fields of ``table``, which are as JSON has them: nested ones as tables; None: as usual."""
    read: dict[str, Callable[[Any], Any]] = {
        "mixers": tuple,
        "attention": attention_from,
        "local_attention": attention_from,
        "scalar_decay": lambda own: ScalarDecay(**own),
        "lion": lambda own: {name: LionForm(**options) for name, options in own.items()},
        "forms": lambda own: {name: FORMS[name](**options) for name, options in own.items()},
        "toeplitz": lambda own: ToeplitzForm(**own),
        "image": image_inputs_from,
    }
    given = {key: value for key, value in table.items() if value is not None}
    return Shape(**{key: read[key](value) if key in read else value for key, value in given.items()})


def block_norm(shape: Shape) -> Norm:
    """The norm of blocks and of the model's end."""
    kind = {"srmsnorm": {}, "rmsnorm": {"weight": True}, "layernorm": {"centered": True}}[shape.norm]
    if shape.norm_elementwise_affine:
        kind |= {"weight": True, "bias": True}
    return Norm(shape.hidden_size, eps=shape.rms_norm_eps, zero_centered=shape.zero_centered_norm, **kind)


BLOCK_NORMS: dict[str, tuple[str, str, str, str]] = {
    "pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "post": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "both": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}
"""By a block's placement transformers' names of the norms before and behind the mixer, before and behind the gated
linear unit; empty: there is none."""


def make_mixer(shape: Shape, layer: int) -> nn.Module:
    """The mixer of layer ``layer`` (from 0)."""
    name, sizes = shape.mixers[layer], (shape.hidden_size, shape.num_attention_heads)
    rank, eps = shape.gate_ranks.get(name), shape.rms_norm_eps
    form: Any = shape.forms.get(name)
    match name:
        case "tnl":
            return TNLMixer(*sizes, layer=layer, num_layers=len(shape.mixers), form=form, gate_rank=rank, eps=eps)
        case "cosformer2":
            return CosFormer2Mixer(*sizes, form=form, gate_rank=rank, eps=eps)
        case "lightnet":
            return LightNetMixer(*sizes, form=form, gate_rank=rank, causal=shape.lightnet_causal, eps=eps)
        case "hgrn2":
            return HGRN2Mixer(*sizes, form=form, eps=eps)
        case "llama" | "llama-local":
            return SoftmaxMixer(*sizes, attention=shape.attentions()[name], eps=eps)
        case "decay-attention":
            return DecayMixer(*sizes, form=shape.scalar_decay, gate_rank=rank, eps=eps)
    if name in DELTA_MIXERS:
        of_gate = {} if rank is None else {"gate_rank": rank}
        return DELTA_MIXERS[name](*sizes, form=form, **of_gate)
    if name in LION_MIXERS:
        return LION_MIXERS[name](*sizes, lion=shape.lion.get(name), eps=eps)
    if name in RELATION_MIXERS:
        return RELATION_MIXERS[name](shape.hidden_size, form=form)
    raise ValueError(f"unknown mixer {name!r}; use one of {', '.join(MIXER_NAMES)}")


class Block(nn.Module):
    """x += mixer(norm x); x += gated unit(norm x), where there is one; norms may stand on the outputs, or on both."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.has_unit = shape.intermediate_size > 0
        placement = shape.norm_placement
        if placement == "by_mixer":
            placement = "post" if shape.mixers[layer] in SOFTMAX_MIXERS else "pre"
        self.norms = BLOCK_NORMS[placement][: 4 if self.has_unit else 2]
        for name in filter(None, self.norms):
            self.add_module(name, block_norm(shape))
        self.mixer = make_mixer(shape, layer)
        self.reads_raw = getattr(self.mixer, "reads_raw", False)
        self.of_images = getattr(self.mixer, "of_images", ())
        if self.has_unit:
            of_unit: dict[str, Any] = {"activation": shape.glu_activation, "bias": shape.mlp_bias}
            unit = GatedUnit if shape.gated_linear_unit else Perceptron
            self.mlp = unit(shape.hidden_size, shape.intermediate_size, **of_unit)

    def normed(self, x: Tensor, place: int) -> Tensor:
        """x by the norm at a place of ``BLOCK_NORMS``, where there is one."""
        return self.get_submodule(self.norms[place])(x) if self.norms[place] else x

    def forward(
        self, x: Tensor, state: State | None = None, mask: Tensor | None = None, **of_model: Tensor
    ) -> tuple[Tensor, State]:
        """x: (b, n, d) -> the same and the mixer's state. ``of_model``: what a mixer takes from the model."""
        mixed, left = self.mix(self.normed(x, 0), x, state, mask, **of_model)
        x = x + self.normed(mixed, 1)
        return (x + self.normed(self.mlp(self.normed(x, 2)), 3) if self.has_unit else x), left

    def mix(
        self, normed: Tensor, x: Tensor, state: State | None, mask: Tensor | None, **of_model: Tensor
    ) -> tuple[Tensor, State]:
        """The mixer's output of ``normed``, and its state; x: the stream, which some mixers read too."""
        if self.reads_raw:
            of_model["raw"] = x
        for name in ("coordinates", "orders"):
            if name not in self.of_images:
                of_model.pop(name, None)
        found: tuple[Tensor, State] = self.mixer(normed, state, mask, **of_model)
        return found


class DiffusionBlock(Block):
    """x += g_1 mixer((1 + a_1) norm x + b_1); x += g_2 unit((1 + a_2) norm x + b_2), of each image (adaLN-Zero)."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__(shape, layer)
        self.modulation = ModulationMap(shape.hidden_size, 6)

    def forward(
        self, x: Tensor, state: State | None = None, mask: Tensor | None = None, **of_model: Tensor
    ) -> tuple[Tensor, State]:
        """As ``Block``; ``of_model`` has the conditioning, (b, d)."""
        shift, scale, gate, *of_unit = self.modulation.vectors(of_model.pop("conditioning"))
        mixed, left = self.mix(modulated(self.normed(x, 0), shift, scale), x, state, mask, **of_model)
        x = x + gate * mixed
        shift, scale, gate = of_unit
        return x + gate * self.mlp(modulated(self.normed(x, 2), shift, scale)), left


class Decoder(nn.Module):
    """Token ids, or their embeddings, to activations behind the last norm.

    Args:
        shape: of the model.
        of_base: arguments of the next base class of a subclass.
    """

    def __init__(self, shape: Shape, *of_base: Any) -> None:
        super().__init__(*of_base)
        self.mixers = tuple(shape.mixers)
        if shape.image is None:
            rows = shape.vocab_size
            self.embed_tokens = TokenEmbedding(rows, shape.hidden_size, multiplier=shape.embedding_multiplier)
        else:
            self.embed_patches = PatchMap(shape.image, shape.hidden_size)
        d, self.positions, self.tpe, self.lower_bounds = shape.hidden_size, None, None, None
        axes = 1 if shape.image is None else 2
        if shape.learned_positions:
            self.positions = PositionTable(shape.learned_positions, d)
        if shape.encodes():
            modes = shape.toeplitz.modes or d // shape.num_attention_heads
            self.tpe = ToeplitzEncoding(d, modes, printed=shape.toeplitz.form == "printed", axes=axes)
        if "hgrn2" in self.mixers:
            hgrn2 = shape.forms.get("hgrn2", HGRN2Form())
            assert isinstance(hgrn2, HGRN2Form), type(hgrn2)
            self.lower_bounds = BoundTable(len(self.mixers), d, kind=hgrn2.lower_bounds)
        block = DiffusionBlock if shape.task == "diffusion" else Block
        self.layers = nn.ModuleList(block(shape, layer) for layer in range(len(self.mixers)))
        self.norm: nn.Module = nn.Identity()
        if shape.final_norm:
            self.norm = block_norm(shape)

    def forward(
        self,
        x: Tensor,
        states: Sequence[State] | None = None,
        mask: Tensor | None = None,
        trace: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[State]]:
        """Read on by some tokens.

        Args:
            x: ids (b, n) int64, or embeddings (b, n, d).
            states: what the call before gave; None: the rows begin here.
            mask: (b, n) bool, the real tokens; None: all.
            trace: a list that gets the input of each layer and then the activations, (b, n, d) each.

        Returns:
            Activations (b, n, d), and a state for each layer behind that of the positional encodings.
        """
        if not x.is_floating_point():
            x = self.embed_tokens(x)
        before: Sequence[State | None] = [None] * (1 + len(self.layers)) if states is None else states
        after: list[State] = [{}]
        if self.positions is not None:
            x, left = self.positions.encode(x, before[0], mask)
            after[0].update(left)
        if self.tpe is not None:
            x, left = self.tpe(x, before[0], mask)
            after[0].update(left)
        return self.layers_output(x, before, after, mask, trace)

    def layers_output(
        self,
        x: Tensor,
        before: Sequence[State | None],
        after: list[State],
        mask: Tensor | None = None,
        trace: list[Tensor] | None = None,
        **of_all: Tensor,
    ) -> tuple[Tensor, list[State]]:
        """The layers and the last norm, of embedded and encoded tokens; ``of_all``: what all mixers are offered."""
        bounds = None if self.lower_bounds is None else self.lower_bounds()
        for number, layer in enumerate(self.layers):
            of_model = dict(of_all)
            if bounds is not None and self.mixers[number] == "hgrn2":
                of_model["lower_bound"] = bounds[number]
            if trace is not None:
                trace.append(x)
            x, state = self.layer_output(layer, x, before[number + 1], mask, **of_model)
            after.append(state)
        x = self.norm(x)
        if trace is not None:
            trace.append(x)
        return x, after

    def layer_output(
        self, layer: nn.Module, x: Tensor, state: State | None, mask: Tensor | None, **of_model: Tensor
    ) -> tuple[Tensor, State]:
        """See ``Block.forward``. A subclass can compute it twice instead of keeping its activations."""
        found: tuple[Tensor, State] = layer(x, state, mask, **of_model)
        return found


class CausalModel(nn.Module):
    """Token ids to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = None if shape.tied else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(
        self, x: Tensor, states: Sequence[State] | None = None, mask: Tensor | None = None, *, last_only: bool = False
    ) -> tuple[Tensor, list[State]]:
        """As ``Decoder``, with logits (b, n, V), or those of the last token (b, 1, V), for activations."""
        hidden, after = self.model(x, states, mask)
        output = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = F.linear(hidden[:, -1:] if last_only else hidden, output.weight)
        return soft_capped(logits, self.shape.final_logit_cap), after


class MaskedModel(nn.Module):
    """Token ids, some of them the mask, to logits of what was there."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = None if shape.tied else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: (b, n), or embeddings; mask: (b, n) bool, the real tokens -> (b, n, V - 1), as the mask is no answer."""
        output = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return soft_capped(F.linear(self.model(x, None, mask)[0], output.weight[:-1]), self.shape.final_logit_cap)


class Classifier(nn.Module):
    """Token ids to logits of the row's label."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.score = LabelScores(shape.hidden_size, shape.num_labels, bias=shape.head_bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: (b, n), or their embeddings; mask: (b, n) bool, the real tokens -> (b, labels), fp32 at least."""
        logits: Tensor = self.score(pooled(self.model(x, None, mask)[0], mask, self.shape.pooling))
        return logits


class ImageDecoder(Decoder):
    """Pixels of images to activations behind the last norm."""

    def pixels_output(self, pixel_values: Tensor, *, interpolate: bool = False, **of_all: Tensor) -> Tensor:
        """pixel_values: (b, channels, height, width), scaled and normalised -> (b, n, d); ``of_all``: for all layers.

        ValueError for images of another size than in training, unless ``interpolate``: learned positions are
        interpolated, others are coordinates.
        """
        x, grid = self.embed_patches(pixel_values, any_size=interpolate)
        if self.positions is not None:
            table = self.positions.weight
            x = x + (
                table[: grid.tokens] if grid == self.embed_patches.image else interpolated(table, self.image, grid)
            )
        if self.tpe is not None:
            x = self.tpe.along_axes(x, grid)
        states: list[State | None] = [None] * (1 + len(self.layers))
        places, orders = coordinates(grid, x.device), alternating_orders(grid, x.device)
        return self.layers_output(x, states, [{}], None, None, coordinates=places, orders=orders, **of_all)[0]

    @property
    def image(self) -> ImageInputs:
        """That of training."""
        return self.embed_patches.image


class ImageClassifier(nn.Module):
    """Pixels of images to logits of their labels."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = ImageDecoder(shape)
        self.score = LabelScores(shape.hidden_size, shape.num_labels, bias=shape.head_bias)

    def forward(self, pixel_values: Tensor, *, interpolate: bool = False) -> Tensor:
        """As ``ImageDecoder.pixels_output``, to (b, labels), fp32 at least."""
        hidden = self.model.pixels_output(pixel_values, interpolate=interpolate)
        logits: Tensor = self.score(pooled(hidden, None, self.shape.pooling))
        return logits


class ImageDenoiser(nn.Module):
    """Noised pixels of images, timesteps and classes to predictions of the noise: a diffusion transformer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = ImageDecoder(shape)
        self.conditioning = ConditionEmbedding(shape.hidden_size, shape.timestep_width, shape.num_labels)
        self.modulation = ModulationMap(shape.hidden_size, 2)
        self.proj_out = nn.Linear(shape.hidden_size, self.model.embed_patches.projection.in_features)

    def forward(self, pixel_values: Tensor, timesteps: Tensor, classes: Tensor) -> Tensor:
        """pixel_values: (b, channels, height, width), scaled and noised -> the same shape, fp32 at least.

        Args:
            pixel_values: of images of the size of training; ValueError for others.
            timesteps, classes: (b,) int64; the class ``num_labels`` is none.
        """
        conditioning = self.conditioning(timesteps, classes)
        hidden = self.model.pixels_output(pixel_values, conditioning=conditioning)
        predicted = self.proj_out(modulated(hidden, *self.modulation.vectors(conditioning)))
        return pixels_of(predicted.to(wide_dtype(predicted)), self.model.image)


PlainModel = CausalModel | MaskedModel | Classifier | ImageClassifier | ImageDenoiser


def model_of(shape: Shape) -> PlainModel:
    """The model of the task that ``shape`` names."""
    match shape.task:
        case "causal":
            return CausalModel(shape)
        case "masked":
            return MaskedModel(shape)
        case "classify":
            return Classifier(shape)
        case "classify-image":
            return ImageClassifier(shape)
        case "diffusion":
            return ImageDenoiser(shape)
    raise ValueError(f"unknown task {shape.task!r}; use causal, masked, classify, classify-image or diffusion")
