"""What stands around the mixers: norms, linear units, embeddings, the output layer of labels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.exchange.plain.mixers import State, lower_bounds
from lightscale.exchange.plain.operators import rms_norm, token_positions, wide_dtype


class Norm(nn.Module):
    """RMS norm over the last dim, with a weight or without; ``centered``: of x less its mean, LayerNorm's.

    ``zero_centered``: times 1 + weight, not the weight. ``bias``: of LayerNorm with a weight.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-6,
        weight: bool = False,
        bias: bool = False,
        centered: bool = False,
        zero_centered: bool = False,
    ) -> None:
        super().__init__()
        self.eps, self.centered, self.zero_centered = eps, centered, zero_centered
        self.weight: nn.Parameter | None
        initial = torch.zeros(hidden_size) if zero_centered else torch.ones(hidden_size)
        self.register_parameter("weight", nn.Parameter(initial) if weight else None)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.zeros(hidden_size)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, d) -> (…, d)"""
        weight: Tensor | None = self.weight
        if self.bias is not None:
            return F.layer_norm(x, x.shape[-1:], weight, self.bias, self.eps)
        if weight is not None and self.zero_centered:
            weight = 1 + weight.to(wide_dtype(x))
        if not self.centered:
            return rms_norm(x, weight, self.eps)
        wide = x.to(wide_dtype(x))
        return rms_norm(wide - wide.mean(-1, keepdim=True), weight, self.eps).to(x.dtype)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(logits / cap), rounded once; None: the logits."""
    if cap is None:
        return logits
    return (cap * torch.tanh(logits.to(wide_dtype(logits)) / cap)).to(logits.dtype)


def unit_activation(x: Tensor, activation: str) -> Tensor:
    """x (…), or its silu, its GELU, or that by the formula with tanh. ValueError for another ``activation``."""
    match activation:
        case "none":
            return x
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
    raise ValueError(f"activation {activation!r} must be none, silu, gelu or gelu_tanh")


class Perceptron(nn.Module):
    """W_down act(x W_up), by ``bias`` with biases; ``activation`` see ``unit_activation``."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, activation: str = "gelu", bias: bool = False
    ) -> None:
        super().__init__()
        unit_activation(torch.empty(0), activation)
        self.activation = activation
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, d) -> (…, d)"""
        out: Tensor = self.down_proj(unit_activation(self.up_proj(x), self.activation))
        return out


class GatedUnit(nn.Module):
    """The gated linear unit, W_down (act(x W_gate) * x W_up); ``activation`` see ``unit_activation``."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, activation: str = "none", bias: bool = False
    ) -> None:
        super().__init__()
        unit_activation(torch.empty(0), activation)
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, d) -> (…, d)"""
        gate, up = (y.to(wide_dtype(x)) for y in (self.gate_proj(x), self.up_proj(x)))
        # Rounded once, as in training.
        out: Tensor = self.down_proj((unit_activation(gate, self.activation) * up).to(x.dtype))
        return out


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


class LabelScores(nn.Linear):
    """Pooled activations to logits of labels, in the dtype of the activations."""

    def __init__(self, hidden_size: int, num_labels: int, *, bias: bool = False) -> None:
        super().__init__(hidden_size, num_labels, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (b, d) -> (b, labels)"""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


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
