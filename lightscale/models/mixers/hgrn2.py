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
from lightscale.kernels.gla import gla, recurrent_step, state_dtype
from lightscale.models.layers.context import Finish, SequenceContext
from lightscale.models.layers.linear import column_parallel, row_parallel
from lightscale.models.layers.shared_parts import StagePart
from lightscale.models.layers.states import incoming_state
from lightscale.models.mixers.interface import Mixer
from lightscale.models.specs.hgrn2 import LowerBoundsSpec
from lightscale.parallel.initialization import DrawWeights, ones
from lightscale.parallel.megatron import TransformerConfig
from lightscale.parallel.sequence import GatedScan


def lower_bounds(table: Tensor) -> Tensor:
    """β of every layer and channel, (l, d): Γ's softmax over the layers, summed up to each, less the first row.

    So the first layer has β = 0, a constant: subtracted in numbers, it would hand its rounding, which log f magnifies
    there, to the gradient of all rows. (The paper's formula leaves the subtraction out; the authors' code has it.)
    """
    return F.pad(torch.softmax(table, dim=0)[1:].cumsum(dim=0), (0, 0, 1, 0))


def log_forget(logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """log f and k = 1 - f, both in the dtype of ``bound``, with f = β + (1 - β) sigmoid(logits).

    Both keep their relative accuracy at both ends: log f is log1p(-k) for large f and log(f) for small f. Where β is 0
    it is log sigmoid, whose gradient stays below 1 while f itself and 1 / f leave the range of the dtype.

    logits: (…, h, k). bound: β (h, k), fp32 or wider.
    """
    logits = logits.to(bound.dtype)
    forget = bound + (1 - bound) * torch.sigmoid(logits)
    # 1 - sigmoid(a) is sigmoid(-a), which is small but not 0 where sigmoid(a) has rounded to 1.
    key = (1 - bound) * torch.sigmoid(-logits)
    large = forget > 0.5
    # Each branch gets a harmless input where the other is taken: its gradient there would be 0 times infinity.
    near_one = torch.log1p(-torch.where(large, key, 0.0))
    bounded = bound > 0
    near_zero = torch.log(torch.where(large | ~bounded, 1.0, forget))
    return torch.where(bounded, torch.where(large, near_one, near_zero), F.logsigmoid(logits)), key


class _LogForget(torch.autograd.Function):
    """``log_forget`` that keeps only its inputs for the backward pass, where it is computed again.

    Autograd would keep seven fp32 tensors of each layer, more than all else in the mixer: at 7B, 32 GiB for 8192
    tokens. What is computed again is elementwise.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits, bound)
        return log_forget(logits, bound)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = log_forget(*inputs)
        logits, bound = torch.autograd.grad(outputs, inputs, gradients)
        return logits, bound


class LowerBounds(StagePart):
    """The table Γ of a model, (l, d), ones at first; split over the tensor ranks by channel. Gives β."""

    spec = LowerBoundsSpec

    table: nn.Parameter

    @staticmethod
    def initial_values(model: ModelConfig) -> dict[str, DrawWeights]:
        """Ones: the bounds rise evenly from layer to layer."""
        return {"table": ones}

    def forward(self, context: SequenceContext) -> Tensor:
        """β, (l, d / tensor), fp32 at least; the same for all sequences."""
        return lower_bounds(self.table)


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
        self.out_proj = row_parallel(config, d, d, std=self.output_std, group=self.group)

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        f, v = self._heads(self.fv_proj, x, 2)
        bounds = context.shared[LowerBoundsSpec.name]
        log_decay, k = _LogForget.apply(f, bounds[self.layer].view(self.num_heads, -1))
        # Keys enter products and are rounded once. log f stays in fp32: it is summed over tokens, and so is its error.
        finish = self._begin(k.to(v.dtype), v, log_decay, context)
        (q,) = self._heads(self.q_proj, x)
        out: Tensor = self.out_proj(self._norm(finish(F.silu(q))))[0]
        return out

    def _begin(self, k: Tensor, v: Tensor, log_decay: Tensor, context: SequenceContext) -> Finish:
        if context.exchange is not None:
            return context.begin(GatedScan, k, v, log_decay, layer=self.state_name)
        return lambda q: self._attend(q, k, v, log_decay, context)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, context: SequenceContext) -> Tensor:
        if context.states is None:
            o, _ = gla(q, k, v, log_decay, cu_seqlens=context.cu_seqlens)
            return o
        shape = (q.size(0), q.size(2), q.size(3), v.size(3))
        state = incoming_state(context, self.state_name, {"S": shape}, state_dtype(q.dtype))
        before = None if state is None else state["S"]
        # One token: the recurrence, whose cost does not depend on how many tokens came before.
        if before is not None and q.size(1) == 1:
            o, after = recurrent_step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], before)
            context.states[self.state_name] = {"S": after}
            return o[:, None]
        o, final = gla(q, k, v, log_decay, initial_state=before, output_final_state=True, cu_seqlens=context.cu_seqlens)
        assert final is not None, "asked for with output_final_state"
        context.states[self.state_name] = {"S": final}
        return o
