"""LLaMA's token mixer, the softmax baseline: attention with rotary positions, causal by default.

    q, k = RoPE(x W_q), RoPE(x W_k);  v = x W_v;  o_t = Σ_{s ≤ t} softmax(q_t·k_s / sqrt(head_dim)) v_s

(arXiv 2302.13971.) Documents do not see each other. The state is the cache of keys and values, which grows: by copies,
or within room that was made for it. Options:

``causal`` = false        the sum is over all tokens of the document, as in BERT
``num_key_value_heads``   several heads of queries share one of keys and values (arXiv 2305.13245)
``qk_norm``               an RMS norm of queries and keys precedes the rotation (arXiv 2302.05442, section 2.1)
``positions``, ``rope_fraction``  no rotation (arXiv 2305.19466), or one of the first channels of each head
``softmax_scale``         the factor of scores in the place of 1 / sqrt(head_dim)
``window``                the sum is over the last W tokens, t - s < W (arXiv 2310.06825); so much is kept of the cache
``attention_logit_cap``   scores are cap tanh(s / cap) (arXiv 2408.00118, section 2)
``attention_sinks``       exp of a learned logit of the head joins the softmax's sum (arXiv 2309.17453, section 3.2)
``output_gate``           o ⊙ σ(x W_g) goes on to the output projection (arXiv 2505.06708)
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.kernels.attention import DocumentAttention, HeadMaxima, largest_logits, masked_attention, sdpa
from lightscale.kernels.common.angles import Phases
from lightscale.kernels.heads import Heads
from lightscale.models.layers.context import Finish, MixerState, SequenceContext
from lightscale.models.layers.head_parameter import HeadParameter
from lightscale.models.layers.linear import column_parallel, row_parallel
from lightscale.models.layers.norms import AllHeadsNorm, HeadNorm
from lightscale.models.layers.positions import RotaryPositions, rope
from lightscale.models.layers.projections import Projection, project
from lightscale.models.layers.token_cache import take_in, take_in_window, with_room
from lightscale.models.mixers.interface import Mixer
from lightscale.models.specs.options import LLaMAOptions, llama_heads, llama_options, rotary_width
from lightscale.parallel.initialization import zeros
from lightscale.parallel.megatron import TransformerConfig


class LLaMA(Mixer):
    """(n / tensor, b, d) -> (n / tensor, b, d).

    The state is ``k`` and ``v``: (b, tokens so far, g, head_dim) of the g heads of keys and values, or (b, room, g,
    head_dim) with ``length``; see ``layers/token_cache.py``.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        options, d, std, group = llama_options(model, self.layer), model.hidden_size, model.init_std, self.group
        self.is_causal = options.causal
        num_key_value_heads, self.head_dim = llama_heads(model, self.layer)
        width, bias = model.num_heads * self.head_dim, options.attention_bias
        self.window, self.cap = options.window, options.attention_logit_cap
        # Kernels divide by sqrt(head_dim): queries make up for it.
        self.query_factor = None if options.softmax_scale is None else options.softmax_scale * math.sqrt(self.head_dim)
        self.sinks = None
        if options.attention_sinks:
            self.sinks = HeadParameter(config, "logit", (model.num_heads,), zeros, group, wide=True)
        # Rows are ordered head by head, k and v of a head together, q and gate too, so that a contiguous shard holds
        # whole heads. The queries are projected apart, while keys and values are on their way to other sequence ranks.
        both = 2 * num_key_value_heads * self.head_dim
        self.kv_proj = column_parallel(config, d, both, std=std, group=group, bias=bias != "none")
        self.has_gate = options.output_gate
        rows = 2 * width if self.has_gate else width
        self.q_proj = column_parallel(config, d, rows, std=std, group=group, bias=bias != "none")
        self.out_proj = row_parallel(config, width, d, std=self.output_std, group=group, bias=bias == "all")
        self.maxima = HeadMaxima(self.layer, self.heads.start, self.num_heads, self.q_proj.weight.device)
        self.q_norm, self.k_norm = (self._norm_of(options, heads) for heads in (model.num_heads, num_key_value_heads))
        self.rotary = None
        if options.positions == "rope":
            self.rotary = RotaryPositions(
                config,
                rotary_width(model, self.layer),
                base=options.rope_theta,
                scaling=options.rope_scaling,
                device=self.q_proj.weight.device,
            )

    def _norm_of(self, options: LLaMAOptions, heads: int) -> HeadNorm | AllHeadsNorm | None:
        if options.qk_norm == "none":
            return None
        eps, centered = self.model.norm_eps, options.zero_centered_norm
        if options.qk_norm == "head":
            return HeadNorm(self.config, self.head_dim, eps, self.group, zero_centered=centered)
        return AllHeadsNorm(self.config, heads * self.head_dim, eps, self.group, zero_centered=centered)

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        phases = None if self.rotary is None else context.phases_of(self.rotary.key, self.rotary)
        # Rotated where they are read, unless a norm stands before the rotation.
        q_place, k_place = ("none" if norm or phases is None else "rotate" for norm in (self.q_norm, self.k_norm))
        width = self.head_dim
        kv = Projection(self.kv_proj, Heads(self.kv_proj.weight.shape[0] // (2 * width), width, (k_place, "none")))
        read = Projection(self.q_proj, Heads(self.num_heads, width, (q_place, "none") if self.has_gate else (q_place,)))
        travels = context.exchange is not None
        k, v, *now = project(x, kv, *(() if travels else (read,)), phases=phases)
        finish = self._begin(_placed(k, self.k_norm, phases), v, context)
        q, *gate = now or project(x, read, phases=phases)
        q = _placed(q, self.q_norm, phases)
        o = finish(q if self.query_factor is None else q * self.query_factor)
        if gate:
            o = o * torch.sigmoid(gate[0])
        out: Tensor = self.out_proj(o.transpose(0, 1).flatten(2))[0]
        return out

    def _begin(self, k: Tensor, v: Tensor, context: SequenceContext) -> Finish:
        if context.exchange is not None:
            sinks = None if self.sinks is None else self.sinks()
            return context.begin_attention(self._attention(context), k, v, sinks, self.maxima.of_pass)
        if context.states is not None:
            assert self.is_causal, "only models that predict the next token generate"
            return lambda q: self._continue(q, k, v, context)
        return lambda q: self._attend(q, k, v, context)

    def _attention(self, context: SequenceContext) -> DocumentAttention:
        return context.attention_of(causal=self.is_causal, window=self.window, cap=self.cap)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        attention, maxima = self._attention(context), self.maxima.of_pass
        if maxima is not None:
            maxima.take_in(largest_logits(q, k, attention.ranges))
        return attention(q, k, v, None if self.sinks is None else self.sinks())

    def _continue(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """Attention to the cached tokens of the same document too; the cache takes the new ones in."""
        new, name = {"k": k, "v": v}, self.state_name
        cached = take_in(context, name, new) if self.window is None else take_in_window(context, name, new, self.window)
        k, v, seen = cached.tensors["k"], cached.tensors["v"], cached.seen(context.positions)
        if self.cap is None and self.sinks is None:
            return sdpa(q, k, v, attn_mask=seen[:, None])
        return masked_attention(q, k, v, seen, cap=self.cap, sinks=None if self.sinks is None else self.sinks())

    def with_room(self, state: MixerState, lengths: Sequence[int], tokens: int) -> MixerState:
        """See ``Mixer.with_room``."""
        return with_room(state, lengths, tokens, self.window)


def _placed(x: Tensor, norm: HeadNorm | AllHeadsNorm | None, phases: Phases | None) -> Tensor:
    """Queries or keys, normalised and then rotated as far as the options have it."""
    if norm is None:
        return x
    return norm(x) if phases is None else rope(norm(x), phases)
