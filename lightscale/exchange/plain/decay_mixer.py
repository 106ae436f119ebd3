"""Linear attention with one scalar decay per head, in the forms of causal LION-S, RetNet and Mamba-2."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.exchange.plain.mixers import HeadMixer, State, wavelengths
from lightscale.exchange.plain.operators import (
    gated_linear_attention,
    linear_attention,
    phases,
    rms_norm,
    rotate_pairs,
    rotated_features,
    wide_dtype,
)
from lightscale.exchange.plain.softmax_mixer import Attention, rotary_angles


@dataclass(frozen=True, kw_only=True)
class ScalarDecay:
    """The form of the mixer; the defaults are those of LION-S."""

    decay: str = "sigmoid"
    """Of head and token: sigmoid(x W + b), or softplus: exp(-softplus(x W + b) e^r); of head: learned, fixed; none."""
    input_gate: bool = False
    """Keys times 1 - decay, or times the softplus."""
    feature_map: str = "shifted_silu"
    """elu: elu(x) + 1; shifted_silu: (silu(x) + 1/2) over its 2-norm; silu; none."""
    scale: bool = True
    """Outputs over the sum of their scores, plus ``eps``."""
    eps: float = 1e-6
    positions: str = "none"
    """rope: rotary; lrpe: by learned angles, which doubles the keys; none."""
    short_convolution: int = 0
    """Tokens that a convolution before q, k and v sees, silu behind it; 0: none."""
    output: str = "plain"
    """plain; norm over all heads; gated: that and a low-rank gate."""


class DecayMixer(HeadMixer):
    """Scalar decays. The state is ``S``: (b, h, K, V), and with a convolution ``tail``: (b, W - 1, 3 d)."""

    q_conv: nn.Parameter
    k_conv: nn.Parameter
    v_conv: nn.Parameter

    of_images = ("coordinates",)

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        form: ScalarDecay | None = None,
        gate_rank: int | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(hidden_size, num_heads, eps=eps)
        self.form = form = form or ScalarDecay()
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        if form.decay in ("sigmoid", "softplus"):
            self.f_proj = nn.Linear(hidden_size, num_heads)
        if form.decay == "softplus":
            self.log_rate = nn.Parameter(torch.empty(num_heads))
        elif form.decay == "learned":
            self.decay_logit = nn.Parameter(torch.empty(num_heads))
        if form.positions == "lrpe":
            self.theta = nn.Parameter(torch.empty(num_heads, self.head_dim))
        elif form.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"heads of {self.head_dim} channels: rotary positions turn channels in pairs")
        if form.output == "gated":
            rank = self.head_dim if gate_rank is None else gate_rank
            self.gate_down = nn.Linear(hidden_size, rank, bias=False)
            self.gate_up = nn.Linear(rank, hidden_size, bias=False)
        if form.short_convolution:
            for name in ("q_conv", "k_conv", "v_conv"):
                self.register_parameter(name, nn.Parameter(torch.empty(hidden_size, form.short_convolution)))
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """The initial values of what is in none of the linear layers."""
        h, width = self.num_heads, self.form.short_convolution
        if self.form.decay == "softplus":
            self.log_rate.copy_(torch.linspace(1, 16, h).log())
        elif self.form.decay == "learned":
            self.decay_logit.copy_((2.0 ** (5 + torch.arange(h)) - 1).log())
        if self.form.positions == "lrpe":
            self.theta.copy_(wavelengths(h, self.head_dim))
        if width:
            for weight in (self.q_conv, self.k_conv, self.v_conv):
                nn.init.uniform_(weight, -(width**-0.5), width**-0.5)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        *,
        coordinates: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """x: (b, n, d), normalised -> the same and the state."""
        form, wide = self.form, wide_dtype(x)
        left: State = {}
        projected = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        if form.short_convolution:
            weight = torch.cat([self.q_conv, self.k_conv, self.v_conv])
            projected, left["tail"] = short_convolution(projected, weight, state, mask)
        q, k, v = (self.heads(y) for y in projected.chunk(3, dim=-1))
        q, k = features(q, form.feature_map), features(k, form.feature_map)
        turns = None
        if form.positions != "none":
            theta = self.theta if form.positions == "lrpe" else rotary_angles(self.head_dim, Attention(), x.device)
            # RoPE turns pairs, by the place in the row.
            places = self.positions(x, mask, state, coordinates if form.positions == "lrpe" else None)
            turns = phases(places, theta.to(wide))
            left["position"] = self.next_position(x, mask, state)
        if turns is not None and form.positions == "rope":
            q, k = rotate_pairs(q, turns), rotate_pairs(k, turns)
        log_decay, written = self.decays(x)
        if written is not None:
            # Before LRPE, which is in fp32: rounded where training rounds it.
            k = k * written[..., None].to(k.dtype)
        if turns is not None and form.positions == "lrpe":
            q, k = (rotated_features(y.to(wide), turns) for y in (q, k))
        if form.scale:
            v = torch.cat([v, v.new_ones(*v.shape[:3], 1)], dim=-1)
        before = x.new_zeros(x.size(0), self.num_heads, k.size(-1), v.size(-1), dtype=wide)
        if state is not None:
            before = state["S"]
        if log_decay.dim() == 1:
            o, left["S"] = linear_attention(q, k, v, log_decay, before, mask)
            return self.output(x, o, mask), left
        if mask is not None:
            k, log_decay = torch.where(mask[..., None, None], k, 0), torch.where(mask[..., None], log_decay, 0)
            v = torch.where(mask[..., None, None], v, 0)
        o, left["S"] = gated_linear_attention(q, k, v, log_decay[..., None].expand(k.shape), before)
        return self.output(x, o, mask), left

    def decays(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """log a, (h,) or (b, n, h), fp32 at least, and what keys are multiplied by, (b, n, h); None: by 1."""
        wide, kind = wide_dtype(x), self.form.decay
        if kind == "sigmoid":
            logits = self.f_proj(x).to(wide)
            return F.logsigmoid(logits), torch.sigmoid(-logits) if self.form.input_gate else None
        if kind == "softplus":
            step = F.softplus(self.f_proj(x).to(wide))
            return -step * self.log_rate.to(wide).exp(), step if self.form.input_gate else None
        of_heads = torch.zeros(self.num_heads, dtype=torch.float64, device=x.device)
        if kind == "learned":
            of_heads = F.logsigmoid(self.decay_logit)
        elif kind == "fixed":
            exponents = -5 - torch.arange(self.num_heads, dtype=torch.float64, device=x.device)
            of_heads = torch.log1p(-torch.pow(2.0, exponents))
        return of_heads.to(wide), None

    def output(self, x: Tensor, o: Tensor, mask: Tensor | None) -> Tensor:
        """x: (b, n, d), the mixer's input; o: (b, n, h, V)."""
        if self.form.scale:
            values, sums = o.to(wide_dtype(o)).split([self.head_dim, 1], dim=-1)
            if mask is not None:
                # Of padding that nothing real is before, 0 over 0.
                sums = torch.where(mask[..., None, None], sums, 1)
            o = (values / (sums + self.form.eps)).to(o.dtype)
        o = o.flatten(2)
        if self.form.output != "plain":
            gate = self.gate_up(self.gate_down(x)) if self.form.output == "gated" else None
            o = rms_norm(o, None, self.eps, gate)
        mixed: Tensor = self.o_proj(o)
        return mixed


def short_convolution(x: Tensor, weight: Tensor, state: State | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """silu of a causal convolution of each channel, of x (b, n, c) by weight (c, W), and the last tokens of x.

    Those are ``tail`` (b, W - 1, c) of the state.
    """
    b, n, width = x.shape
    size, weight = weight.size(1) - 1, weight.to(wide_dtype(x))
    back, lengths = None, torch.full((b,), n, device=x.device)
    if mask is not None:
        # The real tokens of each row first: those before a token are then the ones in front of it.
        order = (~mask).long().argsort(dim=1, stable=True)
        back, lengths = order.argsort(dim=1)[..., None].expand(x.shape), mask.sum(1)
        x = torch.where(mask[..., None], x, 0).gather(1, order[..., None].expand(x.shape))
    before = x.new_zeros(b, size, width) if state is None else state["tail"]
    together = torch.cat([before, x], dim=1)
    # From the token itself back, as in training.
    y = sum(together[:, i : i + n].to(weight.dtype) * weight[:, i] for i in reversed(range(size + 1)))
    y = F.silu(torch.as_tensor(y)).to(x.dtype)
    last = lengths[:, None] + torch.arange(size, device=x.device)
    tail = together.gather(1, last[..., None].expand(-1, -1, width))
    return y if back is None else y.gather(1, back), tail


def features(x: Tensor, kind: str) -> Tensor:
    """φ(x) over the last dim, see ``ScalarDecay.feature_map``; fp32 at least inside."""
    wide = x.to(wide_dtype(x))
    if kind == "elu":
        # Not elu(x) + 1, which rounds small values away.
        return torch.where(wide > 0, wide + 1, wide.clamp(max=0).exp()).to(x.dtype)
    if kind == "shifted_silu":
        return F.normalize(F.silu(wide) + 0.5, dim=-1, eps=0.0).to(x.dtype)
    return F.silu(x) if kind == "silu" else x
