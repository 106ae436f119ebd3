"""TransNormerLLM's token mixer: lightning attention with a fixed decay per head and layer.

    q, k = silu(x W_q), silu(x W_k);  v = x W_v;  u = sigmoid(x W_down W_up)
    S_t = λ S_{t-1} + k_t v_tᵀ;  o_t = S_tᵀ q_t;  out = W_o (norm(concat o) * u)

(arXiv 2307.14995, arXiv 2401.04658; λ of equation 5 of the former.) The first layer rotates q and k by learnable
angles (LRPE), which doubles their width. Options choose other decays, other layers for LRPE, and the gate's input, and
with ``causal`` = false a second scan, from the right, whose outputs are added.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.positions import LRPE, lrpe_angles
from lightscale.models.mixers.interface import GatedMixer
from lightscale.models.mixers.linear_attention import begin_attention
from lightscale.models.specs.tnl import tnl_options, tnl_rotates
from lightscale.parallel.megatron import TransformerConfig


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
    # The factor of the last layer is 1e-5, so that its λ differs from 1 by less than fp32 can resolve well: log λ is
    # what is kept and multiplied by distances, never λ itself.
    factor = 1.0 if num_layers == 1 else 1 - layer / (num_layers - 1) + 1e-5
    return -torch.tensor(alibi_slopes(num_heads), dtype=torch.float64) * factor


def linear_log_decays(num_heads: int, layer: int, num_layers: int) -> Tensor:
    """-8h/H (1 - l/L), (h,) fp64, heads and layers from 0: the first head has no decay in any layer.

    (TransNormerLLM's formula as flash-linear-attention's TNL has it.)
    """
    return -torch.arange(num_heads, dtype=torch.float64) * (8 / num_heads) * (1 - layer / num_layers)


def minimax_log_decays(num_heads: int, layer: int, num_layers: int) -> Tensor:
    """-2^(-8(h+1)/H) (1 - l/(L - 1 + 1e-5) + 1e-5), (h,) fp64: one geometric series for any number of heads."""
    slopes = torch.pow(2.0, -8 * torch.arange(1, num_heads + 1, dtype=torch.float64) / num_heads)
    return -slopes * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)


LOG_DECAYS: dict[str, Callable[[int, int, int], Tensor]] = {
    "alibi": log_decays,
    "linear": linear_log_decays,
    "minimax": minimax_log_decays,
}
"""By the option ``decay``."""


class TNL(GatedMixer):
    """(n / tensor, b, d) -> (n / tensor, b, d). Heads are split over the tensor ranks, tokens over the sequence ranks.

    The state is ``S``: (b, h, k, head_dim), k head_dim, doubled where a layer rotates.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        angles = lrpe_angles(model.num_heads, model.head_dim, model.axes)
        self.lrpe = LRPE(config, angles, self.group) if tnl_rotates(model, self.layer) else None
        self.reads_both_ways = not tnl_options(model, self.layer).causal
        # Kept in fp32 in half-precision models: it is multiplied by distances.
        wide = torch.promote_types(config.params_dtype, torch.float32)
        made = LOG_DECAYS[tnl_options(model, self.layer).decay]
        decays = made(model.num_heads, self.layer, model.num_layers)[self.heads]
        # Not in checkpoints: configuration and layout decide it, and a checkpoint is read under any layout.
        self.register_buffer("log_decay", decays.to(self.kv_proj.weight.device, wide), persistent=False)

    def mix(self, x: Tensor, context: SequenceContext, raw: Tensor | None = None) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d). ``raw``: see ``GatedMixer``."""
        k, v, rest = self._read(x, raw, context, key="silu", query="silu")
        angles = None if self.lrpe is None else self.lrpe(context.coordinates)
        # Between begin and finish the state travels along the sequence ranks: the order of these lines is the overlap.
        finish = begin_attention(
            k,
            v,
            self.log_decay,
            angles=angles,
            context=context,
            state_name=self.state_name,
            both_ways=self.reads_both_ways,
        )
        q, gate = rest()
        return self._gated_output(finish(q), gate)
