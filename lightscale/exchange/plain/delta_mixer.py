"""The delta rule: DeltaNet, gated DeltaNet, and Kimi Delta Attention."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.exchange.plain.decay_mixer import short_convolution
from lightscale.exchange.plain.mixers import State
from lightscale.exchange.plain.operators import delta_rule, rms_norm, wide_dtype


@dataclass(frozen=True, kw_only=True)
class DeltaForm:
    """The sizes of the mixer, and what can be otherwise."""

    key_head_dim: int | None = None
    """Of queries and keys; None: hidden_size / num_heads, as value_head_dim."""
    num_value_heads: int | None = None
    """A multiple of the heads of queries and keys, which they share out; None: as many."""
    value_head_dim: int | None = None
    negative_eigenvalues: bool = False
    """β up to 2."""
    short_convolution: int = 4
    """Tokens that a convolution before q, k and v sees; 0: none. SiLU follows either."""
    output_norm_eps: float = 1e-5


class DeltaNetMixer(nn.Module):
    """DeltaNet: no decay, no gate. The parts that the mixers of the delta rule share are here.

    The state is ``S``: (b, N, K, V), and with a convolution ``tail``: (b, W - 1, c), of q, k and v.

    Args:
        hidden_size, num_heads: d, and the number of heads of queries and keys.
        form: sizes and options; None: the defaults.
    """

    decay = "none"
    """none; head: a decay per head and token; channel: per channel of the keys as well."""
    gate = "none"
    """none; silu, of one matrix; sigmoid, of two matrices."""
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(self, hidden_size: int, num_heads: int, *, form: DeltaForm | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.form = form = form or DeltaForm()
        if hidden_size % num_heads and not (form.key_head_dim and form.value_head_dim):
            raise ValueError(f"hidden_size = {hidden_size} is not divisible by num_heads = {num_heads}")
        width = hidden_size // num_heads
        self.key_width, self.value_width = form.key_head_dim or width, form.value_head_dim or width
        self.value_heads = form.num_value_heads or num_heads
        if self.value_heads % num_heads:
            raise ValueError(f"num_value_heads = {self.value_heads} is not a multiple of num_heads = {num_heads}")
        keys, values = num_heads * self.key_width, self.value_heads * self.value_width
        self.sizes = [keys, keys, values]
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.value_heads, bias=False)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.o_norm = nn.Parameter(torch.empty(self.value_width))
        for name, size in zip(("q_conv", "k_conv", "v_conv"), self.sizes, strict=True):
            if form.short_convolution:
                self.register_parameter(name, nn.Parameter(torch.empty(size, form.short_convolution)))
        if self.decay != "none":
            of_channels = (self.key_width,) if self.decay == "channel" else ()
            self.A_log = nn.Parameter(torch.empty(self.value_heads))
            self.dt_bias = nn.Parameter(torch.empty(self.value_heads, *of_channels))
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """The initial values of what is in none of the linear layers."""
        nn.init.ones_(self.o_norm)
        if self.decay != "none":
            self.A_log.copy_(torch.linspace(1, 16, self.value_heads).log())
            nn.init.constant_(self.dt_bias, -4.6)
        if width := self.form.short_convolution:
            for name in ("q_conv", "k_conv", "v_conv"):
                nn.init.uniform_(self.get_parameter(name), -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor, state: State | None = None, mask: Tensor | None = None) -> tuple[Tensor, State]:
        """x: (b, n, d), normalised -> the same and the state."""
        left: State = {}
        projected = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        if self.form.short_convolution:
            weight = torch.cat([self.get_parameter(name) for name in ("q_conv", "k_conv", "v_conv")])
            projected, left["tail"] = short_convolution(projected, weight, state, mask)
        else:
            projected = F.silu(projected)
        q, k, v = projected.split(self.sizes, dim=-1)
        q, k = (unit(y.unflatten(-1, (-1, self.key_width))) for y in (q, k))
        groups = self.value_heads // self.num_heads
        q, k = (y.repeat_interleave(groups, dim=2) for y in ((q * self.key_width**-0.5).to(x.dtype), k.to(x.dtype)))
        v = v.unflatten(-1, (-1, self.value_width))
        beta = torch.sigmoid(self.b_proj(x).to(wide_dtype(x))) * (2 if self.form.negative_eigenvalues else 1)
        log_decay = self.log_decay(x, beta)
        if mask is not None:
            # What is padding writes nothing and lets all pass.
            beta = torch.where(mask[..., None], beta, 0)
            log_decay = torch.where(mask[..., None, None], log_decay, 0)
            k, v = (torch.where(mask[..., None, None], y, 0) for y in (k, v))
        if state is None:
            before = beta.new_zeros(x.size(0), self.value_heads, self.key_width, self.value_width)
        else:
            before = state["S"]
        o, left["S"] = delta_rule(q, k, v, log_decay.expand(k.shape), beta, before)
        return self.output(x, o), left

    def log_decay(self, x: Tensor, beta: Tensor) -> Tensor:
        """(b, n, N, 1) or (b, n, N, K), fp32 at least."""
        forget = self.forget(x)
        if forget is None:
            return torch.zeros_like(beta)[..., None]
        step = forget.to(beta.dtype).unflatten(-1, (self.value_heads, -1))
        step = F.softplus(step + self.dt_bias.to(beta.dtype).view(self.value_heads, -1))
        return -self.A_log.to(beta.dtype).exp()[:, None] * step

    def output(self, x: Tensor, o: Tensor) -> Tensor:
        """x: (b, n, d), the mixer's input; o: (b, n, N, V)."""
        gate = self.output_gate(x)
        if gate is None:
            o = rms_norm(o, self.o_norm, self.form.output_norm_eps)
        else:
            gate = gate.view(o.shape).to(wide_dtype(o))
            # Rounded once, as in training.
            wide = rms_norm(o.to(gate.dtype), self.o_norm, self.form.output_norm_eps)
            o = (wide * (F.silu(gate) if self.gate == "silu" else torch.sigmoid(gate))).to(o.dtype)
        mixed: Tensor = self.o_proj(o.flatten(2))
        return mixed

    def forget(self, x: Tensor) -> Tensor | None:
        """(b, n, N) or (b, n, N K), before softplus; None: nothing decays."""
        return None

    def output_gate(self, x: Tensor) -> Tensor | None:
        """(b, n, N V), before its activation; None: the outputs are not gated."""
        return None


class GatedDeltaNetMixer(DeltaNetMixer):
    """Gated DeltaNet: a decay per head, and a gate of full rank; the arguments of ``DeltaNetMixer``."""

    decay, gate = "head", "silu"

    def __init__(self, hidden_size: int, num_heads: int, *, form: DeltaForm | None = None) -> None:
        super().__init__(hidden_size, num_heads, form=form)
        self.f_proj = nn.Linear(hidden_size, self.value_heads, bias=False)
        self.gate_proj = nn.Linear(hidden_size, self.sizes[2], bias=False)

    def forget(self, x: Tensor) -> Tensor:
        """See ``DeltaNetMixer``."""
        projected: Tensor = self.f_proj(x)
        return projected

    def output_gate(self, x: Tensor) -> Tensor:
        """See ``DeltaNetMixer``."""
        projected: Tensor = self.gate_proj(x)
        return projected


class KimiDeltaMixer(DeltaNetMixer):
    """Kimi Delta Attention: a decay per channel of the keys, and a gate; each by two matrices.

    Args:
        hidden_size, num_heads, form: as of ``DeltaNetMixer``.
        gate_rank: the inner width of decays and gate; None: hidden_size / num_heads.
    """

    decay, gate = "channel", "sigmoid"

    def __init__(
        self, hidden_size: int, num_heads: int, *, form: DeltaForm | None = None, gate_rank: int | None = None
    ) -> None:
        super().__init__(hidden_size, num_heads, form=form)
        rank = hidden_size // num_heads if gate_rank is None else gate_rank
        self.forget_down = nn.Linear(hidden_size, rank, bias=False)
        self.forget_up = nn.Linear(rank, self.value_heads * self.key_width, bias=False)
        self.gate_down = nn.Linear(hidden_size, rank, bias=False)
        self.gate_up = nn.Linear(rank, self.sizes[2], bias=False)

    def forget(self, x: Tensor) -> Tensor:
        """See ``DeltaNetMixer``."""
        projected: Tensor = self.forget_up(self.forget_down(x))
        return projected

    def output_gate(self, x: Tensor) -> Tensor:
        """See ``DeltaNetMixer``."""
        projected: Tensor = self.gate_up(self.gate_down(x))
        return projected


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last dim, fp32 at least."""
    wide = x.to(wide_dtype(x))
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


DELTA_MIXERS: dict[str, Callable[..., DeltaNetMixer]] = {
    "delta-net": DeltaNetMixer,
    "gated-delta-net": GatedDeltaNetMixer,
    "kimi-delta": KimiDeltaMixer,
}
"""By the names that ``Shape.mixers`` has."""
