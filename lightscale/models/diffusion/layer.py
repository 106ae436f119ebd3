"""Blocks of diffusion transformers: adaLN-Zero around a mixer and a gated linear unit (DiT, arXiv 2212.09748).

    s ← s + g_1 mixer(norm(s) (1 + a_1) + b_1);  s ← s + g_2 glu(norm(s) (1 + a_2) + b_2)

with shifts b, scales a and gates g of each image (``conditioning.py``). Gates begin at 0, and blocks as the identity.
"""

from functools import partial
from typing import Any

from torch import Tensor

from lightscale.models.diffusion.conditioning import Modulation, modulated
from lightscale.models.layers.blocks import DecoderLayer, Stream
from lightscale.models.layers.context import SequenceContext
from lightscale.parallel.megatron import TransformerConfig, tensor_parallel


class DiffusionLayer(DecoderLayer):
    """A block whose norms are before mixer and gated linear unit, with a modulation."""

    def __init__(self, config: TransformerConfig, **how: Any) -> None:
        super().__init__(config=config, **how)
        self.modulation = Modulation(config, config.hidden_size, 6)

    def pair(self, hidden_states: Tensor, added: Tensor | None, context: SequenceContext) -> Stream:
        """The stream behind the block."""
        shift, scale, gate, glu_shift, glu_scale, glu_gate = self.modulation(context)
        x, normed = self.input_layernorm(hidden_states, added)
        given: Any = modulated(normed, shift, scale)
        if getattr(self.self_attention, "reads_raw", False):
            given = given, x
        mixed, _ = self.self_attention(given, None, packed_seq_params=context)
        x, normed = self.pre_mlp_layernorm(x, gate * mixed)
        given = modulated(normed, glu_shift, glu_scale)
        if self.recompute_mlp:
            output, _ = tensor_parallel.checkpoint(partial(self._mlp, context), False, given)
        else:
            output, _ = self.mlp(given)
        return x, glu_gate * output
