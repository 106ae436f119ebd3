"""HGRN2's token mixer: a data-dependent decay per channel, bounded from below, the more so the higher the layer.

    f = β + (1 - β) sigmoid(x W_f);  k = 1 - f;  q = silu(x W_q);  v = x W_v
    S_t = diag(f_t) S_{t-1} + k_t v_tᵀ;  out = W_o norm(concat S_tᵀ q_t)

(arXiv 2404.07904.) The lower bounds β of all layers come from one table Γ that the model holds once
(``LowerBounds``).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.model import ModelConfig
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.linear import column_parallel, row_parallel
from lightscale.models.layers.shared_parts import StagePart
from lightscale.models.mixers.interface import Mixer
from lightscale.models.mixers.linear_attention import begin_gated
from lightscale.models.specs.hgrn2 import LowerBoundsSpec, hgrn2_options
from lightscale.parallel.initialization import DrawWeights, ones
from lightscale.parallel.megatron import ProcessGroupCollection, TransformerConfig


def lower_bounds(table: Tensor) -> Tensor:
    """β of every layer and channel, (l, d): Γ's softmax over the layers, summed up to each, less the first row.

    So the first layer has β = 0, a constant: subtracted in numbers, it would hand its rounding, which log f magnifies
    there, to the gradient of all rows. (The paper's formula leaves the subtraction out; the authors' code has it.)
    """
    return F.pad(torch.softmax(table, dim=0)[1:].cumsum(dim=0), (0, 0, 1, 0))


def lower_bounds_to_one(table: Tensor) -> Tensor:
    """β as equation 12 of arXiv 2406.16690 has it: the sums with the first row, (l, d).

    The last layer's are sums over all layers, 1: there f = 1 and k = 0, and nothing is ever written to its state. A
    constant again, so that rounding does not reach log f.
    """
    return F.pad(torch.softmax(table, dim=0).cumsum(dim=0)[:-1], (0, 0, 0, 1), value=1.0)


def log_forget(logits: Tensor, bound: Tensor, key_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """log f and k = 1 - f, with f = β + (1 - β) sigmoid(logits); differentiable in both.

    Both keep their relative accuracy at both ends: log f is log1p(-k) for large f and log(f) for small f. Where β is 0
    it is log sigmoid, whose gradient stays below 1 while f itself and 1 / f leave the range of the dtype.

    Args:
        logits: (…, h, k).
        bound: β (h, k), fp32 or wider, in whose dtype all is computed.
        key_dtype: that of k, rounded once; by default that of ``bound``, which log f has.
    """
    log_decay, key = _LogForget.apply(logits, bound, key_dtype or bound.dtype)
    return log_decay, key


class _LogForget(torch.autograd.Function):
    """``log_forget``, which keeps only its inputs, and computes in place.

    Autograd would keep seven fp32 tensors of each layer, more than all else in the mixer: at 7B, 32 GiB for 8192
    tokens. Made again in the backward pass, they would stand beside everything that the block holds then: at 1M tokens
    on 8 ranks 10 GiB of 1B.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, bound: Tensor, key_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, bound)
        wide = logits.to(bound.dtype)
        log_decay = F.logsigmoid(wide)
        forget = torch.sigmoid(wide).mul_(1 - bound).add_(bound)
        # 1 - sigmoid(a) is sigmoid(-a), which is small but not 0 where sigmoid(a) has rounded to 1.
        key = wide.neg().sigmoid_().mul_(1 - bound)
        del wide
        large, rounded = forget > 0.5, key.to(key_dtype, copy=True)
        bounded = torch.where(large, key.neg_().log1p_(), forget.log_())
        return torch.where(bound > 0, bounded, log_decay), rounded

    @staticmethod
    def backward(ctx: Any, dlog: Tensor, dkey: Tensor) -> tuple[Tensor, Tensor, None]:
        """dlogits = (1 - β) c (dlog s / f - dk s), dβ = Σ c (dlog / f - dk), with s and c for sigmoid(±logits).

        Where β is 0, s / f is 1, and log f does not depend on β.
        """
        logits, bound = ctx.saved_tensors
        wide, bounded = logits.to(bound.dtype), bound > 0
        s, c = torch.sigmoid(wide), wide.neg().sigmoid_()
        del wide
        forget = (s * (1 - bound)).add_(bound)
        by_forget = torch.div(dlog, forget, out=forget).masked_fill_(~bounded, 0.0)
        dbound = (by_forget - dkey).mul_(c).sum_to_size(bound.shape)
        total = torch.where(bounded, by_forget.mul_(s), dlog).sub_(s.mul_(dkey))
        return total.mul_(c).mul_(1 - bound).to(logits.dtype), dbound, None


class LowerBounds(StagePart):
    """The table Γ of a model, (l, d), ones at first; split over the tensor ranks by channel. Gives β."""

    spec = LowerBoundsSpec

    table: nn.Parameter

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, groups: ProcessGroupCollection, *, stage: int
    ) -> None:
        super().__init__(config, model, groups, stage=stage)
        self.from_zero = hgrn2_options(model).lower_bounds == "from_zero"

    @staticmethod
    def initial_values(model: ModelConfig) -> dict[str, DrawWeights]:
        """Ones: the bounds rise evenly from layer to layer."""
        return {"table": ones}

    def forward(self, context: SequenceContext) -> Tensor:
        """β, (l, d / tensor), fp32 at least; the same for all sequences."""
        return lower_bounds(self.table) if self.from_zero else lower_bounds_to_one(self.table)


class HGRN2(Mixer):
    """(n / tensor, b, d) -> (n / tensor, b, d). The state is ``S``: (b, h, k, k), k head_dim."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        d = model.hidden_size
        # Rows are ordered head by head, f and v of a head together, so that a contiguous shard holds whole heads. The
        # queries are projected apart, while the states travel.
        self.fv_proj = column_parallel(config, d, 2 * d, std=model.init_std, group=self.group)
        self.q_proj = column_parallel(config, d, d, std=model.init_std, group=self.group)
        options = hgrn2_options(model)
        self.is_activated = options.query_activation == "silu"
        if options.output_projection:
            self.out_proj = row_parallel(config, d, d, std=self.output_std, group=self.group)

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        f, v = self._heads(self.fv_proj, x, 2)
        bounds = context.shared[LowerBoundsSpec.name]
        # Keys enter products and are rounded once. log f stays in fp32: it is summed over tokens, and so is its error.
        log_decay, k = log_forget(f, bounds[self.layer].view(self.num_heads, -1), v.dtype)
        finish = begin_gated(k, v, log_decay, context=context, state_name=self.state_name)
        (q,) = self._heads(self.q_proj, x)
        return self._projected(self._norm(finish(F.silu(q) if self.is_activated else q)))
