"""The bounded forget gate in PyTorch's own operators, in place, with its backward by hand."""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def forget_gate_fwd(logits: Tensor, bound: Tensor, key_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """log f in β's dtype and k = 1 - f in ``key_dtype``, both (…, H, K), of logits (…, H, K) and β (H, K)."""
    wide = logits.to(bound.dtype)
    log_decay = F.logsigmoid(wide)
    forget = torch.sigmoid(wide).mul_(1 - bound).add_(bound)
    # 1 - sigmoid(a) is sigmoid(-a), which is small but not 0 where sigmoid(a) has rounded to 1.
    key = wide.neg().sigmoid_().mul_(1 - bound)
    del wide
    large, rounded = forget > 0.5, key.to(key_dtype, copy=True)
    bounded = torch.where(large, key.neg_().log1p_(), forget.log_())
    return torch.where(bound > 0, bounded, log_decay), rounded


@torch.no_grad()
def forget_gate_bwd(logits: Tensor, bound: Tensor, dlog_decay: Tensor, dkey: Tensor) -> tuple[Tensor, Tensor]:
    """dlogits = (1 - β) c (dlog s / f - dk s) and dβ = Σ c (dlog / f - dk), with s and c for sigmoid(±logits).

    Where β is 0, s / f is 1, and log f does not depend on β.
    """
    wide, bounded = logits.to(bound.dtype), bound > 0
    s, c = torch.sigmoid(wide), wide.neg().sigmoid_()
    del wide
    forget = (s * (1 - bound)).add_(bound)
    by_forget = torch.div(dlog_decay, forget, out=forget).masked_fill_(~bounded, 0.0)
    dbound = (by_forget - dkey).mul_(c).sum_to_size(bound.shape)
    total = torch.where(bounded, by_forget.mul_(s), dlog_decay).sub_(s.mul_(dkey))
    return total.mul_(c).mul_(1 - bound).to(logits.dtype), dbound
