"""Relation networks, CausalRN and BiRN: a perceptron with one hidden layer of every pair of tokens, summed.

    a = W_a x + c;  b = W_b x;  o_t = Σ_{s ≤ t} ψ(LN(a_t + b_s));  out = W_o LN(o_t) + c_o

("Linear-Time Sequence Modeling with MLPs", equations 4, 5 and 7.) BiRN sums over the whole row. In the linear form ψ is
exp and each side has a norm of its own: o_t = exp(a_t + z_t), z_t = log Σ_s e^{b_s}, a state of one number per channel.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.exchange.plain.mixers import State, refuse_state
from lightscale.exchange.plain.operators import EMPTY, layer_norm, log_sum, pairs_sum, token_positions, wide_dtype


@dataclass(frozen=True, kw_only=True)
class RelationForm:
    """What a relation network can have otherwise."""

    form: str = "linear"
    """linear, or quadratic: every pair by itself, in time that grows with the square of the length."""
    activation: str = "exp"
    """ψ: exp, relu, elu or silu; others than exp need the quadratic form."""
    pre_norm: str = "approximate"
    """Norm before ψ: exact, of each pair, in the quadratic form; approximate, of its two sides; off."""
    post_norm: bool = True
    """Norm behind the sum over pairs; false: their mean."""
    eps: float = 1e-6
    """Added to the variance in the norms."""
    expansion: int = 1
    """Hidden channels by channel of the stream."""


PAIR_ACTIVATIONS = {"exp": torch.exp, "relu": torch.relu, "elu": F.elu, "silu": F.silu}


class CausalRNMixer(nn.Module):
    """Every token reads those up to itself. The state of the quadratic form, all b, grows.

    Args:
        hidden_size: d.
        form: what is otherwise; None: nothing.
    """

    is_causal = True

    def __init__(self, hidden_size: int, *, form: RelationForm | None = None) -> None:
        super().__init__()
        self.form = form = form or RelationForm()
        width = form.expansion * hidden_size
        self.a_proj = nn.Linear(hidden_size, width)
        self.b_proj = nn.Linear(hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, hidden_size)

    def forward(self, x: Tensor, state: State | None = None, mask: Tensor | None = None) -> tuple[Tensor, State]:
        """x: (b, n, d), normalised -> the same and the state.

        That is ``z`` (b, D), D hidden channels, with ``position`` where there is no norm behind the sum; of the
        quadratic form ``b`` (b, N, D) and ``seen`` (b, N) bool of all tokens so far; of BiRN none.
        """
        if not self.is_causal:
            refuse_state(self, state)
        o, left = (self.linear if self.form.form == "linear" else self.quadratic)(x, state, mask)
        mixed: Tensor = self.o_proj(o.to(x.dtype))
        return mixed, left

    def linear(self, x: Tensor, state: State | None, mask: Tensor | None) -> tuple[Tensor, State]:
        """o (b, n, D), fp32 at least, and the state."""
        # Logarithms, which half precision would round too much.
        a, b = (self.side(projected.to(wide_dtype(x))) for projected in (self.a_proj(x), self.b_proj(x)))
        if mask is not None:
            b = torch.where(mask[..., None], b, EMPTY)
        left: State = {}
        if self.is_causal:
            z = log_sum(b, torch.full_like(b[:, 0], EMPTY) if state is None else state["z"])
            left["z"] = z[:, -1].clone()
        else:
            z = b.logsumexp(1, keepdim=True)
        y = a + z
        if mask is not None:
            # Of padding that nothing real is before, an even vector: its norm could be 0 over 0.
            y = torch.where(mask[..., None], y, a)
        if self.form.post_norm:
            return layer_norm((y - y.detach().amax(-1, keepdim=True)).exp(), self.form.eps), left
        start = x.new_zeros(x.size(0), dtype=torch.int64) if state is None else state["position"]
        left["position"] = start + (x.size(1) if mask is None else mask.sum(1))
        count = 1 + token_positions(x.size(1), mask, start)
        return (y - count.to(y.dtype).log()[..., None]).exp(), left

    def quadratic(self, x: Tensor, state: State | None, mask: Tensor | None) -> tuple[Tensor, State]:
        """The same of every pair by itself."""
        n, form, a, b = x.size(1), self.form, self.a_proj(x), self.b_proj(x)
        left: State = {}
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        if self.is_causal:
            if state is not None:
                b, real = torch.cat([state["b"], b], dim=1), torch.cat([state["seen"], real], dim=1)
            left = {"b": b, "seen": real}
        places = torch.arange(b.size(1), device=x.device)
        own = places[b.size(1) - n :, None]
        # A padded token reads itself too, so that it is a number.
        seen = (real[:, None] & (places <= own if self.is_causal else places == places)) | (places == own)
        if form.pre_norm == "approximate":
            a, b = self.side(a), self.side(b)
        exact, activation = form.pre_norm == "exact", PAIR_ACTIVATIONS[form.activation]
        o = pairs_sum(a, b, seen, lambda pair: activation(layer_norm(pair, form.eps) if exact else pair))
        if not form.post_norm:
            return o / seen.sum(-1, keepdim=True).to(o.dtype), left
        largest = o.detach().abs().amax(-1, keepdim=True)
        return layer_norm(o / largest.masked_fill(largest == 0, 1), form.eps), left

    def side(self, x: Tensor) -> Tensor:
        """One side of all pairs, (b, n, D), as it is added to the other."""
        return x if self.form.pre_norm == "off" else layer_norm(x, self.form.eps)


class BiRNMixer(CausalRNMixer):
    """Every token reads the whole row; there is no state."""

    is_causal = False


RELATION_MIXERS = {"causal-rn": CausalRNMixer, "bi-rn": BiRNMixer}
"""By the names that ``Shape.mixers`` has."""
