"""TransNormerLLM's token mixer: lightning attention with a fixed decay per head and layer.

    q, k = silu(x W_q), silu(x W_k);  v = x W_v;  u = sigmoid(x W_down W_up)
    S_t = λ S_{t-1} + k_t v_tᵀ;  o_t = S_tᵀ q_t;  out = W_o (norm(concat o) * u)

(arXiv 2307.14995, arXiv 2401.04658; λ of equation 5 of the former.) The first layer rotates q and k by learnable
angles (LRPE), which doubles their width.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from lightscale.config import ModelConfig
from lightscale.kernels.lightning import lightning_attention, recurrent_step
from lightscale.models.context import MixerState, SequenceContext
from lightscale.models.layers import ReplicatedLinear, column_parallel, row_parallel, srmsnorm_split
from lightscale.models.mixer import Mixer
from lightscale.models.positions import LRPE
from lightscale.parallel.sequence import sequence_parallel_lightning_attention

CHUNK_TOKENS = 128
"""Chunk of the lightning attention kernels on GPUs, in tokens."""


def alibi_slopes(num_heads: int) -> list[float]:
    """2^(-8(h+1)/H) for a power of two; otherwise those of the power below, then every second one of the power above.

    (ALiBi, arXiv 2108.12409, and its public code for other head counts.)
    """
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (h + 1) / below) for h in range(below)]
    if below < num_heads:
        slopes += alibi_slopes(2 * below)[0::2][: num_heads - below]
    return slopes


def log_decays(num_heads: int, layer: int, num_layers: int) -> Tensor:
    """log λ of each head, (h,) fp64: -s_h (1 - layer/(l-1) + 1e-5), ``layer`` from 0; a single layer has factor 1."""
    factor = 1.0 if num_layers == 1 else 1 - layer / (num_layers - 1) + 1e-5
    return -torch.tensor(alibi_slopes(num_heads), dtype=torch.float64) * factor


class TNL(Mixer):
    """(n / tensor, b, d) -> (n / tensor, b, d). Heads are split over the tensor ranks, tokens over the sequence ranks.

    The state is ``S``: (b, h, k, head width), k the head width, doubled on the first layer.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        d, std, group = model.width, model.init_std, self.group
        # Rows are ordered head by head, q, k and v of a head together, so that a contiguous shard holds whole heads.
        self.in_proj = column_parallel(config, d, 3 * d, std=std, group=group)
        rank = model.gate_rank or model.head_width
        self.gate_down = ReplicatedLinear(config, d, rank, std=std)
        self.gate_up = column_parallel(config, rank, d, std=std, group=group)
        self.out_proj = row_parallel(config, d, d, std=self.output_std, group=group)
        self.lrpe = LRPE(config, model, group) if self.layer == 0 else None
        # Kept in fp32 in half-precision models: it is multiplied by distances.
        wide = torch.promote_types(config.params_dtype, torch.float32)
        decays = log_decays(model.num_heads, self.layer, model.num_layers)[self.heads]
        self.register_buffer("log_decay", decays.to(self.in_proj.weight.device, wide), persistent=False)

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, gate, and attention in chunks: within the chunk 2 C (k + v), with the state 4 k v, per head."""
        d, rank, v = model.width, model.gate_rank or model.head_width, model.head_width
        k = 2 * v if layer == 0 else v
        chunk = min(CHUNK_TOKENS, sequence_length)
        return 2 * (4 * d * d + 2 * d * rank) + model.num_heads * (2 * chunk * (k + v) + 4 * k * v)

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        projected, _ = self.in_proj(x)
        n, b, _ = projected.shape
        # (n, b, h 3 k) -> three of (b, n, h, k)
        q, k, v = projected.view(n, b, self.num_heads, 3, -1).transpose(0, 1).unbind(dim=3)
        q, k = F.silu(q), F.silu(k)
        if self.lrpe is not None:
            q, k = self.lrpe(q, k, context.positions)
        o = self._attend(q, k, v, context)
        gate, _ = self.gate_up(self.gate_down(x))
        o = srmsnorm_split(
            o.transpose(0, 1).reshape(n, b, -1), width=self.model.width, eps=self.model.norm_eps, group=self.group
        )
        out, _ = self.out_proj(o * torch.sigmoid(gate))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        if context.exchange is not None:
            return sequence_parallel_lightning_attention(
                q,
                k,
                v,
                self.log_decay,
                continues=context.continues,
                cu_seqlens=context.cu_seqlens,
                exchange=context.exchange,
            )
        if context.states is None:
            o, _ = lightning_attention(q, k, v, self.log_decay, cu_seqlens=context.cu_seqlens)
            return o
        o, context.states[self.state_name] = self._continue(q, k, v, context, context.states.get(self.state_name))
        return o

    def _continue(
        self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, state: MixerState | None
    ) -> tuple[Tensor, MixerState]:
        """The outputs after ``state`` and the state after them: one token by the recurrence, more in chunks."""
        # A row that begins a document here has nothing to do with what was fed before.
        before = None if state is None else state["S"].where(context.continues[:, None, None, None], 0.0)
        if before is not None and q.size(1) == 1:
            o, after = recurrent_step(q[:, 0], k[:, 0], v[:, 0], self.log_decay, before)
            return o[:, None], {"S": after}
        o, final = lightning_attention(
            q,
            k,
            v,
            self.log_decay,
            initial_state=before,
            output_final_state=True,
            cu_seqlens=context.cu_seqlens,
        )
        assert final is not None, "asked for with output_final_state"
        return o, {"S": final}
