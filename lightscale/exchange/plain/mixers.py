"""The token mixers as modules: (b, n, d) and a state in, (b, n, d) and a state out.

A state is a dict of tensors with the batch as their first dim, None before the first token. For all but softmax
attention its size does not depend on how many tokens came before. ``mask`` (b, n) bool says which tokens are real;
padding may stand anywhere and changes nothing.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.exchange.plain.operators import (
    EMPTY,
    gated_linear_attention,
    linear_attention,
    phases,
    rms_norm,
    rotated_features,
    softmax_average,
    softmax_scan,
    token_positions,
    wide_dtype,
)

State = dict[str, Tensor]


def refuse_state(mixer: nn.Module, state: State | None) -> None:
    """ValueError where a mixer that reads whole rows is to read on from a state, which it cannot have."""
    if state is not None:
        raise ValueError(f"{type(mixer).__name__} reads whole rows in both directions and has no state")


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """(h,) fp64: 2^(-8(i+1)/h); where h is no power of two, those of the power below, then every second of the next."""
    below = 2 ** math.floor(math.log2(num_heads))
    i = torch.arange(num_heads, dtype=torch.float64, device=device)
    exponents = torch.where(i < below, (i + 1) / below, (2 * (i - below) + 1) / (2 * below))
    return torch.pow(2.0, -8 * exponents)


class HeadMixer(nn.Module):
    """What all mixers share: heads of one width, and projections of queries, values and outputs.

    Args:
        hidden_size, num_heads: d and h.
        eps: added to the mean square in the norm.
        head_dim: of queries, keys and values; None: d / h.
        num_key_value_heads: of keys and values; None: h.
        bias: of what goes in; output_bias: of what comes out.
        output_projection: whether a matrix stands behind it at all.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        eps: float = 1e-6,
        head_dim: int | None = None,
        num_key_value_heads: int | None = None,
        bias: bool = False,
        output_bias: bool = False,
        output_projection: bool = True,
    ) -> None:
        super().__init__()
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"hidden_size = {hidden_size} is not divisible by num_heads = {num_heads}")
        self.hidden_size, self.num_heads, self.eps = hidden_size, num_heads, eps
        self.head_dim = head_dim or hidden_size // num_heads
        self.value_size = self.head_dim * (num_key_value_heads or num_heads)
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, self.value_size, bias=bias)
        self.o_proj: nn.Module = nn.Identity()
        if output_projection:
            self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=output_bias)

    def heads(self, projected: Tensor) -> Tensor:
        """(b, n, h k) -> (b, n, h, k)"""
        return projected.unflatten(-1, (-1, self.head_dim))

    def positions(
        self, x: Tensor, mask: Tensor | None, state: State | None, coordinates: Tensor | None = None
    ) -> Tensor:
        """(b, n), of the tokens of x (b, n, …) in their documents; or their ``coordinates``, (b, n, axes)."""
        if coordinates is not None:
            return coordinates
        start = x.new_zeros(x.size(0), dtype=torch.int64) if state is None else state["position"]
        return token_positions(x.size(1), mask, start)

    def next_position(self, x: Tensor, mask: Tensor | None, state: State | None) -> Tensor:
        """(b,), of the token behind those of x."""
        start = x.new_zeros(x.size(0), dtype=torch.int64) if state is None else state["position"]
        return start + (x.size(1) if mask is None else mask.sum(1))

    def matrix_state(self, x: Tensor, state: State | None, key_width: int) -> Tensor:
        """S (b, h, key_width, k), zero before the first token."""
        if state is not None:
            return state["S"]
        return x.new_zeros(x.size(0), self.num_heads, key_width, self.head_dim, dtype=wide_dtype(x))


@dataclass(frozen=True, kw_only=True)
class GatedForm:
    """What a mixer with an output gate can have otherwise; what papers print is not always what is usual."""

    gate_input: str = "normalised"
    """What the gate is made of: the block's normalised input, or raw, the input itself."""
    output_projection: bool = True
    """Whether a matrix W_o follows norm and gate."""


class GatedOutputMixer(HeadMixer):
    """With a gate, mostly low-rank, on the normalised output: W_o (norm(o) * sigmoid(x W_down W_up))."""

    of_images = ("coordinates",)
    """What ``forward`` takes of images: ``coordinates`` (b, n, axes) of tokens, for the angles of its positions."""
    form: GatedForm

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        form: GatedForm,
        gate_rank: int | None = None,
        full_rank_gate: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(hidden_size, num_heads, eps=eps, output_projection=form.output_projection)
        self.form = form
        self.reads_raw = form.gate_input == "raw"
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.is_full_rank = full_rank_gate
        if full_rank_gate:
            self.gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)
            return
        rank = self.head_dim if gate_rank is None else gate_rank
        self.gate_down = nn.Linear(hidden_size, rank, bias=False)
        self.gate_up = nn.Linear(rank, hidden_size, bias=False)

    def gate(self, x: Tensor, raw: Tensor | None) -> Tensor:
        """(b, n, d) before the sigmoid, of the mixer's input x and what that was before the block's norm; None: x."""
        if self.reads_raw and raw is not None:
            x = raw
        found: Tensor = self.gate_proj(x) if self.is_full_rank else self.gate_up(self.gate_down(x))
        return found

    def output(self, o: Tensor, gate: Tensor) -> Tensor:
        """o: (b, n, h, k), gate: (b, n, d) -> (b, n, d)."""
        mixed: Tensor = self.o_proj(rms_norm(o.flatten(2), None, self.eps, gate))
        return mixed


@dataclass(frozen=True, kw_only=True)
class TNLForm(GatedForm):
    """What TransNormerLLM can have otherwise."""

    decay: str = "alibi"
    """-log of the decays of layer l of L, by heads h of H, both from 0: alibi, ALiBi's slopes times 1 - l/(L-1) + 1e-5;
    linear, 8h/H (1 - l/L); minimax, 2^(-8(h+1)/H) (1 - l/(L-1+1e-5) + 1e-5)."""
    lrpe: str = "first"
    """The layers that rotate q and k by learned angles: first, all or none."""
    causal: bool = True
    """Whether tokens read those before them; otherwise the whole row, by two scans whose outputs are added."""


def tnl_log_decays(kind: str, num_heads: int, layer: int, num_layers: int, device: torch.device) -> Tensor:
    """(h,) fp64; see ``TNLForm.decay``."""
    heads = torch.arange(num_heads, dtype=torch.float64, device=device)
    if kind == "linear":
        return -heads * (8 / num_heads) * (1 - layer / num_layers)
    if kind == "minimax":
        return -torch.pow(2.0, -8 * (heads + 1) / num_heads) * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)
    return -alibi_slopes(num_heads, device) * (1.0 if num_layers == 1 else 1 - layer / (num_layers - 1) + 1e-5)


class TNLMixer(GatedOutputMixer):
    """TransNormerLLM: a fixed decay per head and layer. The first layer rotates q and k by learned angles (LRPE).

    Args:
        hidden_size, num_heads: d and h.
        layer, num_layers: the decay becomes weaker from the first layer, 0, to the last.
        form: what is otherwise; None: nothing.
        gate_rank: inner width of the gate; None: d / h.
        eps: added to the mean square in the norm.
    """

    form: TNLForm

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        layer: int = 0,
        num_layers: int = 1,
        form: TNLForm | None = None,
        gate_rank: int | None = None,
        eps: float = 1e-6,
    ) -> None:
        form = form or TNLForm()
        super().__init__(hidden_size, num_heads, form=form, gate_rank=gate_rank, eps=eps)
        self.layer, self.num_layers = layer, num_layers
        self.theta: nn.Parameter | None
        if form.lrpe == "all" or (form.lrpe == "first" and layer == 0):
            self.theta = nn.Parameter(wavelengths(num_heads, self.head_dim).float())
        else:
            self.register_parameter("theta", None)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        *,
        raw: Tensor | None = None,
        coordinates: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """x: (b, n, d), normalised -> the same and the state ``S``: (b, h, K, k). raw: see ``gate``."""
        if not self.form.causal:
            refuse_state(self, state)
        q, k, v = F.silu(self.heads(self.q_proj(x))), F.silu(self.heads(self.k_proj(x))), self.heads(self.v_proj(x))
        wide = wide_dtype(x)
        left: State = {}
        if self.theta is not None:
            turns = phases(self.positions(x, mask, state, coordinates), self.theta.to(wide))
            q, k = (rotated_features(y.to(wide), turns) for y in (q, k))
            left["position"] = self.next_position(x, mask, state)
        log_decay = tnl_log_decays(self.form.decay, self.num_heads, self.layer, self.num_layers, x.device)
        # Rounded to fp32 as the trained model has it.
        before = self.matrix_state(x, state, k.size(-1))
        o, S = linear_attention(q, k, v, log_decay.to(wide), before, mask)
        if self.form.causal:
            return self.output(o, self.gate(x, raw)), {**left, "S": S}
        turned = None if mask is None else mask.flip(1)
        q, k, v = (y.flip(1) for y in (q, k, v))
        image, _ = linear_attention(q, k, v, log_decay.to(wide), before, turned)
        return self.output(o + image.flip(1), self.gate(x, raw)), {}


class CosFormer2Mixer(GatedOutputMixer):
    """cosFormer2: no decay; q and k are rotated by learned angles in every layer."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        form: GatedForm | None = None,
        gate_rank: int | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(hidden_size, num_heads, form=form or GatedForm(), gate_rank=gate_rank, eps=eps)
        self.theta = nn.Parameter(wavelengths(1, self.head_dim).repeat(num_heads, 1).float())

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        *,
        raw: Tensor | None = None,
        coordinates: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """x: (b, n, d), normalised -> the same and the state ``S``: (b, h, 2k, k). raw: see ``gate``."""
        q, k, v = F.silu(self.heads(self.q_proj(x))), F.silu(self.heads(self.k_proj(x))), self.heads(self.v_proj(x))
        wide = wide_dtype(x)
        turns = phases(self.positions(x, mask, state, coordinates), self.theta.to(wide))
        q, k = (rotated_features(y.to(wide), turns) for y in (q, k))
        no_decay = x.new_zeros(self.num_heads, dtype=wide)
        o, S = linear_attention(q, k, v, no_decay, self.matrix_state(x, state, k.size(-1)), mask)
        left = {"S": S, "position": self.next_position(x, mask, state)}
        return self.output(o, self.gate(x, raw)), left


@dataclass(frozen=True, kw_only=True)
class LightNetForm(GatedForm):
    """What LightNet can have otherwise: the switches of its ablation."""

    decay: bool = True
    """Additive decay; false: silu on the keys and plain sums."""
    shared_decay: bool = True
    """Whether k is the logarithm of the weights; false: that has low-rank weights of its own, and keys are silu(k)."""
    lrpe: bool = True
    """Whether q and the keys are rotated by angles."""
    learned_angles: bool = False
    """Whether these are learned."""
    tpe: bool = True
    """Whether the model gets the Toeplitz positional encoding behind its embedding."""
    output_norm: bool = True
    """Whether a norm stands before the gate."""
    full_rank_gate: bool = False
    """Whether the gate is one matrix (d, d)."""


class LightNetMixer(GatedOutputMixer):
    """LightNet: a running softmax average over the past, with fixed angles on q and on the weights.

    With ``causal`` false every token reads the average over the whole row, and there is no state.
    """

    form: LightNetForm
    theta: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        form: LightNetForm | None = None,
        gate_rank: int | None = None,
        causal: bool = True,
        eps: float = 1e-6,
    ) -> None:
        form = form or LightNetForm()
        full = form.full_rank_gate
        super().__init__(hidden_size, num_heads, form=form, gate_rank=gate_rank, full_rank_gate=full, eps=eps)
        if not causal and not form.decay:
            raise ValueError("LightNet without decay sums over earlier tokens: set causal to true")
        if not (form.shared_decay or (causal and form.decay)):
            raise ValueError("separate decay weights need a causal decay: set causal and decay to true")
        self.causal = causal
        learned = nn.Parameter(wavelengths(num_heads, self.head_dim).float()) if form.learned_angles else None
        self.register_parameter("theta", learned)
        if not form.shared_decay:
            self.decay_down = nn.Linear(hidden_size, self.head_dim, bias=False)
            self.decay_up = nn.Linear(self.head_dim, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        *,
        raw: Tensor | None = None,
        coordinates: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """x: (b, n, d), normalised -> the same and the state ``z``: (b, h, k), ``S``: (b, h, 2k, k). raw: see ``gate``.

        Without decay there is no ``z``, and without angles S has k rows.
        """
        if not self.causal:
            refuse_state(self, state)
        q, k, v = F.silu(self.heads(self.q_proj(x))), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        left: State = {}
        turns = None
        if self.form.lrpe:
            axes = 1 if coordinates is None else coordinates.size(-1)
            theta = wavelengths(self.num_heads, self.head_dim, x.device, axes) if self.theta is None else self.theta
            turns = phases(self.positions(x, mask, state, coordinates), theta.to(wide_dtype(x)))
            if self.causal:
                left["position"] = self.next_position(x, mask, state)
        apart = None if self.form.shared_decay else self.heads(self.decay_up(self.decay_down(x)))
        o = self.attended((q, k, v, apart), turns, state, mask, left)
        gate = self.gate(x, raw)
        if self.form.output_norm:
            return self.output(o, gate), left
        mixed: Tensor = self.o_proj(o.flatten(2) * torch.sigmoid(gate))
        return mixed, left

    def attended(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
        turns: tuple[Tensor, Tensor] | None,
        state: State | None,
        mask: Tensor | None,
        left: State,
    ) -> Tensor:
        """o (b, n, h, k) of q, k, v, and the logarithms of weights where k is not these.

        What is behind the last token is put into ``left``.
        """
        q, k, v, weights = inputs
        wide = wide_dtype(v)

        def turned(y: Tensor) -> Tensor:
            return y.to(wide) if turns is None else rotated_features(y.to(wide), turns)

        if not self.causal:
            S = softmax_average(k.to(wide), v, turned, mask)
            return torch.einsum("bnhk, bhkv -> bnhv", turned(q), S).to(v.dtype)
        before = self.matrix_state(v, state, self.head_dim * (1 if turns is None else 2))
        if not self.form.decay:
            no_decay = v.new_zeros(self.num_heads, dtype=wide)
            o, left["S"] = linear_attention(turned(q), turned(F.silu(k)), v, no_decay, before, mask)
            return o
        z = torch.full_like(k[:, 0], EMPTY, dtype=wide) if state is None else state["z"]
        logs, keys = (k, None) if weights is None else (weights, F.silu(k))
        if mask is not None:
            real = mask[..., None, None]
            logs, v = torch.where(real, logs, EMPTY), torch.where(real, v, 0)
            keys = None if keys is None else torch.where(real, keys, 0)
        shares, log_left, left["z"] = softmax_scan(logs, z)
        # Both halves of the features share a weight, and so a decay.
        log_decay = log_left if turns is None else torch.cat([log_left, log_left], dim=-1)
        keys = turned(shares if keys is None else keys)
        o, left["S"] = gated_linear_attention(turned(q), keys, v, log_decay, before)
        return o


@dataclass(frozen=True, kw_only=True)
class HGRN2Form:
    """What HGRN2 can have otherwise."""

    query_activation: str = "silu"
    """silu or none."""
    lower_bounds: str = "from_zero"
    """from_zero: 0 in the first layer; to_one: 1 in the last, whose mixer then writes nothing."""
    output_projection: bool = True
    """Whether a matrix W_o follows the norm."""
    causal: bool = True
    """Whether tokens read those before them; otherwise the whole row, by two scans whose outputs are added."""


class HGRN2Mixer(HeadMixer):
    """HGRN2: a decay per channel that depends on the token, from ``lower_bound`` up. No gate, no positions."""

    def __init__(self, hidden_size: int, num_heads: int, *, form: HGRN2Form | None = None, eps: float = 1e-6) -> None:
        form = form or HGRN2Form()
        super().__init__(hidden_size, num_heads, eps=eps, output_projection=form.output_projection)
        self.form = form
        self.f_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        *,
        lower_bound: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """x: (b, n, d), normalised -> the same and the state ``S``: (b, h, k, k).

        ``lower_bound``: (d,), from 0 to 1; None: 0. ``lower_bounds`` makes those of a model's layers.
        """
        if not self.form.causal:
            refuse_state(self, state)
        wide = wide_dtype(x)
        bound = x.new_zeros(self.hidden_size, dtype=wide) if lower_bound is None else lower_bound.to(wide)
        q, v = self.heads(self.q_proj(x)), self.heads(self.v_proj(x))
        if self.form.query_activation == "silu":
            q = F.silu(q)
        log_decay, k = log_forget(self.heads(self.f_proj(x)), self.heads(bound))
        # Rounded once, as the trained model has it; log f is summed over tokens, and so would be its error.
        k = k.to(v.dtype)
        if mask is not None:
            real = mask[..., None, None]
            k, v, log_decay = torch.where(real, k, 0), torch.where(real, v, 0), torch.where(real, log_decay, 0)
        before = self.matrix_state(x, state, self.head_dim)
        o, S = gated_linear_attention(q, k, v, log_decay, before)
        if not self.form.causal:
            q, k, v, log_decay = (y.flip(1) for y in (q, k, v, log_decay))
            image, _ = gated_linear_attention(q, k, v, log_decay, before)
            o = o + image.flip(1)
        mixed: Tensor = self.o_proj(rms_norm(o.flatten(2), None, self.eps))
        return mixed, {"S": S} if self.form.causal else {}


def lower_bounds(table: Tensor, kind: str = "from_zero") -> Tensor:
    """β (l, d) of HGRN2's layers: the table's softmax over the layers, summed up to each, less the first row.

    "to_one": with it; the last sum, over all layers, is 1.
    """
    shares = torch.softmax(table, dim=0)
    if kind == "to_one":
        return F.pad(shares.cumsum(dim=0)[:-1], (0, 0, 0, 1), value=1.0)
    return F.pad(shares[1:].cumsum(dim=0), (0, 0, 1, 0))


def log_forget(logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """log f and 1 - f for f = β + (1 - β) sigmoid(logits): both with relative accuracy at both ends.

    logits: (b, n, h, k). bound: β (h, k), fp32 or wider, the dtype of the results.
    """
    logits = logits.to(bound.dtype)
    forget = bound + (1 - bound) * torch.sigmoid(logits)
    key = (1 - bound) * torch.sigmoid(-logits)
    large, bounded = forget > 0.5, bound > 0
    # Each branch gets a harmless input where the other is taken: its gradient there would be 0 times infinity.
    near_one = torch.log1p(-torch.where(large, key, 0.0))
    near_zero = torch.log(torch.where(large | ~bounded, 1.0, forget))
    return torch.where(bounded, torch.where(large, near_one, near_zero), F.logsigmoid(logits)), key


def wavelengths(num_heads: int, width: int, device: torch.device | None = None, axes: int = 1) -> Tensor:
    """(h, k) fp64: the angles per token 10000^(-2j / (h k)), j counted over heads and channels, for each axis anew."""
    channels = num_heads * width // axes
    j = torch.arange(channels, dtype=torch.float64, device=device)
    return torch.pow(10000.0, -2 * j / channels).view(num_heads, -1).repeat(1, axes)
