"""LLaMA's token mixer, the softmax baseline: causal attention with rotary positions.

    q, k = RoPE(x W_q), RoPE(x W_k);  v = x W_v;  o_t = Σ_{s ≤ t} softmax(q_t·k_s / sqrt(head width)) v_s

(arXiv 2302.13971.) Documents do not see each other. The state is the cache of keys and values, which grows.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from lightscale.config import ModelConfig
from lightscale.models.context import SequenceContext
from lightscale.models.layers import column_parallel, row_parallel
from lightscale.models.mixer import Mixer, Shapes, projection_flops
from lightscale.models.positions import lrpe_phases, rope, rotary_angles


class LLaMA(Mixer):
    """(n / tensor, b, d) -> (n / tensor, b, d). The state is ``k`` and ``v``: (b, tokens so far, h, head width)."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        d = model.width
        # Rows are ordered head by head, q, k and v of a head together, so that a contiguous shard holds whole heads.
        self.in_proj = column_parallel(config, d, 3 * d, std=model.init_std, group=self.group)
        self.out_proj = row_parallel(config, d, d, std=self.output_std, group=self.group)

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, and two products with half of the other tokens on average."""
        return projection_flops(model, gated=False) + 2 * model.width * sequence_length

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Projections."""
        d = model.width
        return {"in_proj.weight": (3 * d, d), "out_proj.weight": (d, d)}

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        q, k, v = self._project(x)
        wide = q.float() if q.dtype.itemsize < 4 else q
        phases = lrpe_phases(context.positions, rotary_angles(self.model.head_width)[None].to(wide))
        q, k = rope(q, phases), rope(k, phases)
        o = self._continue(q, k, v, context) if context.states is not None else self._by_documents(q, k, v, context)
        out: Tensor = self.out_proj(o.transpose(0, 1).flatten(2))[0]
        return out

    def _by_documents(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """Attention within each document, one after the other: no mask over pairs of tokens is ever made."""
        if context.cu_seqlens is None:
            return _attention(q, k, v, is_causal=True)
        edges = context.cu_seqlens.tolist()
        lengths = [stop - start for start, stop in pairwise(edges)]
        parts = zip(*(x.flatten(0, 1).split(lengths) for x in (q, k, v)), strict=True)
        outputs = [_attention(q_i[None], k_i[None], v_i[None], is_causal=True)[0] for q_i, k_i, v_i in parts]
        return torch.cat(outputs).view_as(q)

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """Attention to the cached tokens of the same document too; the cache takes the new ones in."""
        assert context.states is not None
        cache = context.states.get(self.state_name)
        if cache is not None:
            k, v = torch.cat([cache["k"], k], dim=1), torch.cat([cache["v"], v], dim=1)
        context.states[self.state_name] = {"k": k, "v": v}
        # Tokens are numbered as they came: a query sees those from its document's start up to itself.
        place = torch.arange(k.size(1), device=q.device)
        own = place[-q.size(1) :].expand(q.size(0), -1)
        start = own - context.positions
        seen = (place >= start[..., None]) & (place <= own[..., None])
        return _attention(q, k, v, attn_mask=seen[:, None])


def _attention(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Scaled dot-product attention of (b, n, h, k) tensors, which PyTorch wants as (b, h, n, k)."""
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **how)
    return o.transpose(1, 2)
