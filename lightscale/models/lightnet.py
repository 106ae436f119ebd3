"""LightNet's token mixer: additive decay, a running softmax average over the past, in one scan.

    q = silu(x W_q);  k = x W_k;  v = x W_v;  z_t = logaddexp(z_{t-1}, k_t);  k̄_t = exp(k_t - z_t)
    S_t = diag(1 - k̄_t) S_{t-1} + LRPE(k̄_t) v_tᵀ;  out = W_o (norm(S_tᵀ LRPE(q_t)) * sigmoid(x W_down W_up))

(LightNet, arXiv 2405.21022, equation 7.) The angles of LRPE are fixed. The model adds a Toeplitz positional encoding
after the embedding.
"""

import torch.nn.functional as F
from torch import Tensor

from lightscale.config import ModelConfig
from lightscale.kernels.lightnet import LightNetState, lightnet_attention, recurrent_step
from lightscale.models.context import SequenceContext
from lightscale.models.mixer import GatedMixer, carried, chunked_flops, projection_flops
from lightscale.models.positions import lrpe_angles, lrpe_phases


class LightNet(GatedMixer):
    """(n / tensor, b, d) -> (n / tensor, b, d).

    The state is ``z``: (b, h, k), the log of the weights so far, and ``S``: (b, h, 2 k, k), k the head width.
    """

    shared = frozenset({"tpe"})

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, gate, and attention in chunks."""
        return projection_flops(model, gated=True) + chunked_flops(
            model, sequence_length, key_width=2 * model.head_width
        )

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        q, k, v = self._project(x)
        return self._gated_output(self._attend(F.silu(q), k, v, self._phases(q, context), context), x)

    def _phases(self, q: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
        angles = lrpe_angles(self.model.num_heads, self.model.head_width)[self.heads]
        wide = q.float() if q.dtype.itemsize < 4 else q
        return lrpe_phases(context.positions, angles.to(wide))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, phases: tuple[Tensor, Tensor], context: SequenceContext
    ) -> Tensor:
        if context.states is None:
            o, _ = lightnet_attention(q, k, v, phases=phases, cu_seqlens=context.cu_seqlens)
            return o
        state = context.states.get(self.state_name)
        before = None
        if state is not None:
            # No weight before the document's start: log 0.
            before = LightNetState(carried(state["z"], context, -float("inf")), carried(state["S"], context))
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
