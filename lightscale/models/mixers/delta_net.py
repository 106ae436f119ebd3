"""The mixers of the delta rule: DeltaNet, gated DeltaNet, and Kimi Delta Attention.

    q, k, v = silu(conv(x W_q)), silu(conv(x W_k)), silu(conv(x W_v));  q, k to length 1, q / sqrt(K)
    S_t = (I - β_t k_t k_tᵀ) diag(α_t) S_{t-1} + β_t k_t v_tᵀ;  β_t = σ(x_t W_β), doubled with ``negative_eigenvalues``
    out = W_o concat(norm(S_tᵀ q_t) ⊙ gate)

``delta-net``        α = 1, no gate (arXiv 2406.06484, section 4)
``gated-delta-net``  α = exp(-e^A softplus(x W_α + b)), of each head; silu(x W_g) (arXiv 2412.06464, section 3.4; as in
                     Qwen3-Next, Qwen3.5 and OLMo-Hybrid)
``kimi-delta``       the same of each channel, by two matrices; σ(x W_down W_up) (arXiv 2510.26692, section 4)

The norm is of each head, with a weight that all heads share. A, b and that weight are fp32 in half-precision models,
and are not decayed: e^A is 16 at most, and bf16 would round the steps of A away.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.kernels import delta_rule
from lightscale.kernels.norm import norm
from lightscale.models.layers.context import Finish, SequenceContext
from lightscale.models.layers.head_parameter import HeadParameter
from lightscale.models.layers.linear import ReplicatedLinear, column_parallel, row_parallel
from lightscale.models.layers.norms import HeadNorm
from lightscale.models.layers.short_convolution import ConvolutionTail, ShortConvolution
from lightscale.models.layers.states import going_on
from lightscale.models.mixers.decay_attention import step_bias
from lightscale.models.mixers.interface import Mixer
from lightscale.models.specs.delta_net import (
    DeltaNetSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    delta_options,
    delta_sizes,
)
from lightscale.models.specs.gated import gate_rank
from lightscale.parallel.megatron import TransformerConfig
from lightscale.parallel.sequence import DeltaRuleScan

# Of the published layers: added to the square of a query's or key's length, and the range of e^A at first.
_UNIT_EPS = 1e-6
_RATES = 0.01, 16.0


class DeltaNet(Mixer):
    """(n / tensor, b, d) -> (n / tensor, b, d).

    The state is ``S``: (b, N, K, V), N heads of values; and with a short convolution ``tail``: (b, W - 1, c), the last
    tokens that it reads, keys and values by head and then queries.
    """

    spec: ClassVar[type[DeltaNetSpec]] = DeltaNetSpec

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        self.own, self.sizes = delta_options(model, self.layer), delta_sizes(model, self.layer)
        sizes, d, std, group = self.sizes, model.hidden_size, model.init_std, self.group
        self.value_heads = sizes.value_heads // group.size()
        shapes = self.spec.parameter_shapes(model, self.layer)
        # Rows are ordered by heads of keys, all of a head together, so that a contiguous shard holds whole heads. Two
        # matrices and not seven, because with tensor ranks the input is gathered for each of them.
        self.kv_proj = column_parallel(config, d, shapes["kv_proj.weight"][0], std=std, group=group)
        self.q_proj = column_parallel(config, d, shapes["q_proj.weight"][0], std=std, group=group)
        self.out_proj = row_parallel(config, sizes.values, d, std=self.output_std, group=group)
        self.output_norm = HeadNorm(config, sizes.value_width, self.own.output_norm_eps, group, wide=True)
        if width := sizes.convolution:
            self.kv_conv = ShortConvolution(config, sizes.keys + sizes.values, width, group)
            self.q_conv = ShortConvolution(config, sizes.keys, width, group)
        if self.spec.decay != "none":
            self.decay = HeadParameter(config, "A_log", shapes["decay.A_log"], _log_rates, group, wide=True)
            self.step = HeadParameter(config, "dt_bias", shapes["step.dt_bias"], step_bias, group, wide=True)
        if self.spec.decay == "channel":
            rank = gate_rank(model, self.layer)
            self.forget_down = ReplicatedLinear(config, d, rank, std=std)
            self.forget_up = column_parallel(config, rank, sizes.value_heads * sizes.key_width, std=std, group=group)
            self.gate_down = ReplicatedLinear(config, d, rank, std=std)
            self.gate_up = column_parallel(config, rank, sizes.values, std=std, group=group)

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        sizes = self.sizes
        of_values = sizes.groups * sizes.value_width
        k, v, beta, a = self._parts(self.kv_proj(x)[0], (sizes.key_width, of_values, sizes.groups))
        q, full_gate = self._parts(self.q_proj(x)[0], (sizes.key_width,))
        kv = torch.cat([k, v], dim=-1).flatten(2)
        q = q.flatten(2)
        if not sizes.convolution:
            log_decay, beta = self._log_decay(x, a), self._beta(beta)
            finish = self._begin(F.silu(kv), log_decay, beta, context)
            return self._output(finish(self._unit(self._by_head(F.silu(q)), query=True)), self._gate(x, full_gate))
        # The last tokens travel while decays and gate are computed.
        state = self.value_heads, sizes.key_width, sizes.value_width
        tail = ConvolutionTail((kv, q), sizes.convolution, context, self.state_name, state)
        log_decay, beta, gate = self._log_decay(x, a), self._beta(beta), self._gate(x, full_gate)
        within, (of_kv, of_q) = tail.arrive()
        finish = self._begin(self.kv_conv.convolve(of_kv, kv, context.positions), log_decay, beta, within)
        q = self.q_conv.convolve(of_q, q, context.positions)
        o = finish(self._unit(self._by_head(q), query=True))
        tail.leave()
        return self._output(o, gate)

    def _parts(self, projected: Tensor, widths: tuple[int, ...]) -> list[Tensor]:
        """(n, b, heads x rows) -> (n, b, heads, width) each, the rest of a head last."""
        heads = projected.unflatten(-1, (self.num_heads, -1))
        return list(heads.split([*widths, heads.size(-1) - sum(widths)], dim=-1))

    def _by_head(self, x: Tensor) -> Tensor:
        """(n, b, heads x width) -> (b, n, heads, width)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)

    def _unit(self, x: Tensor, *, query: bool = False) -> Tensor:
        """x / |x| over the last dimension, with queries divided by sqrt(K)."""
        # The norm has the root of the mean square; the factor is applied inside, and all is rounded once.
        width = x.size(-1)
        factor = x.new_full((width,), 1 / width if query else width**-0.5, dtype=delta_rule.state_dtype(x.dtype))
        return norm(x, factor, eps=_UNIT_EPS / width)

    def _beta(self, logits: Tensor) -> Tensor:
        """(n, b, heads, groups) -> (b, n, N), fp32 at least."""
        beta = torch.sigmoid(logits.flatten(2).transpose(0, 1).to(delta_rule.state_dtype(logits.dtype)))
        return 2 * beta if self.own.negative_eigenvalues else beta

    def _log_decay(self, x: Tensor, a: Tensor) -> Tensor | None:
        """(b, n, N) or (b, n, N, K), fp32 at least; None without decays."""
        if self.spec.decay == "none":
            return None
        if self.spec.decay == "channel":
            a = self.forget_up(self.forget_down(x))[0].unflatten(-1, (self.value_heads, -1))
        else:
            a = a.flatten(2)
        step = F.softplus(a.transpose(0, 1).to(delta_rule.state_dtype(a.dtype)) + self.step())
        rate = self.decay().exp()
        return -(rate if step.dim() == 3 else rate[:, None]) * step

    def _gate(self, x: Tensor, gate: Tensor) -> Tensor | None:
        """(n, b, N, V), before its activation."""
        if self.spec.gate == "none":
            return None
        if self.spec.gate == "sigmoid":
            gate = self.gate_up(self.gate_down(x))[0]
        return gate.flatten(2).unflatten(-1, (self.value_heads, -1))

    def _begin(self, kv: Tensor, log_decay: Tensor | None, beta: Tensor, context: SequenceContext) -> Finish:
        """kv: (n, b, heads x (K + groups V)); starts the operator, over sequence ranks as well."""
        k, v = self._by_head(kv).split([self.sizes.key_width, self.sizes.groups * self.sizes.value_width], dim=-1)
        k, v = self._unit(k), v.flatten(2).unflatten(-1, (self.value_heads, -1))
        if context.exchange is not None:
            return context.begin(DeltaRuleScan, k, v, log_decay, beta, layer=self.state_name)
        return lambda q: self._attend(q, k, v, log_decay, beta, context)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, context: SequenceContext
    ) -> Tensor:
        if context.states is None:
            return delta_rule.delta_rule(q, k, v, log_decay, beta, cu_seqlens=context.cu_seqlens)[0]

        def step(before: Tensor) -> tuple[Tensor, Tensor]:
            decay = None if log_decay is None else log_decay[:, 0]
            return delta_rule.recurrent_step(q[:, 0], k[:, 0], v[:, 0], decay, beta[:, 0], before)

        return going_on(
            context,
            self.state_name,
            (v.size(0), v.size(2), q.size(3), v.size(3)),
            delta_rule.state_dtype(q.dtype),
            num_tokens=q.size(1),
            step=step,
            chunks=lambda before: delta_rule.delta_rule(
                q, k, v, log_decay, beta, initial_state=before, output_final_state=True, cu_seqlens=context.cu_seqlens
            ),
        )

    def _output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """o: (b, n, N, V), gate: (n, b, N, V) -> (n / tensor, b, d)."""
        out: Tensor = self.out_proj(self.output_norm(o.transpose(0, 1), gate, self.spec.gate).flatten(2))[0]
        return out


class GatedDeltaNet(DeltaNet):
    """``DeltaNet`` with a decay per head and a gate."""

    spec = GatedDeltaNetSpec


class KimiDelta(DeltaNet):
    """``DeltaNet`` with a decay per channel and a gate, both of low rank."""

    spec = KimiDeltaSpec


def _log_rates(weight: Tensor, generator: torch.Generator) -> None:
    weight.uniform_(*_RATES, generator=generator).log_()
