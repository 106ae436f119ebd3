"""The model: embedding, blocks of mixer and gated linear unit, norm, output layer of what it was trained to predict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.exchange.plain.decay_mixer import DecayMixer, ScalarDecay
from lightscale.exchange.plain.lion import LION_MIXERS, Lion
from lightscale.exchange.plain.mixers import (
    Attention,
    CosFormer2Mixer,
    HGRN2Mixer,
    LightNetMixer,
    SoftmaxMixer,
    State,
    TNLMixer,
    ToeplitzEncoding,
    lower_bounds,
)
from lightscale.exchange.plain.operators import rms_norm, wide_dtype

MIXER_NAMES = ("tnl", "hgrn2", "cosformer2", "lightnet", "llama", "decay-attention", *LION_MIXERS)
"""What ``Shape.mixers`` can name."""
_ENCODED = {"cosformer2", "lightnet"}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a model."""

    vocab_size: int
    """Rows of the embedding; where masks are filled, the last one is the mask's, which is never predicted."""
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    mixers: Sequence[str]
    """The mixer of each layer, first to last; see ``MIXER_NAMES``."""
    gate_ranks: Mapping[str, int] = field(default_factory=dict)
    """Inner width of the output gate, by mixer; hidden_size / num_attention_heads where it is not said."""
    glu_activation: str = "none"
    """Of the gate in the gated linear units: none or silu."""
    norm: str = "srmsnorm"
    """srmsnorm, which has no weight, or rmsnorm."""
    rms_norm_eps: float = 1e-6
    attention: Attention = field(default_factory=Attention)
    """Of the layers that attend by softmax."""
    scalar_decay: ScalarDecay = field(default_factory=ScalarDecay)
    """Of the layers that have one."""
    tied: bool = True
    """Whether the output layer is the embedding."""
    lightnet_causal: bool = True
    """Whether LightNet's layers read up to each token; otherwise the whole row."""
    lion: Mapping[str, Lion] = field(default_factory=dict)
    """The form of LION's mixers, by their names."""
    task: str = "causal"
    """What is predicted: causal, the next token; masked, tokens that were hidden; classify, a label of the row."""
    num_labels: int = 0
    """Classes, of a classifier."""
    pooling: str = "mean"
    """What a classifier sees of a row: the mean of its tokens' states, or that of the first or last."""

    def reads_both_ways(self) -> bool:
        """Whether a layer reads what comes behind a token; such a model has no states, and cannot continue a text."""
        whole = {*LION_MIXERS}
        if not self.lightnet_causal:
            whole.add("lightnet")
        if not self.attention.causal:
            whole.add("llama")
        return bool(whole & {*self.mixers})


class Norm(nn.Module):
    """RMS norm over the last dim, with a weight or without."""

    def __init__(self, hidden_size: int, *, eps: float = 1e-6, weight: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight: nn.Parameter | None
        self.register_parameter("weight", nn.Parameter(torch.ones(hidden_size)) if weight else None)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, d) -> (…, d)"""
        return rms_norm(x, self.weight, self.eps)


class GatedUnit(nn.Module):
    """The gated linear unit, W_down (act(x W_gate) * x W_up); ``activation`` none or silu."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: str = "none") -> None:
        super().__init__()
        if activation not in ("none", "silu"):
            raise ValueError(f"activation {activation!r} must be none or silu")
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, d) -> (…, d)"""
        gate = self.gate_proj(x)
        if self.activation == "silu":
            gate = F.silu(gate)
        out: Tensor = self.down_proj(gate * self.up_proj(x))
        return out


def make_mixer(shape: Shape, layer: int) -> nn.Module:
    """The mixer of layer ``layer`` (from 0)."""
    name, sizes = shape.mixers[layer], (shape.hidden_size, shape.num_attention_heads)
    rank, eps = shape.gate_ranks.get(name), shape.rms_norm_eps
    match name:
        case "tnl":
            return TNLMixer(*sizes, layer=layer, num_layers=len(shape.mixers), gate_rank=rank, eps=eps)
        case "cosformer2":
            return CosFormer2Mixer(*sizes, gate_rank=rank, eps=eps)
        case "lightnet":
            return LightNetMixer(*sizes, gate_rank=rank, causal=shape.lightnet_causal, eps=eps)
        case "hgrn2":
            return HGRN2Mixer(*sizes, eps=eps)
        case "llama":
            return SoftmaxMixer(*sizes, attention=shape.attention, eps=eps)
        case "decay-attention":
            return DecayMixer(*sizes, form=shape.scalar_decay, gate_rank=rank, eps=eps)
    if name in LION_MIXERS:
        return LION_MIXERS[name](*sizes, lion=shape.lion.get(name), eps=eps)
    raise ValueError(f"no mixer is called {name!r}; known: {', '.join(MIXER_NAMES)}")


class Block(nn.Module):
    """x += mixer(norm x); x += gated unit(norm x)."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        d, eps, weight = shape.hidden_size, shape.rms_norm_eps, shape.norm == "rmsnorm"
        self.input_layernorm = Norm(d, eps=eps, weight=weight)
        self.mixer = make_mixer(shape, layer)
        self.post_attention_layernorm = Norm(d, eps=eps, weight=weight)
        self.mlp = GatedUnit(d, shape.intermediate_size, activation=shape.glu_activation)

    def forward(
        self, x: Tensor, state: State | None = None, mask: Tensor | None = None, **of_model: Tensor
    ) -> tuple[Tensor, State]:
        """x: (b, n, d) -> the same and the mixer's state. ``of_model``: what a mixer takes from the model."""
        mixed, left = self.mixer(self.input_layernorm(x), state, mask, **of_model)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), left


class BoundTable(nn.Module):
    """The table that the lower bounds of all HGRN2 layers come from: (l, d)."""

    def __init__(self, num_layers: int, hidden_size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(num_layers, hidden_size))

    def forward(self) -> Tensor:
        """(l, d), fp32 at least."""
        return lower_bounds(self.table.to(torch.promote_types(self.table.dtype, torch.float32)))


class Decoder(nn.Module):
    """Token ids, or their embeddings, to activations behind the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.mixers = tuple(shape.mixers)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        modes = shape.hidden_size // shape.num_attention_heads
        self.tpe = ToeplitzEncoding(shape.hidden_size, modes) if _ENCODED & {*self.mixers} else None
        self.lower_bounds = BoundTable(len(self.mixers), shape.hidden_size) if "hgrn2" in self.mixers else None
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(len(self.mixers)))
        self.norm = Norm(shape.hidden_size, eps=shape.rms_norm_eps, weight=shape.norm == "rmsnorm")

    def forward(
        self, x: Tensor, states: Sequence[State] | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, list[State]]:
        """Read on by some tokens.

        Args:
            x: ids (b, n) int64, or embeddings (b, n, d).
            states: what the call before gave; None: the rows begin here.
            mask: (b, n) bool, the real tokens; None: all.

        Returns:
            Activations (b, n, d), and a state for each layer behind that of the positional encoding.
        """
        if not x.is_floating_point():
            x = self.embed_tokens(x)
        before: Sequence[State | None] = [None] * (1 + len(self.layers)) if states is None else states
        after: list[State] = [{}]
        if self.tpe is not None:
            x, after[0] = self.tpe(x, before[0], mask)
        bounds = None if self.lower_bounds is None else self.lower_bounds()
        for number, layer in enumerate(self.layers):
            of_model = {}
            if bounds is not None and self.mixers[number] == "hgrn2":
                of_model["lower_bound"] = bounds[number]
            x, state = layer(x, before[number + 1], mask, **of_model)
            after.append(state)
        return self.norm(x), after


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
        return F.linear(hidden[:, -1:] if last_only else hidden, output.weight), after


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
        return F.linear(self.model(x, None, mask)[0], output.weight[:-1])


class Classifier(nn.Module):
    """Token ids to logits of the row's label."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.score = nn.Linear(shape.hidden_size, shape.num_labels, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: (b, n), or their embeddings; mask: (b, n) bool, the real tokens -> (b, labels), fp32 at least."""
        states = pooled(self.model(x, None, mask)[0], mask, self.shape.pooling)
        return F.linear(states, self.score.weight.to(states.dtype))


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
    raise ValueError(f"no task is called {shape.task!r}; known: causal, masked, classify")
