"""cosFormer2's token mixer: linear attention without decay, reweighted by learnable cosines of the distance.

    q, k = silu(x W_q), silu(x W_k);  v = x W_v;  u = sigmoid(x W_down W_up)
    S_t = S_{t-1} + LRPE(k_t) v_tᵀ;  o_t = S_tᵀ LRPE(q_t);  out = W_o (norm(concat o) * u)

(arXiv 2406.16690; cosFormer, arXiv 2202.08791.) Every layer has its own angles, one per head and channel. The model
adds a Toeplitz positional encoding after the embedding.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.positions import LRPE, lrpe_angles
from lightscale.models.mixers.interface import GatedMixer
from lightscale.models.mixers.linear_attention import begin_attention
from lightscale.parallel.megatron import TransformerConfig


class CosFormer2(GatedMixer):
    """(n / tensor, b, d) -> (n / tensor, b, d). The state is ``S``: (b, h, 2 k, k), k head_dim."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        # Equal in all heads at first; each learns its own from there.
        angles = lrpe_angles(1, model.head_dim, model.axes).expand(model.num_heads, -1)
        self.lrpe = LRPE(config, angles, self.group)

    def mix(self, x: Tensor, context: SequenceContext, raw: Tensor | None = None) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d). ``raw``: see ``GatedMixer``."""
        k, v = self._heads(self.kv_proj, x, 2)
        angles = self.lrpe(context.coordinates)
        # Without decay and denominator the outputs grow with the position; the norm behind takes that out (TransNormer,
        # arXiv 2210.10340). The state grows too, which is one reason to keep it in fp32.
        finish = begin_attention(F.silu(k), v, None, angles=angles, context=context, state_name=self.state_name)
        (q,) = self._heads(self.q_proj, x)
        gate = self._gate(x if raw is None else raw)
        return self._gated_output(finish(F.silu(q)), gate)
