"""The model: embedding, blocks of mixer and gated linear unit, norm, output layer of what it was trained to predict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.exchange.plain.decay_mixer import DecayMixer, ScalarDecay
from lightscale.exchange.plain.delta_mixer import DELTA_MIXERS, DeltaForm
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
    ToeplitzEncoding,
    ToeplitzForm,
    lower_bounds,
)
from lightscale.exchange.plain.operators import rms_norm, token_positions, wide_dtype
from lightscale.exchange.plain.relation import RELATION_MIXERS, RelationForm
from lightscale.exchange.plain.softmax_mixer import Attention, SoftmaxMixer

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
    """Of the gate in the gated linear units: none, silu or gelu_tanh."""
    norm: str = "srmsnorm"
    """srmsnorm, which has no weight, rmsnorm, or layernorm, which has none."""
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
    """What is predicted: causal, the next token; masked, tokens that were hidden; classify, a label of the row."""
    num_labels: int = 0
    """Classes, of a classifier."""
    pooling: str = "mean"
    """What a classifier sees of a row: the mean of its tokens' states, or that of the first or last."""

    def reads_both_ways(self) -> bool:
        """Whether a layer reads what comes behind a token; such a model has no states, and cannot continue a text."""
        whole = {*LION_MIXERS, "bi-rn"}
        if not self.lightnet_causal:
            whole.add("lightnet")
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


class Norm(nn.Module):
    """RMS norm over the last dim, with a weight or without; ``centered``: of x less its mean, LayerNorm's.

    ``zero_centered``: times 1 + weight, not the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-6,
        weight: bool = False,
        centered: bool = False,
        zero_centered: bool = False,
    ) -> None:
        super().__init__()
        self.eps, self.centered, self.zero_centered = eps, centered, zero_centered
        self.weight: nn.Parameter | None
        initial = torch.zeros(hidden_size) if zero_centered else torch.ones(hidden_size)
        self.register_parameter("weight", nn.Parameter(initial) if weight else None)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, d) -> (…, d)"""
        weight: Tensor | None = self.weight
        if weight is not None and self.zero_centered:
            weight = 1 + weight.to(wide_dtype(x))
        if not self.centered:
            return rms_norm(x, weight, self.eps)
        wide = x.to(wide_dtype(x))
        return rms_norm(wide - wide.mean(-1, keepdim=True), weight, self.eps).to(x.dtype)


def block_norm(shape: Shape) -> Norm:
    """The norm of blocks and of the model's end."""
    kind = {"srmsnorm": {}, "rmsnorm": {"weight": True}, "layernorm": {"centered": True}}[shape.norm]
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


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(logits / cap), rounded once; None: the logits."""
    if cap is None:
        return logits
    return (cap * torch.tanh(logits.to(wide_dtype(logits)) / cap)).to(logits.dtype)


class GatedUnit(nn.Module):
    """The gated linear unit, W_down (act(x W_gate) * x W_up); ``activation`` none, silu or gelu_tanh."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: str = "none") -> None:
        super().__init__()
        if activation not in ("none", "silu", "gelu_tanh"):
            raise ValueError(f"activation {activation!r} must be none, silu or gelu_tanh")
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, d) -> (…, d)"""
        gate, up = (y.to(wide_dtype(x)) for y in (self.gate_proj(x), self.up_proj(x)))
        if self.activation == "silu":
            gate = F.silu(gate)
        elif self.activation == "gelu_tanh":
            gate = F.gelu(gate, approximate="tanh")
        # Rounded once, as in training.
        out: Tensor = self.down_proj((gate * up).to(x.dtype))
        return out


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
        if self.has_unit:
            self.mlp = GatedUnit(shape.hidden_size, shape.intermediate_size, activation=shape.glu_activation)

    def normed(self, x: Tensor, place: int) -> Tensor:
        """x by the norm at a place of ``BLOCK_NORMS``, where there is one."""
        return self.get_submodule(self.norms[place])(x) if self.norms[place] else x

    def forward(
        self, x: Tensor, state: State | None = None, mask: Tensor | None = None, **of_model: Tensor
    ) -> tuple[Tensor, State]:
        """x: (b, n, d) -> the same and the mixer's state. ``of_model``: what a mixer takes from the model."""
        if self.reads_raw:
            of_model["raw"] = x
        mixed, left = self.mixer(self.normed(x, 0), state, mask, **of_model)
        x = x + self.normed(mixed, 1)
        return (x + self.normed(self.mlp(self.normed(x, 2)), 3) if self.has_unit else x), left


class TokenEmbedding(nn.Embedding):
    """Token ids to rows of a table, times ``multiplier``, which is rounded to their dtype as transformers has it."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, multiplier: float = 1.0) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        """x: (b, n) int64 -> (b, n, d)"""
        rows = super().forward(x)
        return rows if self.multiplier == 1 else rows * rows.new_full((), self.multiplier)


class BoundTable(nn.Module):
    """The table that the lower bounds of all HGRN2 layers come from: (l, d); ``kind`` see ``lower_bounds``."""

    def __init__(self, num_layers: int, hidden_size: int, *, kind: str = "from_zero") -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Parameter(torch.ones(num_layers, hidden_size))

    def forward(self) -> Tensor:
        """(l, d), fp32 at least."""
        return lower_bounds(self.table.to(torch.promote_types(self.table.dtype, torch.float32)), self.kind)


class PositionTable(nn.Embedding):
    """x + p of learned positions p, as in GPT-2 and BERT. Stands behind the embedding, before other encodings.

    Args:
        num_positions: tokens of the longest document; hidden_size: d.
    """

    def __init__(self, num_positions: int, hidden_size: int) -> None:
        super().__init__(num_positions, hidden_size)

    def encode(self, x: Tensor, state: State | None = None, mask: Tensor | None = None) -> tuple[Tensor, State]:
        """x: (b, n, d) -> the same and the state, ``next``: (b,) of positions. ValueError for longer documents."""
        start = x.new_zeros(x.size(0), dtype=torch.int64) if state is None else state["next"]
        left = start + (x.size(1) if mask is None else mask.sum(1))
        # What is compiled does not wait for a GPU to answer.
        if not torch.compiler.is_compiling() and int(left.max()) > self.num_embeddings:
            raise ValueError(f"{int(left.max())} tokens, but the model has {self.num_embeddings} learned positions")
        return x + self(token_positions(x.size(1), mask, start)), {"next": left}


class Decoder(nn.Module):
    """Token ids, or their embeddings, to activations behind the last norm.

    Args:
        shape: of the model.
        of_base: arguments of the next base class of a subclass.
    """

    def __init__(self, shape: Shape, *of_base: Any) -> None:
        super().__init__(*of_base)
        self.mixers = tuple(shape.mixers)
        self.embed_tokens = TokenEmbedding(shape.vocab_size, shape.hidden_size, multiplier=shape.embedding_multiplier)
        d, self.positions, self.tpe, self.lower_bounds = shape.hidden_size, None, None, None
        if shape.learned_positions:
            self.positions = PositionTable(shape.learned_positions, d)
        if shape.encodes():
            modes = shape.toeplitz.modes or d // shape.num_attention_heads
            self.tpe = ToeplitzEncoding(d, modes, printed=shape.toeplitz.form == "printed")
        if "hgrn2" in self.mixers:
            hgrn2 = shape.forms.get("hgrn2", HGRN2Form())
            assert isinstance(hgrn2, HGRN2Form), type(hgrn2)
            self.lower_bounds = BoundTable(len(self.mixers), d, kind=hgrn2.lower_bounds)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(len(self.mixers)))
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
        bounds = None if self.lower_bounds is None else self.lower_bounds()
        for number, layer in enumerate(self.layers):
            of_model = {}
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


class LabelScores(nn.Linear):
    """Pooled activations to logits of labels, in the dtype of the activations."""

    def __init__(self, hidden_size: int, num_labels: int) -> None:
        super().__init__(hidden_size, num_labels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (b, d) -> (b, labels)"""
        return F.linear(x, self.weight.to(x.dtype))


class Classifier(nn.Module):
    """Token ids to logits of the row's label."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.score = LabelScores(shape.hidden_size, shape.num_labels)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: (b, n), or their embeddings; mask: (b, n) bool, the real tokens -> (b, labels), fp32 at least."""
        logits: Tensor = self.score(pooled(self.model(x, None, mask)[0], mask, self.shape.pooling))
        return logits


def pooled(hidden: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """hidden: (b, n, d) -> (b, d), fp32 at least: the mean of the real tokens, or the first or last of them."""
    hidden = hidden.to(wide_dtype(hidden))
    if mask is None:
        mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    if pooling == "mean":
        return torch.where(mask[..., None], hidden, 0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    places = torch.arange(mask.size(1), device=mask.device)
    if pooling == "last":
        at = torch.where(mask, places, 0).amax(1)
    else:
        at = torch.where(mask, places, mask.size(1) - 1).amin(1)
    return hidden[torch.arange(len(at), device=at.device), at]


PlainModel = CausalModel | MaskedModel | Classifier


def model_of(shape: Shape) -> PlainModel:
    """The model of the task that ``shape`` names."""
    match shape.task:
        case "causal":
            return CausalModel(shape)
        case "masked":
            return MaskedModel(shape)
        case "classify":
            return Classifier(shape)
    raise ValueError(f"unknown task {shape.task!r}; use causal, masked or classify")
