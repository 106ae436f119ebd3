"""LLaMA's token mixer, the softmax baseline: causal attention with rotary positions.

    q, k = RoPE(x W_q), RoPE(x W_k);  v = x W_v;  o_t = Σ_{s ≤ t} softmax(q_t·k_s / sqrt(head_dim)) v_s

(arXiv 2302.13971.) Documents do not see each other. The state is the cache of keys and values, which grows.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.schema import ModelConfig
from lightscale.kernels.common.angles import Angles, phases_of
from lightscale.models.layers.context import Finish, SequenceContext
from lightscale.models.layers.linear import column_parallel, row_parallel
from lightscale.models.layers.positions import rope, rotary_angles
from lightscale.models.layers.states import check_state
from lightscale.models.mixers.interface import Mixer
from lightscale.parallel.megatron import TransformerConfig
from lightscale.parallel.sequence import begin_gather


class LLaMA(Mixer):
    """(n / tensor, b, d) -> (n / tensor, b, d). The state is ``k`` and ``v``: (b, tokens so far, h, head_dim)."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        d = model.hidden_size
        # Rows are ordered head by head, k and v of a head together, so that a contiguous shard holds whole heads. The
        # queries are projected apart, while keys and values are gathered from other sequence ranks.
        self.kv_proj = column_parallel(config, d, 2 * d, std=model.init_std, group=self.group)
        self.q_proj = column_parallel(config, d, d, std=model.init_std, group=self.group)
        self.out_proj = row_parallel(config, d, d, std=self.output_std, group=self.group)

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        k, v = self._heads(self.kv_proj, x, 2)
        wide = k.float() if k.dtype.itemsize < 4 else k
        theta = rotary_angles(self.model.head_dim)[None].to(wide)
        phases = phases_of(Angles(theta, context.positions), theta.dtype)
        finish = self._begin(rope(k, phases), v, context)
        (q,) = self._heads(self.q_proj, x)
        o = finish(rope(q, phases))
        out: Tensor = self.out_proj(o.transpose(0, 1).flatten(2))[0]
        return out

    def _begin(self, k: Tensor, v: Tensor, context: SequenceContext) -> Finish:
        if context.exchange is not None:
            # All keys and values are needed, and their number grows with the sequence: no state stands for them.
            wait = begin_gather(torch.stack([k, v], dim=2), context.exchange, context.lengths)
            return lambda q: self._across_ranks(q, wait(), context)
        if context.states is not None:
            return lambda q: self._continue(q, k, v, context)
        return lambda q: self._by_documents(q, k, v, context)

    def _by_documents(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """Attention within each document, one after the other: no mask over pairs of tokens is ever made."""
        if context.cu_seqlens is None:
            return _attention(q, k, v, is_causal=True)
        # On a GPU the host waits here in every layer: to split by documents, their lengths must be numbers.
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
            shape = (q.size(0), *cache.get("k", q).shape[1:2], *q.shape[2:])
            check_state(self.state_name, cache, {"k": shape, "v": shape}, q.dtype)
            k, v = torch.cat([cache["k"], k], dim=1), torch.cat([cache["v"], v], dim=1)
        # Copied where it is a view: that would keep the whole projection.
        context.states[self.state_name] = {"k": k, "v": v.contiguous()}
        return _attention(q, k, v, attn_mask=_seen(context.positions, k.size(1)))

    def _across_ranks(self, q: Tensor, gathered: Tensor, context: SequenceContext) -> Tensor:
        """Attention to the tokens of all sequence ranks up to this one, gathered: (b, all tokens, 2, h, k)."""
        assert context.exchange is not None
        # Later ranks attend to more keys, and the last decides the time. A zigzag order would balance this, but
        # segments are contiguous for all mixers, which may stand in one stack.
        own = context.exchange.rank + 1
        end = own * q.size(1) if context.lengths is None else sum(context.lengths[:own])
        k, v = gathered[:, :end].unbind(dim=2)
        # A mask of n x keys, which PyTorch's flash kernel does not take: is_causal would align the first query with the
        # first key, but this rank's queries are the last of the keys' tokens.
        return _attention(q, k, v, attn_mask=_seen(context.positions, end))


def _seen(positions: Tensor, num_keys: int) -> Tensor:
    """(b, 1, n, keys): the last ``n`` of ``num_keys`` tokens see those from their document's start up to themselves."""
    keys = torch.arange(num_keys, device=positions.device)
    own = keys[num_keys - positions.size(1) :].expand_as(positions)
    start = own - positions
    return ((keys >= start[..., None]) & (keys <= own[..., None]))[:, None]


def _attention(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Scaled dot-product attention of (b, n, h, k) tensors, which PyTorch wants as (b, h, n, k)."""
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **how)
    return o.transpose(1, 2)
