"""CausalRN's and BiRN's token mixers: a single-hidden-layer perceptron of every pair of tokens, summed over the others.

    a = W_a x + c;  b = W_b x;  o_t = Σ_{s ≤ t} ψ(LN(a_t + b_s));  out = W_o LN(o_t) + c_o

("Linear-Time Sequence Modeling with MLPs", equations 5 and 7, norms of sections 3.3 and 3.4; BiRN, equation 4, sums
over the whole document.) In the linear form ψ = exp, and each side has a separate norm, LN(a_t) + LN(b_s). Hence
o_t = exp(a_t + z_t) with z_t = log Σ_s e^{b_s}: a state of one number per channel. The quadratic form is the printed
one, with any ψ; its state is all b. LN has no weights.

The norm of o removes every factor that all channels share, such as the divisor 1 / t and the maximum that is subtracted
before exp. This is exact for ε = 0. Otherwise ε is relative to the largest channel, which is held fixed in the
gradient, as in the paper's figure 8.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.kernels.log_sum import log_sum, log_sum_whole, recurrent_step, state_dtype
from lightscale.kernels.relation import relation
from lightscale.models.layers.context import MixerState, SequenceContext
from lightscale.models.layers.linear import column_parallel, row_parallel
from lightscale.models.layers.norms import layer_norm_split
from lightscale.models.layers.states import incoming_state
from lightscale.models.layers.token_cache import take_in, with_room
from lightscale.models.mixers.interface import Mixer
from lightscale.models.specs.interface import Shapes
from lightscale.models.specs.relation import hidden_width, post_norm, pre_norm, relation_options
from lightscale.parallel.megatron import (
    TransformerConfig,
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from lightscale.parallel.sequence import LogSumScan, LogSumWholeScan, begin_gather


class CausalRN(Mixer):
    """(n / tensor, b, d) -> (n / tensor, b, d).

    The state of the linear form is ``z``: (b, D / tensor), D hidden channels. That of the quadratic form is all tokens:
    ``b``, (b, tokens so far, D), the side that is read, whole on every tensor rank; or with room, see
    ``layers/token_cache.py``.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        own, d, std = relation_options(model, self.layer), model.hidden_size, model.init_std
        self.form, self.activation, self.eps = own.form, own.activation, own.eps
        self.pre_norm, self.post_norm = pre_norm(own), post_norm(own)
        self.is_causal = model.direction(self.layer) == "causal"
        self.width = hidden_width(model, self.layer)
        self.b_proj = column_parallel(config, d, self.width, std=std, group=self.group)
        self.a_proj = column_parallel(config, d, self.width, std=std, group=self.group, bias=True)
        self.out_proj = row_parallel(config, self.width, d, std=self.output_std, group=self.group, bias=True)

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        o = self._linear(x, context) if self.form == "linear" else self._quadratic(x, context)
        out: Tensor = self.out_proj(o.to(x.dtype))[0]
        return out

    # ----- linear: tensor ranks share out the channels ----------------------------------------------------------------

    def _linear(self, x: Tensor, context: SequenceContext) -> Tensor:
        """(n, b, D / tensor)."""
        begun = self._begin(self._side(self.b_proj, x), context)
        a = self._side(self.a_proj, x)
        y = (a + begun()).transpose(0, 1)
        if not self.post_norm:
            # The mean of the pairs, as printed.
            return torch.exp(y - torch.log1p(context.positions.T.to(y.dtype))[..., None])
        largest = y.detach().amax(-1, keepdim=True)
        if self.group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return self._layer_norm(torch.exp(y - largest))

    def _side(self, projection: Any, x: Tensor) -> Tensor:
        """(b, n, D / tensor), in the states' dtype: logarithms, which half precision would round too much."""
        side = projection(x)[0]
        side = side.to(state_dtype(side.dtype))
        return (side if self.pre_norm == "off" else self._layer_norm(side)).transpose(0, 1)

    def _layer_norm(self, x: Tensor) -> Tensor:
        return layer_norm_split(x, width=self.width, eps=self.eps, group=self.group)

    def _begin(self, b: Tensor, context: SequenceContext) -> Any:
        """A function that gives z (b, n, D / tensor) of b."""
        if not self.is_causal:
            assert context.states is None, "only models that predict the next token generate"
            bounds = context.document_bounds
            if context.exchange is None:
                return lambda: log_sum_whole(b, cu_seqlens=bounds)
            scan = functools.partial(LogSumWholeScan, bounds=None if bounds is None else tuple(bounds.tolist()))
            return context.begin(scan, b, layer=self.state_name)
        if context.exchange is not None:
            return context.begin(LogSumScan, b, layer=self.state_name)
        return lambda: self._continue(b, context)

    def _continue(self, b: Tensor, context: SequenceContext) -> Tensor:
        if context.states is None:
            return log_sum(b, cu_seqlens=context.cu_seqlens)
        shapes: Shapes = {"z": (b.size(0), b.size(2))}
        state = incoming_state(context, self.state_name, shapes, b.dtype, empty={"z": -torch.inf})
        before = None if state is None else state["z"]
        # One token: the recurrence, whose cost does not depend on how many tokens came before.
        if before is not None and b.size(1) == 1:
            z = recurrent_step(b[:, 0], before)[:, None]
        else:
            z = log_sum(b, initial_state=before, cu_seqlens=context.cu_seqlens)
        # Copied: a view would keep the sums of all tokens.
        context.states[self.state_name] = {"z": z[:, -1].clone()}
        return z

    # ----- quadratic: tensor ranks share out the tokens that read -----------------------------------------------------

    def with_room(self, state: MixerState, lengths: Sequence[int], tokens: int) -> MixerState:
        """See ``Mixer.with_room``; the state of the linear form does not grow."""
        return with_room(state, lengths, tokens) if self.form == "quadratic" else state

    def _quadratic(self, x: Tensor, context: SequenceContext) -> Tensor:
        """(n, b, D / tensor)."""
        b = self._whole_channels(self.b_proj(x)[0])
        if self._shares_tokens:
            b = gather_from_sequence_parallel_region(b, group=self.group)
        b = b.transpose(0, 1)
        gathered = None if context.exchange is None else begin_gather(b, context.exchange, context.lengths)
        a = self._whole_channels(self.a_proj(x)[0]).transpose(0, 1)
        if context.states is not None:
            assert self.is_causal, "only models that predict the next token generate"
            cached = take_in(context, self.state_name, {"b": b})
            b, (first, end) = cached.tensors["b"], cached.ranges(context.positions_on_host)
        else:
            attention = context.attention if self.is_causal else context.attention_both_ways
            first, end = (self._own_tokens(edge) for edge in attention.key_ranges)
            b = b if gathered is None else gathered()
        if self.pre_norm == "approximate":
            a, b = (layer_norm_split(side, width=self.width, eps=self.eps) for side in (a, b))
        o = relation(a, b, first, end, activation=self.activation, norm=self.pre_norm == "exact", eps=self.eps)
        if self.post_norm:
            largest = o.detach().abs().amax(-1, keepdim=True)
            o = layer_norm_split(o / largest.masked_fill(largest == 0, 1.0), width=self.width, eps=self.eps)
        else:
            o = o / (end - first).to(o.device, o.dtype)[..., None]
        return self._own_channels(o.to(x.dtype).transpose(0, 1))

    @property
    def _shares_tokens(self) -> bool:
        """Whether tensor ranks hold some tokens each between the layers."""
        return self.group.size() > 1 and bool(self.config.sequence_parallel)

    def _own_tokens(self, of_tokens: Tensor) -> Tensor:
        """(b, n) -> (b, n / tensor)."""
        return of_tokens.chunk(self.group.size(), dim=1)[self.group.rank()] if self._shares_tokens else of_tokens

    def _whole_channels(self, x: Tensor) -> Tensor:
        """(n, b, D / tensor) -> (n / tensor, b, D)."""
        if self.group.size() == 1:
            return x
        if not self._shares_tokens:
            whole: Tensor = gather_from_tensor_model_parallel_region(x, group=self.group)
            return whole
        n, b, _ = x.shape
        found: Tensor = all_to_all_hp2sp(x.flatten(0, 1), group=self.group)
        return found.view(n // self.group.size(), b, -1)

    def _own_channels(self, x: Tensor) -> Tensor:
        """(n / tensor, b, D) -> (n, b, D / tensor)."""
        if self.group.size() == 1:
            return x
        if not self._shares_tokens:
            own: Tensor = scatter_to_tensor_model_parallel_region(x, group=self.group)
            return own
        m, b, _ = x.shape
        found: Tensor = all_to_all_sp2hp(x.flatten(0, 1), group=self.group)
        return found.view(m * self.group.size(), b, -1)


class BiRN(CausalRN):
    """The same over whole documents."""
