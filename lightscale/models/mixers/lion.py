"""LION's token mixers: linear attention of every token to its whole document, before and behind, in linear time.

    q, k = φ(x W_q), φ(x W_k);  v = x W_v;  A = q kᵀ ⊙ M;  out = W_o concat (A v)_i / (Σ_j A_ij + ε)
    M_ij = the product of the decays between the tokens i and j, 1 on the diagonal

(arXiv 2502.16249, equations 20 to 25.) LION-LIT has no decay, LION-RetNet a fixed one per head, and LION-S one per head
and token, a = σ(x W_a + b). The scaling comes after the mask, and ε is added once to the sum over both directions and
all sequence ranks. There are neither positions nor an output gate, because decays encode positions. By an option LION-S
has a decay for each value channel (C.7, equation 136), and then as many sums. ``attention_bias``: projections have a
bias, as in the vision transformers of the authors' code. ``patch_order`` = "alternating": M is the mean of the masks of
two orders of an image's patches, along rows and along columns, every second of them backwards (C.8, LION-S (v2)).
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.kernels.lion import lion, lion_vector
from lightscale.models.layers.context import Finish, SequenceContext
from lightscale.models.layers.linear import column_parallel, row_parallel
from lightscale.models.layers.patch_orders import PatchOrders
from lightscale.models.mixers.interface import Mixer
from lightscale.models.specs.lion import lion_options, lion_s_options, num_decays
from lightscale.parallel.initialization import set_initializer
from lightscale.parallel.megatron import TransformerConfig
from lightscale.parallel.sequence import LionScan, LionVectorScan


def features(x: Tensor, kind: str) -> Tensor:
    """φ(x) over the last dim: "elu" elu(x) + 1, "silu" (silu(x) + 1/2) / ‖·‖₂, "none" x; fp32 inside, rounded once.

    "elu" is that of linear transformers (arXiv 2006.16236), "silu" that of the authors' code. Both are positive, and so
    are all products of theirs.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if kind == "elu":
        # Not elu(x) + 1, which rounds small values away.
        return torch.where(wide > 0, wide + 1, wide.clamp(max=0).exp()).to(x.dtype)
    if kind == "silu":
        return F.normalize(F.silu(wide) + 0.5, dim=-1, eps=0.0).to(x.dtype)
    return x


class _Features(torch.autograd.Function):
    """``features`` that keeps only its input for the backward pass, where it is computed again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        return features(x, kind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = features(x, ctx.kind)
        return torch.autograd.grad(out, x, gradient)[0], None


def kept_features(x: Tensor, kind: str) -> Tensor:
    """``features``, differentiable, of which only x is kept for the backward pass."""
    found: Tensor = _Features.apply(x, kind)
    return found


def retnet_log_decays(num_heads: int) -> Tensor:
    """log λ of each head, (h,) fp64: λ_h = 1 - 2^(-5 - h), h from 0 (RetNet, arXiv 2307.08621, equation 8)."""
    return torch.log1p(-torch.pow(2.0, -5 - torch.arange(num_heads, dtype=torch.float64)))


def s4d_real_logits(num_heads: int, channels: int, generator: torch.Generator) -> Tensor:
    """b with σ(b) = exp(-(n + 1) Δ) in channel n of a head, (h, v) fp32: S4D-Real's rates (arXiv 2206.11893).

    Δ of each head is drawn log-uniformly from 0.001 to 0.1.
    """
    log_step = torch.empty(num_heads, 1).uniform_(math.log(0.001), math.log(0.1), generator=generator)
    return -torch.expm1(log_step.exp() * torch.arange(1, channels + 1)).log()


class LionLIT(Mixer):
    """(n / tensor, b, d) -> (n / tensor, b, d), without decays; base class of LION's mixers."""

    vector_decay = False
    """Whether decays are of value channels."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        own, d, std = lion_options(model, self.layer), model.hidden_size, model.init_std
        self.feature_map, self.scale = own.feature_map, own.scale
        self.form: dict[str, Any] = {"normalize": own.scale, "eps": own.eps}
        self.alternates = own.patch_order == "alternating"
        # Rows are ordered head by head, k and v of a head together, so that a contiguous shard holds whole heads. The
        # queries are projected apart, while the states travel.
        bias, group = own.attention_bias, self.group
        self.kv_proj = column_parallel(config, d, 2 * d, std=std, group=group, bias=bias != "none")
        self.q_proj = column_parallel(config, d, d, std=std, group=group, bias=bias != "none")
        self.out_proj = row_parallel(config, d, d, std=self.output_std, group=group, bias=bias == "all")

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        k, v = self._heads(self.kv_proj, x, 2)
        k, log_decay = self._gated(_Features.apply(k, self.feature_map), x)
        finish = self._begin(k, v, log_decay, context)
        (q,) = self._heads(self.q_proj, x)
        o = finish(_Features.apply(q, self.feature_map))
        # Not divided by their sums, outputs grow with the length of the document: the norm takes that out.
        out: Tensor = self.out_proj(o.transpose(0, 1).flatten(2) if self.scale else self._norm(o))[0]
        return out

    def _gated(self, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The keys (b, n, h, k) as they are written, and the log decays, fp32 at least: (h,), (b, n, h), by channel
        (b, n, h, v), or none."""
        return k, None

    def _begin(self, k: Tensor, v: Tensor, log_decay: Tensor | None, context: SequenceContext) -> Finish:
        assert context.states is None, "only models that predict the next token generate"
        if self.alternates:
            return self._begin_alternating(k, v, log_decay, context)
        return self._begin_in_order(k, v, log_decay, context, self.form)

    def _begin_in_order(
        self, k: Tensor, v: Tensor, log_decay: Tensor | None, context: SequenceContext, form: dict[str, Any]
    ) -> Finish:
        if context.exchange is not None:
            scan = functools.partial(LionVectorScan if self.vector_decay else LionScan, **form)
            return context.begin(scan, k, v, log_decay, layer=self.state_name)
        if self.vector_decay and log_decay is not None:
            return lambda q: lion_vector(q, k, v, log_decay, cu_seqlens=context.cu_seqlens, **form)
        return lambda q: lion(q, k, v, log_decay, cu_seqlens=context.cu_seqlens, **form)[0]

    def _begin_alternating(self, k: Tensor, v: Tensor, log_decay: Tensor | None, context: SequenceContext) -> Finish:
        """The mean of the masks of two orders (C.8): the scores of both are summed before they are divided."""
        orders, width, form = PatchOrders(context), v.size(-1), {**self.form, "normalize": False}
        if self.scale:
            # Sums of scores are further channels of the values: one, or with decays by channel as many as values.
            ones = torch.ones_like(v if self.vector_decay else v[..., :1])
            v = torch.cat([v, ones], dim=-1)
            if self.vector_decay and log_decay is not None:
                log_decay = torch.cat([log_decay, log_decay], dim=-1)
        is_of_tokens = log_decay is not None and log_decay.dim() > 1
        turned = [orders.begin(x) for x in (k, v, *((log_decay,) if is_of_tokens and log_decay is not None else ()))]
        begun = [
            self._begin_in_order(written[0], written[1], written[2] if is_of_tokens else log_decay, context, form)
            for written in zip(*(finish() for finish in turned), strict=True)
        ]

        def finish(q: Tensor) -> Tensor:
            of_orders = zip(begun, orders.begin(q)(), strict=True)
            y = orders.summed([attend(one) for attend, one in of_orders])
            if not self.scale:
                return y / 2
            wide = y.to(torch.promote_types(y.dtype, torch.float32))
            sums = wide[..., width:] + 2 * self.form["eps"]
            return (wide[..., :width] / torch.where(sums == 0, 1, sums)).to(y.dtype)

        return finish


class LionRetNet(LionLIT):
    """The same with one fixed decay for each head."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        # Kept in fp32 in half-precision models: it is multiplied by distances. Not in checkpoints, as TNL's.
        wide = torch.promote_types(config.params_dtype, torch.float32)
        decays = retnet_log_decays(model.num_heads)[self.heads]
        self.register_buffer("log_decay", decays.to(self.kv_proj.weight.device, wide), persistent=False)

    def _gated(self, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return k, self.log_decay


class LionS(LionLIT):
    """The same with a decay for each head and token, or for each of its value channels."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        own, width = lion_s_options(model, self.layer), num_decays(model, self.layer)
        self.form["gate"], self.input_gate, self.vector_decay = own.gate, own.input_gate, own.vector_decay
        self.forget_proj = column_parallel(
            config, model.hidden_size, width, std=model.init_std, group=self.group, bias=True
        )
        set_initializer(self.forget_proj.bias, functools.partial(_draw_decays, own.initial_decay, model.num_heads))

    def _gated(self, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.forget_proj(x)[0].transpose(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.input_gate:
            # 1 - σ(a) is σ(-a), which is small but not 0 where σ(a) has rounded to 1.
            k = k * torch.sigmoid(-logits)[..., None].to(k.dtype)
        # Channels are ordered head by head, as those of the values.
        return k, F.logsigmoid(logits.unflatten(-1, k.shape[2:]) if self.vector_decay else logits)


def _draw_decays(initial: float | str, num_heads: int, bias: Tensor, generator: torch.Generator) -> None:
    """Fill the whole bias of the decays' logits: (h,), or by channel (h v,), head by head."""
    if isinstance(initial, str):
        bias.copy_(s4d_real_logits(num_heads, len(bias) // num_heads, generator).flatten())
    else:
        bias.fill_(math.log(initial / (1 - initial)))
