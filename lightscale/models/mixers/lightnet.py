"""LightNet's token mixer: additive decay, a running softmax average over the past, or one over the document.

    q = silu(x W_q);  k = x W_k;  v = x W_v;  z_t = logaddexp(z_{t-1}, k_t);  k̄_t = exp(k_t - z_t)
    S_t = diag(1 - k̄_t) S_{t-1} + LRPE(k̄_t) v_tᵀ;  out = W_o (norm(S_tᵀ LRPE(q_t)) * sigmoid(x W_down W_up))

(LightNet, arXiv 2405.21022, equation 7.) With ``causal`` = false all tokens of a document read its last state, which
takes one scan (equation 8). The angles of LRPE are fixed, or learned. The model adds a Toeplitz positional encoding
after the embedding. As in the paper, its direction is the same for both kinds of mixer. Options give the variants of
the ablation (tables 1, 5, 6, 7 and 8). Without decay: S_t = S_{t-1} + LRPE(silu(k_t)) v_tᵀ. With separate weights for
key and decay ("no share", section 5.3):

    δ = x W_down' W_up';  z_t = logaddexp(z_{t-1}, δ_t);  S_t = diag(e^{z_{t-1} - z_t}) S_{t-1} + LRPE(silu(k_t)) v_tᵀ
"""

import dataclasses
import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.kernels.common.angles import (
    axes_of,
    axis_angles,
    by_axis,
    feature_width,
    features,
    for_axes,
    over_axes,
    parts_of,
    phases_of,
)
from lightscale.kernels.lightnet import (
    Angles,
    LightNetState,
    lightnet_attention,
    lightnet_noncausal,
    recurrent_step,
    state_dtype,
)
from lightscale.kernels.log_sum import log_sum
from lightscale.models.layers.context import Finish, SequenceContext
from lightscale.models.layers.linear import ReplicatedLinear, column_parallel
from lightscale.models.layers.positions import LRPE, lrpe_angles
from lightscale.models.layers.states import incoming_state
from lightscale.models.mixers.interface import GatedMixer
from lightscale.models.mixers.linear_attention import along_axes, begin_attention, begin_gated
from lightscale.models.specs.lightnet import lightnet_options
from lightscale.parallel.megatron import TransformerConfig
from lightscale.parallel.sequence import LightNetScan, LightNetWholeScan, LogSumScan


class LightNet(GatedMixer):
    """(n / tensor, b, d) -> (n / tensor, b, d).

    The state is ``z``: (b, h, k), the log of the weights so far, and ``S``: (b, h, 2 k, k), k head_dim; without decay
    S alone, and without LRPE S of k rows.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        # Kept in fp32 in half-precision models: it is multiplied by positions.
        wide = torch.promote_types(config.params_dtype, torch.float32)
        self.is_causal = model.direction(self.layer) == "causal"
        options = lightnet_options(model, self.layer)
        self.has_decay, self.has_norm = options.decay, options.output_norm
        self.has_angles, self.learns_angles = options.lrpe, options.learned_angles
        theta = lrpe_angles(model.num_heads, model.head_dim, model.axes)
        if self.learns_angles:
            self.lrpe = LRPE(config, theta, self.group)
        elif self.has_angles:
            self.register_buffer("theta", theta[self.heads].to(self.kv_proj.weight.device, wide), persistent=False)
        self.shares_decay = options.shared_decay
        if not self.shares_decay:
            d, rank = model.hidden_size, model.head_dim
            self.decay_down = ReplicatedLinear(config, d, rank, std=model.init_std)
            self.decay_up = column_parallel(config, rank, d, std=model.init_std, group=self.group)

    def mix(self, x: Tensor, context: SequenceContext, raw: Tensor | None = None) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d). ``raw``: see ``GatedMixer``."""
        # No activation on a k that is the logarithm of a weight and may have either sign.
        is_weight = self.shares_decay and self.has_decay
        k, v, rest = self._read(x, raw, context, key="none" if is_weight else "silu", query="silu")
        angles = self._angles(context.coordinates)
        if not self.shares_decay:
            finish = self._begin_apart(x, k, v, angles, context)
        elif not self.has_decay:
            finish = self._begin_sums(k, v, angles, context)
        else:
            axes = axes_of(angles)
            finish = along_axes(axes, self._begin(by_axis(k, axes), for_axes(v, axes), angles, context))
        q, gate = rest()
        o = finish(q)
        if self.has_norm:
            return self._gated_output(o, gate)
        return self._projected(o.transpose(0, 1).flatten(2) * torch.sigmoid(gate))

    def _angles(self, positions: Tensor) -> Angles | None:
        if self.learns_angles:
            found: Angles = self.lrpe(positions)
            return found
        return axis_angles(self.theta, positions) if self.has_angles else None

    def _begin_sums(self, k: Tensor, v: Tensor, angles: Angles | None, context: SequenceContext) -> Finish:
        return begin_attention(k, v, None, angles=angles, context=context, state_name=self.state_name)

    def _begin_apart(self, x: Tensor, k: Tensor, v: Tensor, angles: Angles | None, context: SequenceContext) -> Finish:
        """Decays of their own weights: log-sums first, in an exchange of their own, then ``gla`` with them."""
        delta: Tensor = self.decay_up(self.decay_down(x))[0].transpose(0, 1)
        delta, within = delta.to(state_dtype(delta.dtype)), context
        entering, axes = None, axes_of(angles)
        keys, values = by_axis(k, axes), for_axes(v, axes)
        if context.exchange is not None:
            before = context.begin(functools.partial(LogSumScan, before=True), delta, layer=self.state_name)()
        else:
            if context.states is not None:
                within, entering = self._entering(k, (keys, values), angles, context)
            z = log_sum(delta, initial_state=entering, cu_seqlens=context.cu_seqlens)
            first = torch.full_like(z[:, :1], -math.inf) if entering is None else entering[:, None]
            before = torch.cat([first, z[:, :-1]], dim=1)
        # log(1 - e^{δ - z}) by what came before, so that its gradient is at most 1. Before the first token there is
        # nothing to decay.
        known = (before > -math.inf) & (context.positions != 0)[..., None]
        log_decay = torch.where(known, F.logsigmoid(torch.where(known, before - delta, 0.0)), 0.0).view(k.shape)
        log_decay = by_axis(log_decay, axes)
        phases = None if angles is None else phases_of(angles, log_decay.dtype)

        def spread(y: Tensor) -> Tensor:
            return features(y, phases).to(v.dtype)

        if phases is not None:
            log_decay = torch.cat([log_decay, log_decay], dim=-1)
        gated = begin_gated(spread(keys), values, log_decay, context=within, state_name=self.state_name)

        def finish(q: Tensor) -> Tensor:
            o = over_axes(gated(spread(by_axis(q, axes))), axes)
            if context.states is not None and within.states is not None:
                last = z[:, -1].view(k[:, 0].shape).clone()
                context.states[self.state_name] = {**within.states[self.state_name], "z": last}
            return o

        return finish

    def _entering(
        self, k: Tensor, written: tuple[Tensor, Tensor], angles: Angles | None, context: SequenceContext
    ) -> tuple[SequenceContext, Tensor | None]:
        """A context whose states are ``S`` alone, and the log-sums (b, h k), if there are any.

        ``written``: keys and values by axis.
        """
        b, _, h, width = k.shape
        keys, values = written
        shapes = {"z": (b, h, width), "S": (b, keys.size(2), feature_width(keys, angles), values.size(3))}
        state = incoming_state(context, self.state_name, shapes, state_dtype(k.dtype), empty={"z": -math.inf})
        if state is None:
            return dataclasses.replace(context, states={}), None
        within = dataclasses.replace(context, states={self.state_name: {"S": state["S"]}})
        return within, state["z"].flatten(1)

    def _begin(self, k: Tensor, v: Tensor, angles: Angles | None, context: SequenceContext) -> Finish:
        if not self.is_causal:
            return self._begin_whole(k, v, angles, context)
        if context.exchange is not None:
            return context.begin(LightNetScan, k, v, *parts_of(angles), layer=self.state_name)
        return lambda q: self._attend(q, k, v, angles, context)

    def _begin_whole(self, k: Tensor, v: Tensor, angles: Angles | None, context: SequenceContext) -> Finish:
        assert context.states is None, "only models that predict the next token generate"
        bounds = context.document_bounds
        if context.exchange is not None:
            scan = functools.partial(LightNetWholeScan, bounds=None if bounds is None else tuple(bounds.tolist()))
            return context.begin(scan, k, v, *parts_of(angles), layer=self.state_name)
        return lambda q: lightnet_noncausal(q, k, v, angles=angles, cu_seqlens=bounds)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, angles: Angles | None, context: SequenceContext) -> Tensor:
        if context.states is None:
            o, _ = lightnet_attention(q, k, v, angles=angles, cu_seqlens=context.cu_seqlens)
            return o
        b, _, h, key_width = k.shape
        shapes = {"z": (b, h, key_width), "S": (b, h, feature_width(k, angles), v.size(3))}
        # No weight before the document's start: log 0.
        state = incoming_state(context, self.state_name, shapes, state_dtype(q.dtype), empty={"z": -math.inf})
        before = None if state is None else LightNetState(**state)
        # One token: the recurrence, whose cost does not depend on how many tokens came before.
        if before is not None and q.size(1) == 1:
            here = None if angles is None else Angles(angles.theta, angles.positions[:, 0])
            o, after = recurrent_step(q[:, 0], k[:, 0], v[:, 0], before, here)
            context.states[self.state_name] = after._asdict()
            return o[:, None]
        o, final = lightnet_attention(
            q,
            k,
            v,
            angles=angles,
            initial_state=before,
            output_final_state=True,
            cu_seqlens=context.cu_seqlens,
        )
        assert final is not None, "asked for with output_final_state"
        context.states[self.state_name] = final._asdict()
        return o
