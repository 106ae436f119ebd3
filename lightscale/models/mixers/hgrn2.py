"""HGRN2's token mixer: a data-dependent decay per channel, bounded from below, the more so the higher the layer.

    f = β + (1 - β) sigmoid(x W_f);  k = 1 - f;  q = silu(x W_q);  v = x W_v
    S_t = diag(f_t) S_{t-1} + k_t v_tᵀ;  out = W_o norm(concat S_tᵀ q_t)

(arXiv 2404.07904.) The lower bounds β of all layers come from one table Γ that the model holds (``lower_bounds``).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from lightscale.config.schema import ModelConfig
from lightscale.kernels.gla import gla, recurrent_step, state_dtype
from lightscale.models.layers.common import column_parallel, ones, row_parallel
from lightscale.models.layers.context import Finish, SequenceContext
from lightscale.models.layers.states import Shapes, incoming_state
from lightscale.models.mixers.interface import Mixer, chunked_flops, projection_flops
from lightscale.parallel.engine import share_over_stages
from lightscale.parallel.initialization import set_initializer
from lightscale.parallel.sequence import GatedScan


def lower_bounds(table: Tensor) -> Tensor:
    """β of every layer and channel, (l, d): Γ's softmax over the layers, summed up to each, less the first row.

    So the first layer has β = 0, a constant: subtracted in numbers, it would hand its rounding, which log f magnifies
    there, to the gradient of all rows. (The paper's formula leaves the subtraction out; the authors' code has it.)
    """
    return F.pad(torch.softmax(table, dim=0)[1:].cumsum(dim=0), (0, 0, 1, 0))


def log_forget(logits: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """log f and k = 1 - f, both in the dtype of ``bound``, with f = β + (1 - β) sigmoid(logits).

    Both keep their relative accuracy at both ends: log f is log1p(-k) for large f and log(f) for small f. Where β is 0
    it is log sigmoid, whose gradient stays below 1 while f itself and 1 / f leave the range of the dtype.

    logits: (…, h, k). bound: β (h, k), fp32 or wider.
    """
    logits = logits.to(bound.dtype)
    forget = bound + (1 - bound) * torch.sigmoid(logits)
    key = (1 - bound) * torch.sigmoid(-logits)
    large = forget > 0.5
    # Each branch gets a harmless input where the other is taken: its gradient there would be 0 times infinity.
    near_one = torch.log1p(-torch.where(large, key, 0.0))
    bounded = bound > 0
    near_zero = torch.log(torch.where(large | ~bounded, 1.0, forget))
    return torch.where(bounded, torch.where(large, near_one, near_zero), F.logsigmoid(logits)), key


class LowerBounds(MegatronModule):
    """The table Γ of a model, (l, d), ones at first; split over the tensor ranks by channel. Gives β.

    One parameter that all layers read: every pipeline stage has a copy, and the engine sums their gradients.
    """

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, groups: ProcessGroupCollection, *, virtual_stage: int
    ) -> None:
        super().__init__(config)
        self.tp_group: dist.ProcessGroup = groups.tp
        self.stage: int = virtual_stage * groups.pp.size() + groups.pp.rank()
        wide = torch.promote_types(config.params_dtype, torch.float32)
        own = model.hidden_size // groups.tp.size()
        self.table = nn.Parameter(torch.empty(model.num_layers, own, dtype=wide, device=torch.cuda.current_device()))
        self.table.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.table.partition_dim, self.table.partition_stride = 1, 1  # type: ignore[attr-defined]
        self.table.no_weight_decay = True  # type: ignore[attr-defined]
        set_initializer(self.table, ones)
        if groups.pp.size() > 1:
            share_over_stages(self.table, stage=self.stage)

    @staticmethod
    def parameter_shapes(model: ModelConfig) -> Shapes:
        """By their names in the module."""
        return {"table": (model.num_layers, model.hidden_size)}

    def forward(self) -> Tensor:
        """β, (l, d / tensor), fp32 at least."""
        return lower_bounds(self.table)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description for checkpoints: split along dim 1, written by the first stage."""
        key, data_group = f"{prefix}table", ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        return {
            key: make_tp_sharded_tensor_for_checkpoint(
                self.table,
                key,
                1,
                replica_id=(self.stage, 0, data_group.rank()),
                prepend_offsets=sharded_offsets,
                tp_group=self.tp_group,
                dp_cp_group=data_group,
            )
        }


class HGRN2(Mixer):
    """(n / tensor, b, d) -> (n / tensor, b, d). The state is ``S``: (b, h, k, k), k the head width."""

    operator = "gla"

    shared = frozenset({"lower_bounds"})

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        d = model.hidden_size
        # Rows are ordered head by head, f and v of a head together, so that a contiguous shard holds whole heads. The
        # queries are projected apart, while the states travel.
        self.fv_proj = column_parallel(config, d, 2 * d, std=model.init_std, group=self.group)
        self.q_proj = column_parallel(config, d, d, std=model.init_std, group=self.group)
        self.out_proj = row_parallel(config, d, d, std=self.output_std, group=self.group)

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Projections, and attention in chunks."""
        attention = chunked_flops(model, sequence_length, operator=HGRN2.operator, key_width=model.head_dim)
        return projection_flops(model, gated=False) + attention

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        """Projections; the lower bounds belong to the model."""
        d = model.hidden_size
        return {"fv_proj.weight": (2 * d, d), "q_proj.weight": (d, d), "out_proj.weight": (d, d)}

    @staticmethod
    def exchange_values(model: ModelConfig, layer: int) -> tuple[int, int]:
        """A state and a decay per channel forward, a state's cotangent backward."""
        state = model.hidden_size * model.head_dim
        return state + model.hidden_size, state

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""
        assert context.lower_bounds is not None, "the model holds the table of lower bounds"
        f, v = self._heads(self.fv_proj, x, 2)
        log_decay, k = log_forget(f, context.lower_bounds[self.layer].view(self.num_heads, -1))
        finish = self._begin(k.to(v.dtype), v, log_decay, context)
        (q,) = self._heads(self.q_proj, x)
        out: Tensor = self.out_proj(self._norm(finish(F.silu(q))))[0]
        return out

    def _begin(self, k: Tensor, v: Tensor, log_decay: Tensor, context: SequenceContext) -> Finish:
        if context.exchange is not None:
            return context.begin(GatedScan, k, v, log_decay, layer=self.state_name)
        return lambda q: self._attend(q, k, v, log_decay, context)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, context: SequenceContext) -> Tensor:
        if context.states is None:
            o, _ = gla(q, k, v, log_decay, cu_seqlens=context.cu_seqlens)
            return o
        shape = (q.size(0), q.size(2), q.size(3), v.size(3))
        state = incoming_state(context, self.state_name, {"S": shape}, state_dtype(q.dtype))
        before = None if state is None else state["S"]
        if before is not None and q.size(1) == 1:
            o, after = recurrent_step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], before)
            context.states[self.state_name] = {"S": after}
            return o[:, None]
        o, final = gla(q, k, v, log_decay, initial_state=before, output_final_state=True, cu_seqlens=context.cu_seqlens)
        assert final is not None, "asked for with output_final_state"
        context.states[self.state_name] = {"S": final}
        return o
