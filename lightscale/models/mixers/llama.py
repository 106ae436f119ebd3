"""LLaMA's token mixer, the softmax baseline: attention with rotary positions, causal unless the options say otherwise.

    q, k = RoPE(x W_q), RoPE(x W_k);  v = x W_v;  o_t = Σ_{s ≤ t} softmax(q_t·k_s / sqrt(head_dim)) v_s

(arXiv 2302.13971.) With ``causal`` = false the sum is over all tokens of the document, as in BERT. Several heads of
queries may share one of keys and values (grouped queries, arXiv 2305.13245). Documents do not see each other. The state
is the cache of keys and values, which grows: by copies, or within room that was made for it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.kernels.attention import DocumentAttention, sdpa
from lightscale.kernels.common.angles import Angles, phases_of
from lightscale.models.layers.context import Finish, MixerState, SequenceContext
from lightscale.models.layers.linear import column_parallel, row_parallel
from lightscale.models.layers.positions import rope, rotary_angles
from lightscale.models.layers.states import check_state
from lightscale.models.mixers.interface import Mixer
from lightscale.models.specs.options import llama_heads, llama_options
from lightscale.parallel.megatron import TransformerConfig
from lightscale.parallel.sequence import begin_gather


class LLaMA(Mixer):
    """(n / tensor, b, d) -> (n / tensor, b, d).

    The state is ``k`` and ``v``: (b, tokens so far, g, head_dim) of the g heads of keys and values, each row up to its
    last token. Or, with room, ``k`` and ``v``: (b, room, g, head_dim), each row's document from the first column on,
    and ``length``: (b,) int64 on the host, no less than the document's tokens. It is changed in place then.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        options, d, std, group = llama_options(model, self.layer), model.hidden_size, model.init_std, self.group
        self.is_causal = options.causal
        num_key_value_heads, self.head_dim = llama_heads(model, self.layer)
        width, bias = model.num_heads * self.head_dim, options.attention_bias
        # Rows are ordered head by head, k and v of a head together, so that a contiguous shard holds whole heads. The
        # queries are projected apart, while keys and values are gathered from other sequence ranks.
        both = 2 * num_key_value_heads * self.head_dim
        self.kv_proj = column_parallel(config, d, both, std=std, group=group, bias=bias != "none")
        self.q_proj = column_parallel(config, d, width, std=std, group=group, bias=bias != "none")
        self.out_proj = row_parallel(config, width, d, std=self.output_std, group=group, bias=bias == "all")
        # Kept on the device: a copy in each pass would make the host wait.
        wide = torch.promote_types(config.params_dtype, torch.float32)
        theta = rotary_angles(self.head_dim, options.rope_theta, options.rope_scaling)
        theta = theta[None].to(self.q_proj.weight.device, wide)
        self.register_buffer("theta", theta, persistent=False)

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        k, v = self._heads(self.kv_proj, x, 2)
        phases = phases_of(Angles(self.theta, context.positions), self.theta.dtype)
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
            assert self.is_causal, "only models that predict the next token generate"
            return lambda q: self._continue(q, k, v, context)
        return lambda q: self._attention(context)(q, k, v)

    def _attention(self, context: SequenceContext) -> DocumentAttention:
        return context.attention if self.is_causal else context.attention_both_ways

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """Attention to the cached tokens of the same document too; the cache takes the new ones in."""
        assert context.states is not None
        cache = context.states.get(self.state_name)
        if cache is not None and "length" in cache:
            return self._continue_in_room(q, k, v, cache, context)
        if cache is not None:
            shape = (q.size(0), *cache.get("k", k).shape[1:2], *k.shape[2:])
            check_state(self.state_name, cache, {"k": shape, "v": shape}, q.dtype)
            k, v = torch.cat([cache["k"], k], dim=1), torch.cat([cache["v"], v], dim=1)
        # Copied where it is a view: that would keep the whole projection.
        context.states[self.state_name] = {"k": k, "v": v.contiguous()}
        return sdpa(q, k, v, attn_mask=_seen(context.positions, k.size(1)))

    def with_room(self, state: MixerState, lengths: Sequence[int], tokens: int) -> MixerState:
        """See ``Mixer.with_room``; every row gets room for the longest document and ``tokens``."""
        room = max(lengths) + tokens
        found = {key: state[key].new_zeros(len(lengths), room, *state[key].shape[2:]) for key in ("k", "v")}
        for key, tensor in found.items():
            for row, length in enumerate(lengths):
                tensor[row, :length] = state[key][row, state[key].size(1) - length :]
        return {**found, "length": torch.tensor(lengths)}

    def _continue_in_room(self, q: Tensor, k: Tensor, v: Tensor, cache: MixerState, context: SequenceContext) -> Tensor:
        """As ``_continue``, for rows that are at positions of their own."""
        assert context.states is not None
        b, n = q.shape[:2]
        room = cache["k"].size(1)
        shape = (b, room, *k.shape[2:])
        check_state(self.state_name, {key: cache[key] for key in ("k", "v")}, {"k": shape, "v": shape}, q.dtype)
        length = int(cache["length"].max()) + n
        if length > room:
            # Doubled, so that each token is copied a few times at most, however long the documents become.
            more = max(length, 2 * room) - room
            cache = {**cache, **{key: F.pad(cache[key], (0, 0, 0, 0, 0, more)) for key in ("k", "v")}}
        rows = torch.arange(b, device=q.device)[:, None]
        cache["k"][rows, context.positions] = k
        cache["v"][rows, context.positions] = v
        context.states[self.state_name] = {**cache, "length": cache["length"] + n}
        # What a shorter document has not reached yet is 0 there, and hidden.
        seen = torch.arange(length, device=q.device) <= context.positions[..., None]
        return sdpa(q, cache["k"][:, :length], cache["v"][:, :length], attn_mask=seen[:, None])

    def _across_ranks(self, q: Tensor, gathered: Tensor, context: SequenceContext) -> Tensor:
        """Attention to the tokens of all sequence ranks, gathered: (b, all tokens, 2, g, k), or of those up to this."""
        # Later ranks attend to more keys, and the last decides the time. A zigzag order would balance this, but
        # segments are contiguous for all mixers, which may stand in one stack.
        attention = self._attention(context)
        seen = attention.before + attention.length if self.is_causal else None
        k, v = gathered[:, :seen].unbind(dim=2)
        return attention(q, k, v)


def _seen(positions: Tensor, num_keys: int) -> Tensor:
    """(b, 1, n, keys): the last ``n`` of ``num_keys`` tokens see those from their document's start up to themselves."""
    keys = torch.arange(num_keys, device=positions.device)
    own = keys[num_keys - positions.size(1) :].expand_as(positions)
    start = own - positions
    return ((keys >= start[..., None]) & (keys <= own[..., None]))[:, None]
