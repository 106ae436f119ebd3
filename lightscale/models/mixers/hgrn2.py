"""HGRN2's token mixer: a data-dependent decay per channel, bounded from below, the more so the higher the layer.

    f = β + (1 - β) sigmoid(x W_f);  k = 1 - f;  q = silu(x W_q);  v = x W_v
    S_t = diag(f_t) S_{t-1} + k_t v_tᵀ;  out = W_o norm(concat S_tᵀ q_t)

(arXiv 2404.07904.) The lower bounds β of all layers come from one table Γ that the model holds once
(``LowerBounds``). With ``causal`` = false a second scan comes from the right, with the same f, k, v and q, and both are
added: out = W_o norm(concat (S_tᵀ q_t + S'_tᵀ q_t)), S'_t = diag(f_t) S'_{t+1} + k_t v_tᵀ.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.model import ModelConfig
from lightscale.kernels.forget_gate import forget_gate
from lightscale.kernels.heads import Heads
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.linear import column_parallel, row_parallel
from lightscale.models.layers.projections import Projection, project
from lightscale.models.layers.shared_parts import StagePart
from lightscale.models.mixers.interface import Mixer
from lightscale.models.mixers.linear_attention import begin_gated
from lightscale.models.specs.hgrn2 import LowerBoundsSpec, hgrn2_options
from lightscale.parallel.initialization import DrawWeights, ones
from lightscale.parallel.megatron import ProcessGroupCollection, TransformerConfig


def lower_bounds(table: Tensor) -> Tensor:
    """β of every layer and channel, (l, d): Γ's softmax over the layers, summed up to each, less the first row.

    So the first layer has β = 0, a constant: subtracted in numbers, it would hand its rounding, which log f magnifies
    there, to the gradient of all rows. (The paper's formula leaves the subtraction out; the authors' code has it.)
    """
    return F.pad(torch.softmax(table, dim=0)[1:].cumsum(dim=0), (0, 0, 1, 0))


def lower_bounds_to_one(table: Tensor) -> Tensor:
    """β as equation 12 of arXiv 2406.16690 has it: the sums with the first row, (l, d).

    The last layer's are sums over all layers, 1: there f = 1 and k = 0, and nothing is ever written to its state. A
    constant again, so that rounding does not reach log f.
    """
    return F.pad(torch.softmax(table, dim=0).cumsum(dim=0)[:-1], (0, 0, 0, 1), value=1.0)


class LowerBounds(StagePart):
    """The table Γ of a model, (l, d), ones at first; split over the tensor ranks by channel. Gives β."""

    spec = LowerBoundsSpec

    table: nn.Parameter

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, groups: ProcessGroupCollection, *, stage: int
    ) -> None:
        super().__init__(config, model, groups, stage=stage)
        self.from_zero = hgrn2_options(model).lower_bounds == "from_zero"

    @staticmethod
    def initial_values(model: ModelConfig) -> dict[str, DrawWeights]:
        """Ones: the bounds rise evenly from layer to layer."""
        return {"table": ones}

    def forward(self, context: SequenceContext) -> tuple[Tensor, ...]:
        """β of each layer, (d / tensor,), fp32 at least; the same for all sequences."""
        return (lower_bounds(self.table) if self.from_zero else lower_bounds_to_one(self.table)).unbind()


class HGRN2(Mixer):
    """(n / tensor, b, d) -> (n / tensor, b, d). The state is ``S``: (b, h, k, k), k head_dim."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        d = model.hidden_size
        # Rows are ordered head by head, f and v of a head together, so that a contiguous shard holds whole heads. The
        # queries are projected apart, while the states travel.
        self.fv_proj = column_parallel(config, d, 2 * d, std=model.init_std, group=self.group)
        self.q_proj = column_parallel(config, d, d, std=model.init_std, group=self.group)
        options = hgrn2_options(model)
        self.reads_both_ways = not options.causal
        self.is_activated = options.query_activation == "silu"
        if options.output_projection:
            self.out_proj = row_parallel(config, d, d, std=self.output_std, group=self.group)

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        heads = self.num_heads, self.head_dim
        written = Projection(self.fv_proj, Heads(*heads, ("none", "none")))
        read = Projection(self.q_proj, Heads(*heads, ("silu" if self.is_activated else "none",)))
        travels = context.exchange is not None
        f, v, *now = project(x, written, *(() if travels else (read,)))
        bounds = context.shared[LowerBoundsSpec.name]
        # Keys enter products and are rounded once. log f stays in fp32: it is summed over tokens, and so is its error.
        log_decay, k = forget_gate(f, bounds[self.layer].view(self.num_heads, -1), v.dtype)
        both_ways = self.reads_both_ways
        finish = begin_gated(k, v, log_decay, context=context, state_name=self.state_name, both_ways=both_ways)
        (q,) = now or project(x, read)
        return self._projected(self._norm(finish(q)))
