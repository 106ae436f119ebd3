"""LightNet's token mixer: additive decay, a running softmax average over the past, in one scan.

    q = silu(x W_q);  k = x W_k;  v = x W_v;  z_t = logaddexp(z_{t-1}, k_t);  k̄_t = exp(k_t - z_t)
    S_t = diag(1 - k̄_t) S_{t-1} + LRPE(k̄_t) v_tᵀ;  out = W_o (norm(S_tᵀ LRPE(q_t)) * sigmoid(x W_down W_up))

(LightNet, arXiv 2405.21022, equation 7.) The angles of LRPE are fixed. The model adds a Toeplitz positional encoding
after the embedding.
"""

import math

import torch.nn.functional as F
from torch import Tensor

from lightscale.config import ModelConfig
from lightscale.kernels.common.angles import Angles, phases_of
from lightscale.kernels.lightnet import LightNetState, lightnet_attention, recurrent_step, state_dtype
from lightscale.models.context import Finish, SequenceContext
from lightscale.models.mixer import GatedMixer, chunked_flops, incoming_state, projection_flops
from lightscale.models.positions import lrpe_angles
from lightscale.parallel.sequence import LightNetScan


class LightNet(GatedMixer):
    """(n / tensor, b, d) -> (n / tensor, b, d).

    The state is ``z``: (b, h, k), the log of the weights so far, and ``S``: (b, h, 2 k, k), k the head width.
    """

    operator = "lightnet"

    shared = frozenset({"tpe"})

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, gate, and attention in chunks."""
        return projection_flops(model, gated=True) + chunked_flops(
            model, sequence_length, key_width=2 * model.head_width
        )

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """z, S and a flag forward, their cotangents backward; both halves of S share z."""
        values = model.width * (2 * model.head_width + 1)
        return values + 1, values

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        k, v = self._heads(self.kv_proj, x, 2)
        finish = self._begin(k, v, self._phases(k, context), context)
        (q,) = self._heads(self.q_proj, x)
        gate = self._gate(x)
        return self._gated_output(finish(F.silu(q)), gate)

    def _phases(self, k: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
        angles = lrpe_angles(self.model.num_heads, self.model.head_width)[self.heads]
        wide = k.float() if k.dtype.itemsize < 4 else k
        return phases_of(Angles(angles.to(wide), context.positions), wide.dtype)

    def _begin(self, k: Tensor, v: Tensor, phases: tuple[Tensor, Tensor], context: SequenceContext) -> Finish:
        if context.exchange is not None:
            return context.begin(LightNetScan, k, v, *phases, layer=self.state_name)
        return lambda q: self._attend(q, k, v, phases, context)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, phases: tuple[Tensor, Tensor], context: SequenceContext
    ) -> Tensor:
        if context.states is None:
            o, _ = lightnet_attention(q, k, v, phases=phases, cu_seqlens=context.cu_seqlens)
            return o
        b, _, h, key_width = k.shape
        shapes = {"z": (b, h, key_width), "S": (b, h, 2 * key_width, v.size(3))}
        # No weight before the document's start: log 0.
        state = incoming_state(context, self.state_name, shapes, state_dtype(q.dtype), empty={"z": -math.inf})
        before = None if state is None else LightNetState(**state)
        if before is not None and q.size(1) == 1:
            cos, sin = phases
            o, after = recurrent_step(q[:, 0], k[:, 0], v[:, 0], before, (cos[:, 0], sin[:, 0]))
            context.states[self.state_name] = after._asdict()
            return o[:, None]
        o, final = lightnet_attention(
            q,
            k,
            v,
            phases=phases,
            initial_state=before,
            output_final_state=True,
            cu_seqlens=context.cu_seqlens,
        )
        assert final is not None, "asked for with output_final_state"
        context.states[self.state_name] = final._asdict()
        return o
