"""LION's mixers: linear attention of every token to its whole row, before and behind, with decays in between.

    q, k = φ(x W_q), φ(x W_k);  v = x W_v;  A = q kᵀ ⊙ M;  out = W_o concat (A v)_i / (Σ_j A_ij + ε)

(arXiv 2502.16249, equations 20 to 25.) Time is linear in the tokens. There is no state to go on from: what comes later
changes what came before. ``mask`` (b, n) bool says which tokens are real; padding may stand anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.exchange.plain.mixers import HeadMixer, State, refuse_state
from lightscale.exchange.plain.operators import rms_norm, two_way_attention, wide_dtype


@dataclass(frozen=True, kw_only=True)
class LionForm:
    """What a mixer of LION's can have otherwise."""

    feature_map: str = "silu"
    """φ: elu, elu(x) + 1; silu, (silu(x) + 1/2) over its 2-norm; none."""
    scale: bool = True
    """Whether outputs are divided by the sums of their scores; otherwise a norm over all heads follows."""
    eps: float = 1e-6
    """Added to those sums."""
    attention_bias: str = "none"
    """Projections with a bias: none, qkv, or all, outputs too."""
    patch_order: str = "raster"
    """Of images: raster, row by row; alternating, the mean of the masks of two other orders."""
    gate: str = "leave"
    """Of two tokens whose decay counts between them, either way: that of the one that is left, or entered ("enter")."""
    input_gate: bool = False
    """Whether keys are multiplied by 1 - a of their token."""
    vector_decay: bool = False
    """Whether LION-S has a decay for each value channel (equation 136), and then as many sums."""


def lion_features(x: Tensor, kind: str) -> Tensor:
    """φ(x) over the last dim, rounded once."""
    wide = x.to(wide_dtype(x))
    if kind == "elu":
        # Not elu(x) + 1, which rounds small values away.
        return torch.where(wide > 0, wide + 1, wide.clamp(max=0).exp()).to(x.dtype)
    if kind == "silu":
        return F.normalize(F.silu(wide) + 0.5, dim=-1, eps=0.0).to(x.dtype)
    return x


def over_sums(sums: Tensor, weights: Tensor, eps: float) -> Tensor:
    """sums / (weights + eps), and 0 where that is 0, as in a row of padding."""
    divisor = weights + eps
    is_empty = divisor == 0
    return torch.where(is_empty, 0, sums / torch.where(is_empty, 1, divisor))


class LionLITMixer(HeadMixer):
    """LION-LIT: no decay. What LION's mixers share is here.

    Args:
        hidden_size, num_heads: d and h.
        lion: feature map, scaling, gate.
        eps: added to the mean square in the norm.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, lion: LionForm | None = None, eps: float = 1e-6) -> None:
        lion = lion or LionForm(feature_map="elu")
        biases = lion.attention_bias != "none", lion.attention_bias == "all"
        super().__init__(hidden_size, num_heads, eps=eps, bias=biases[0], output_bias=biases[1])
        self.lion = lion
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=biases[0])

    of_images = ("orders",)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        *,
        orders: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """x: (b, n, d), normalised -> the same, and no state. ``orders``: (2, n), of the patches of images."""
        refuse_state(self, state)
        lion, wide = self.lion, wide_dtype(x)
        v = self.heads(self.v_proj(x))
        q, k = (lion_features(self.heads(project(x)), lion.feature_map) for project in (self.q_proj, self.k_proj))
        k, log_decay = self.gated(k, x)
        if mask is not None:
            real = mask[..., None, None]
            k, v = torch.where(real, k, 0), torch.where(real, v, 0)
            log_decay = torch.where(mask[..., None], log_decay, 0)
        q, k, wide_v = q.to(wide), k.to(wide), v.to(wide)
        if lion.vector_decay:
            # Each value channel is a head of its own, of one channel.
            q, k = (heads.repeat_interleave(v.shape[-1], dim=2) for heads in (q, k))
            wide_v = wide_v.flatten(2)[..., None]
        if lion.scale:
            wide_v = torch.cat([wide_v, torch.ones_like(wide_v[..., :1])], -1)
        if lion.patch_order == "raster":
            y = two_way_attention(q, k, wide_v, log_decay, lion.gate)
        elif orders is None:
            raise ValueError("patch_order = 'alternating': orders must be given, those of the patches of an image")
        else:
            y = in_orders((q, k, wide_v, log_decay), orders, lion.gate)
        if lion.scale:
            o = over_sums(y[..., :-1], y[..., -1:], lion.eps).to(v.dtype).flatten(2)
        else:
            # Not divided by their sums, outputs grow with the row: the norm takes that out.
            o = rms_norm(y.to(v.dtype).flatten(2), None, self.eps)
        mixed: Tensor = self.o_proj(o)
        return mixed, {}

    def gated(self, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The keys (b, n, h, k) as they are written, and the log decays (b, n, h) or (b, n, h v), fp32 at least."""
        return k, x.new_zeros(*x.shape[:2], self.num_heads, dtype=wide_dtype(x))


def in_orders(inputs: tuple[Tensor, Tensor, Tensor, Tensor], orders: Tensor, gate: str) -> Tensor:
    """``two_way_attention`` of tokens in each of ``orders`` (2, n), each output back in its place; their mean."""
    found = []
    for order in orders:
        q, k, v, log_decay = (x[:, order] for x in inputs)
        found.append(two_way_attention(q, k, v, log_decay, gate)[:, order.argsort()])
    return (found[0] + found[1]) / 2


class LionRetNetMixer(LionLITMixer):
    """LION-RetNet: a fixed decay for each head, 1 - 2^(-5 - h), h from 0."""

    def gated(self, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """See ``LionLITMixer``."""
        heads = torch.arange(self.num_heads, dtype=torch.float64, device=x.device)
        decays = torch.log1p(-torch.pow(2.0, -5 - heads)).to(wide_dtype(x))
        return k, decays.expand(*x.shape[:2], -1)


class LionSMixer(LionLITMixer):
    """LION-S: a decay for each head, or value channel, and token, a = σ(x W + b)."""

    def __init__(self, hidden_size: int, num_heads: int, *, lion: LionForm | None = None, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, num_heads, lion=lion or LionForm(), eps=eps)
        self.f_proj = nn.Linear(hidden_size, hidden_size if self.lion.vector_decay else num_heads)

    def gated(self, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """See ``LionLITMixer``."""
        logits = self.f_proj(x)
        logits = logits.to(wide_dtype(logits))
        if self.lion.input_gate:
            # 1 - σ(a) is σ(-a), which is small but not 0 where σ(a) has rounded to 1.
            k = k * torch.sigmoid(-logits)[..., None].to(k.dtype)
        return k, F.logsigmoid(logits)


LION_MIXERS: dict[str, Callable[..., LionLITMixer]] = {
    "lion-lit": LionLITMixer,
    "lion-retnet": LionRetNetMixer,
    "lion-s": LionSMixer,
}
"""By the names that ``Shape.mixers`` has."""
