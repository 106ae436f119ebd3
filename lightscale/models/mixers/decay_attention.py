"""Causal linear attention with one scalar decay per head, of each token or of all: LION-S, RetNet's and Mamba-2's form.

    q, k = φ(x W_q), φ(x W_k);  v = x W_v;  S_t = a_t S_{t-1} + g_t k_t [v_t, 1]ᵀ;  [y_t, z_t] = S_tᵀ q_t
    out = W_o concat y_t / (z_t + ε),  or  W_o norm(concat y_t),  or  W_o (norm(concat y_t) * sigmoid(x W_down W_up))

The options select the decays a and other differences; without ``scale`` there is neither the column of ones nor z.

``decay``   sigmoid: a = σ(w·x + b), g = 1, or 1 - a with ``input_gate`` (LION-S, arXiv 2502.16249, section 3 and
            equation 8: the gate of the token that is entered; Gated RFA, its equation 135);
            softplus: Δ = softplus(w·x + b), a = exp(-Δ e^r), g = Δ with ``input_gate`` (Mamba-2, arXiv 2405.21060,
            equations 1 and 2 with A = -e^r, discretised as in Mamba, arXiv 2312.00752, section 2: ā = exp(ΔA), b̄ = ΔB);
            learned: a = σ(c_h); fixed: a = 1 - 2^(-5 - h) (RetNet, arXiv 2307.08621, equation 8); none.
``positions``  rope: RetNet's rotations (its equation 5; without xPos's growth, which γ takes up); lrpe: learned angles.
``short_convolution``  before queries, keys and values, silu behind it (``layers/short_convolution.py``).

Differences from RetNet: no norm per head and no full-rank swish gate. Differences from Mamba-2: no heads that share B
and C, no skip D x and no wider values. Norm and gate are those of the other mixers here. Queries are not divided by √k,
because the norm and the division by z both remove that factor.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightscale.config.model import ModelConfig
from lightscale.kernels.common.angles import Angles, phases_of
from lightscale.models.layers.context import Finish, SequenceContext
from lightscale.models.layers.head_parameter import HeadParameter
from lightscale.models.layers.linear import ReplicatedLinear, column_parallel, row_parallel
from lightscale.models.layers.positions import LRPE, lrpe_angles, rope, rope_phases, rotary_angles
from lightscale.models.layers.short_convolution import ConvolutionTail, ShortConvolution
from lightscale.models.mixers.interface import Mixer
from lightscale.models.mixers.linear_attention import begin_attention
from lightscale.models.mixers.lion import kept_features, retnet_log_decays
from lightscale.models.specs.decay_attention import decay_attention_options, key_and_value_width, key_groups
from lightscale.models.specs.gated import gate_rank
from lightscale.parallel.initialization import set_initializer
from lightscale.parallel.megatron import TransformerConfig

# Mamba-2's initial values, of its code: steps between 1e-3 and 1e-1, rates between 1 and 16.
_LEAST_STEP, _MOST_STEP, _MOST_RATE = 1e-3, 1e-1, 16.0


class DecayAttention(Mixer):
    """(n / tensor, b, d) -> (n / tensor, b, d).

    The state is ``S``: (b, h, k, v), doubled in k by lrpe, with a column more by ``scale``; and with a short
    convolution ``tail``: (b, W - 1, 3 h k), the last tokens that it reads, keys and values by head and then queries.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        self.own = decay_attention_options(model, self.layer)
        d, std, group = model.hidden_size, model.init_std, self.group
        # Rows are ordered head by head, k and v of a head together, so that a contiguous shard holds whole heads.
        self.kv_proj = column_parallel(config, d, 2 * d, std=std, group=group)
        self.q_proj = column_parallel(config, d, d, std=std, group=group)
        self.out_proj = row_parallel(config, d, d, std=self.output_std, group=group)
        if self.own.output == "gated":
            rank = gate_rank(model, self.layer)
            self.gate_down = ReplicatedLinear(config, d, rank, std=std)
            self.gate_up = column_parallel(config, rank, d, std=std, group=group)
        if width := self.own.short_convolution:
            self.kv_conv = ShortConvolution(config, 2 * d, width, group)
            self.q_conv = ShortConvolution(config, d, width, group)
        # Kept in fp32 in half-precision models: multiplied by distances and positions.
        wide = torch.promote_types(config.params_dtype, torch.float32)
        device = self.kv_proj.weight.device
        if self.own.positions == "lrpe":
            self.lrpe = LRPE(config, lrpe_angles(model.num_heads, model.head_dim, model.axes), group)
        elif self.own.positions == "rope":
            self.register_buffer("theta", rotary_angles(model.head_dim)[None].to(device, wide), persistent=False)
        if self.own.decay == "fixed":
            decays = retnet_log_decays(model.num_heads)[self.heads]
            self.register_buffer("log_decay", decays.to(device, wide), persistent=False)
        self._make_decays(config)

    def _make_decays(self, config: TransformerConfig) -> None:
        """The parameters of decays that are learned."""
        model, kind, group = self.model, self.own.decay, self.group
        if kind in ("sigmoid", "softplus"):
            shape = model.hidden_size, model.num_heads
            self.forget_proj = column_parallel(config, *shape, std=model.init_std, group=group, bias=True)
            draw = step_bias if kind == "softplus" else self._decay_bias
            set_initializer(self.forget_proj.bias, draw)
        if kind == "softplus":
            self.decay = HeadParameter(config, "log_rate", (model.num_heads,), log_rates, group, wide=True)
        elif kind == "learned":
            self.decay = HeadParameter(config, "logit", (model.num_heads,), _retnet_logits, group, wide=True)

    def _decay_bias(self, weight: Tensor, generator: torch.Generator) -> None:
        weight.fill_(math.log(self.own.initial_decay / (1 - self.own.initial_decay)))

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        if self.own.short_convolution:
            return self._mix_convolved(x, context)
        finish = self._begin(self.kv_proj(x)[0], x, context)
        # While states travel.
        gate = self._gate(x)
        return self._output(finish(self._queries(self.q_proj(x)[0], context)), gate)

    def _mix_convolved(self, x: Tensor, context: SequenceContext) -> Tensor:
        kv, q = self.kv_proj(x)[0], self.q_proj(x)[0]
        heads = key_groups(self.model, self.layer)
        key, value = key_and_value_width(self.model, self.layer)
        state = self.num_heads * heads, key // heads, value
        # The last tokens travel while the gate is computed.
        tail = ConvolutionTail((kv, q), self.own.short_convolution, context, self.state_name, state)
        gate = self._gate(x)
        within, (of_kv, of_q) = tail.arrive()
        finish = self._begin(self.kv_conv.convolve(of_kv, kv, context.positions), x, within)
        q = self.q_conv.convolve(of_q, q, context.positions)
        o = finish(self._queries(q, within))
        tail.leave()
        return self._output(o, gate)

    def _begin(self, kv: Tensor, x: Tensor, context: SequenceContext) -> Finish:
        """kv: (n, b, 2 h k); starts the attention, over sequence ranks as well."""
        n, b, _ = kv.shape
        k, v = kv.view(n, b, self.num_heads, 2, self.head_dim).transpose(0, 1).unbind(dim=3)
        k = self._turned(self._features(k), context)
        log_decay, written = self._decays(x)
        if written is not None:
            k = k * written[..., None].to(k.dtype)
        if self.own.scale:
            # The state's last column is the sum of the keys: what multiplies a query to the sum of its scores.
            v = torch.cat([v, v.new_ones(*v.shape[:3], 1)], dim=-1)
        angles = self.lrpe(context.coordinates) if self.own.positions == "lrpe" else None
        return begin_attention(k, v, log_decay, angles=angles, context=context, state_name=self.state_name)

    def _queries(self, q: Tensor, context: SequenceContext) -> Tensor:
        """(n, b, h k) -> (b, n, h, k)."""
        return self._turned(self._features(q.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)), context)

    def _features(self, x: Tensor) -> Tensor:
        kind = self.own.feature_map
        if kind == "silu":
            return F.silu(x)
        return x if kind == "none" else kept_features(x, "silu" if kind == "shifted_silu" else kind)

    def _turned(self, x: Tensor, context: SequenceContext) -> Tensor:
        if self.own.positions != "rope":
            return x
        return rope(x, rope_phases(phases_of(Angles(self.theta, context.positions), self.theta.dtype), x.dtype))

    def _decays(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """log a, (h,) or (b, n, h), fp32 at least, and what tokens write, (b, n, h); None for those that are 1."""
        kind = self.own.decay
        if kind == "none":
            return None, None
        if kind == "fixed":
            return self.log_decay, None
        if kind == "learned":
            return F.logsigmoid(self.decay()), None
        logits = self.forget_proj(x)[0].transpose(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if kind == "softplus":
            step = F.softplus(logits)
            return -step * self.decay().exp(), step if self.own.input_gate else None
        # 1 - σ(a) is σ(-a), which is small but not 0 where σ(a) has rounded to 1.
        return F.logsigmoid(logits), torch.sigmoid(-logits) if self.own.input_gate else None

    def _gate(self, x: Tensor) -> Tensor | None:
        """(n, b, h k) before the sigmoid; None without a gate."""
        if self.own.output != "gated":
            return None
        # Down on each tensor rank's own tokens, so that gate_up gathers them gate_rank wide instead of d.
        gate: Tensor = self.gate_up(self.gate_down(x))[0]
        return gate

    def _output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """o: (b, n, h, v), with the column of sums where outputs are scaled -> (n / tensor, b, d)."""
        if self.own.scale:
            o = _Scaled.apply(o, self.own.eps)
        mixed = o.transpose(0, 1).flatten(2) if self.own.output == "plain" else self._norm(o, gate)
        out: Tensor = self.out_proj(mixed)[0]
        return out


class _Scaled(torch.autograd.Function):
    """y / (z + ε) of [y, z], fp32 at least inside; only [y, z] is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(o)
        ctx.eps = eps
        wide = o.to(torch.promote_types(o.dtype, torch.float32))
        return (wide[..., :-1] / (wide[..., -1:] + eps)).to(o.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (o,) = ctx.saved_tensors
        wide = o.to(torch.promote_types(o.dtype, torch.float32))
        sums = wide[..., -1:] + ctx.eps
        of_values = gradient.to(wide.dtype) / sums
        of_sums = -(of_values * wide[..., :-1]).sum(-1, keepdim=True) / sums
        return torch.cat([of_values, of_sums], dim=-1).to(o.dtype), None


def step_bias(weight: Tensor, generator: torch.Generator) -> None:
    """b such that softplus(b) is spread evenly in its logarithm."""
    logs = torch.empty_like(weight).uniform_(math.log(_LEAST_STEP), math.log(_MOST_STEP), generator=generator)
    step = logs.exp()
    # The inverse of softplus: log(e^s - 1).
    weight.copy_(step + torch.log(-torch.expm1(-step)))


def log_rates(weight: Tensor, generator: torch.Generator) -> None:
    """r with e^r spread evenly from 1 to 16."""
    weight.uniform_(1.0, _MOST_RATE, generator=generator).log_()


def _retnet_logits(weight: Tensor, generator: torch.Generator) -> None:
    """c with σ(c) RetNet's decays, 1 - 2^(-5 - h)."""
    exponent = 5.0 + torch.arange(weight.numel(), dtype=torch.float64)
    weight.copy_(torch.log(torch.pow(2.0, exponent) - 1))
