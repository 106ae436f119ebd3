"""Softmax attention: LLaMA's, with the options of today's models."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightscale.exchange.plain.mixers import HeadMixer, State, refuse_state
from lightscale.exchange.plain.operators import phases, rms_norm, rotate_pairs, softmax_attention, wide_dtype


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How long waves of rotary positions are slowed down, for texts longer than a model was first trained on."""

    rope_type: str = "llama3"
    """llama3, of Llama 3.1; yarn; linear, all waves alike."""
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    """The length that it was first trained on."""
    beta_fast: float | None = None
    """Of yarn: turns in that length from which waves do not change; None: 32."""
    beta_slow: float | None = None
    """Of yarn: turns up to which they are slowed down by all of the factor; None: 1."""
    attention_factor: float | None = None
    """Of yarn: what rotated queries and keys are multiplied by; None: 0.1 ln(factor) + 1, at least 1."""
    truncate: bool = True
    """Of yarn: whether the channels with so many turns are rounded away from each other."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The shape of softmax attention; the defaults are those of LLaMA, version 1."""

    num_key_value_heads: int | None = None
    """Heads of keys and values, each of which several of queries share; None: as many as of queries."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    bias: bool = False
    """Of queries, keys and values."""
    output_bias: bool = False
    causal: bool = True
    """Whether tokens see those up to themselves; otherwise the whole row, and there is no state."""
    qk_norm: str = "none"
    """RMS norm of queries and keys before the rotation: none; head, of each head; all, over all heads together."""
    zero_centered_norm: bool = False
    """Whether it multiplies by 1 + weight."""
    positions: str = "rope"
    """Rotations of queries and keys: rope or none."""
    rope_fraction: float = 1.0
    """Share of a head's channels that are rotated, the first ones."""
    window: int | None = None
    """Tokens that one sees, itself the last of them; None: all before it."""
    softmax_scale: float | None = None
    """Factor of scores; None: head_dim ^ -0.5."""
    attention_logit_cap: float | None = None
    """Most of a score before the softmax, by tanh; None: no limit."""
    attention_sinks: bool = False
    """Whether a learned logit of each head joins the softmax's sum."""
    output_gate: bool = False
    """Whether outputs are multiplied by the sigmoid of a linear map of the input."""


def attention_from(table: Mapping[str, Any]) -> Attention:
    """That with the fields of ``table``, whose scaling is a table too, as JSON has it."""
    scaling = table.get("rope_scaling")
    return Attention(**{**table, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})


class QueryKeyNorm(nn.Module):
    """RMS norm over the last dim, times a weight, or times 1 + it."""

    def __init__(self, width: int, *, eps: float, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.zeros(width) if zero_centered else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, width) -> (…, width)"""
        weight = 1 + self.weight.to(wide_dtype(x)) if self.zero_centered else self.weight
        return rms_norm(x, weight, self.eps)


def rotary_angles(width: int, attention: Attention, device: torch.device) -> Tensor:
    """(1, k / 2) fp64: the angles per token of the pairs of the k channels of a head that are rotated."""
    theta = torch.pow(attention.rope_theta, -torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    if (scaling := attention.rope_scaling) is None:
        return theta[None]
    if scaling.rope_type == "linear":
        return theta[None] / scaling.factor
    length = float(scaling.original_max_position_embeddings or 0)
    if scaling.rope_type == "llama3":
        # How often a wave turns in the first length: few turns are slowed down by the factor, many are not.
        low, high = float(scaling.low_freq_factor or 0), float(scaling.high_freq_factor or 0)
        kept = (length * theta / (2 * math.pi) - low) / (high - low)
    else:
        # The same by channels, between the two whose waves turn so often.
        slope = 2 * math.log(attention.rope_theta) / width
        start = math.log(length / (2 * math.pi * (scaling.beta_fast or 32.0))) / slope
        stop = math.log(length / (2 * math.pi * (scaling.beta_slow or 1.0))) / slope
        if scaling.truncate:
            start, stop = math.floor(start), math.ceil(stop)
        start, stop = max(start, 0), min(stop, width - 1)
        place = torch.arange(width // 2, dtype=torch.float64, device=device)
        kept = 1 - (place - start) / (stop - start or 0.001)
    kept = kept.clamp(0, 1)
    return ((1 - kept) * theta / scaling.factor + kept * theta)[None]


def rotary_factor(attention: Attention) -> float:
    """What rotated queries and keys are multiplied by: with yarn more than 1, so that scores grow with the length."""
    scaling = attention.rope_scaling
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    return scaling.attention_factor or max(1.0, 0.1 * math.log(scaling.factor) + 1)


class SoftmaxMixer(HeadMixer):
    """LLaMA's attention with rotary positions. Its state, the keys and values so far, grows."""

    def __init__(
        self, hidden_size: int, num_heads: int, *, attention: Attention | None = None, eps: float = 1e-6
    ) -> None:
        attention = attention or Attention()
        super().__init__(
            hidden_size,
            num_heads,
            eps=eps,
            head_dim=attention.head_dim,
            num_key_value_heads=attention.num_key_value_heads,
            bias=attention.bias,
            output_bias=attention.output_bias,
        )
        self.turned = int(self.head_dim * attention.rope_fraction) if attention.positions == "rope" else 0
        if self.turned % 2:
            raise ValueError(f"{self.turned} channels of a head: rotary positions turn channels in pairs")
        self.attention = attention
        self.k_proj = nn.Linear(hidden_size, self.value_size, bias=attention.bias)
        self.sinks: nn.Parameter | None
        self.register_parameter("sinks", nn.Parameter(torch.zeros(num_heads)) if attention.attention_sinks else None)
        if attention.output_gate:
            self.gate_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=attention.bias)
        if attention.qk_norm != "none":
            of_head = attention.qk_norm == "head"
            widths = [self.head_dim if of_head else heads.out_features for heads in (self.q_proj, self.k_proj)]
            self.q_norm, self.k_norm = (
                QueryKeyNorm(width, eps=eps, zero_centered=attention.zero_centered_norm) for width in widths
            )

    def normalised(self, x: Tensor, norm: str) -> Tensor:
        """x: (b, n, h k), projected -> (b, n, h, k)"""
        if self.attention.qk_norm == "all":
            x = self.get_submodule(norm)(x)
        x = self.heads(x)
        return self.get_submodule(norm)(x) if self.attention.qk_norm == "head" else x

    def forward(self, x: Tensor, state: State | None = None, mask: Tensor | None = None) -> tuple[Tensor, State]:
        """x: (b, n, d), normalised -> the same and the state ``k``, ``v``: (b, N, g, k) and ``seen``: (b, N) bool.

        Within a window N counts only tokens that a later one sees, and ``place``, (b, N), are their positions.
        """
        if not self.attention.causal:
            refuse_state(self, state)
        q, k = self.normalised(self.q_proj(x), "q_norm"), self.normalised(self.k_proj(x), "k_norm")
        v = self.heads(self.v_proj(x))
        if self.turned:
            theta = rotary_angles(self.turned, self.attention, x.device).to(wide_dtype(x))
            cos, sin = phases(self.positions(x, mask, state), theta)
            turns = rotary_factor(self.attention) * cos, rotary_factor(self.attention) * sin
            q, k = (
                torch.cat([rotate_pairs(y[..., : self.turned], turns), y[..., self.turned :]], dim=-1) for y in (q, k)
            )
        if (scale := self.attention.softmax_scale) is not None:
            # Scores are divided by sqrt(head_dim) where they are computed.
            q = q * (scale * math.sqrt(self.head_dim))
        more: dict[str, Any] = {"cap": self.attention.attention_logit_cap, "sinks": self.sinks}
        if not self.attention.causal:
            return self.output(softmax_attention(q, k, v, mask, causal=False, **more), x), {}
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        seen = None if mask is None and state is None else real
        if state is not None:
            k, v = torch.cat([state["k"], k], dim=1), torch.cat([state["v"], v], dim=1)
            seen = real = torch.cat([state["seen"], real], dim=1)
        after = self.next_position(x, mask, state)
        left = {"k": k, "v": v, "seen": real, "position": after}
        near = None
        if (window := self.attention.window) is not None:
            place = own = self.positions(x, mask, state)
            if state is not None:
                place = torch.cat([state["place"], own], dim=1)
            near = own[:, :, None] - place[:, None] < window
            # What no later token sees is dropped.
            ahead = (place > after[:, None] - window) & real
            first = int((~ahead.any(0)).long().cumprod(0).sum()) if place.size(1) else 0
            left = {key: y[:, first:].clone() for key, y in (*left.items(), ("place", place)) if key != "position"}
            left["position"] = after
        return self.output(softmax_attention(q, k, v, seen, near=near, **more), x), left

    def output(self, o: Tensor, x: Tensor) -> Tensor:
        """o: (b, n, h, k), x: (b, n, d), the mixer's input -> (b, n, d)"""
        o = o.flatten(2)
        if self.attention.output_gate:
            o = o * torch.sigmoid(self.gate_proj(x))
        mixed: Tensor = self.o_proj(o)
        return mixed
