"""Toeplitz positional encoding: a causal convolution per channel, by a sum of decaying modes (LightNet, equation 11).

u_t[c, r] = λ_r u_{t-1}[c, r] + x_t[c];  y_t[c] = Σ_r γ[c, r] u_t[c, r];  the stream becomes x + y
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from lightscale.config.schema import ModelConfig
from lightscale.kernels.operators import get_operator
from lightscale.kernels.tpe import recurrent_step, state_dtype, tpe_scan
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.states import Shapes, incoming_state
from lightscale.parallel.initialization import normal, set_initializer
from lightscale.parallel.sequence import TPEScan

LONGEST_SCALE_TOKENS = 4096
STATE_NAME = "tpe"


def initial_decay_logits(num_modes: int) -> Tensor:
    """a with λ = sigmoid(a), (e,) fp64: the time scales -1 / log λ run from 1 to 4096 tokens in equal ratios."""
    scales = torch.logspace(0, math.log10(LONGEST_SCALE_TOKENS), num_modes, dtype=torch.float64)
    return torch.logit(torch.exp(-1 / scales))


class TPE(MegatronModule):
    """x (n, b, d / tensor) -> x + y, once per model, after the embedding. The state is ``u``: (b, d / tensor, e).

    Channels are independent, so tensor ranks share them out and each scans the whole stretch of its sequence rank. (As
    further segments of the sequence, which the tensor ranks split behind the embedding, they would need an exchange
    of states, and every rank all of ``gamma``.)
    """

    def __init__(self, config: TransformerConfig, model: ModelConfig, group: dist.ProcessGroup) -> None:
        super().__init__(config)
        self.tp_group = group
        modes, device = model.head_dim, torch.cuda.current_device()
        # In fp32 also in half-precision models: a decay near 1 is applied thousands of times.
        wide = torch.promote_types(config.params_dtype, torch.float32)
        self.decay_logit = nn.Parameter(torch.empty(modes, dtype=wide, device=device))
        own = model.hidden_size // group.size()
        self.gamma = nn.Parameter(torch.empty(own, modes, dtype=config.params_dtype, device=device))
        self.gamma.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.gamma.partition_dim, self.gamma.partition_stride = 0, 1  # type: ignore[attr-defined]
        # Tensor ranks read it for other channels each: the engine sums the gradient over them.
        self.decay_logit.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        initial = initial_decay_logits(modes)
        set_initializer(self.decay_logit, lambda weight, generator: weight.copy_(initial))
        set_initializer(self.gamma, normal(model.init_std / math.sqrt(modes)))

    @staticmethod
    def parameter_shapes(model: ModelConfig) -> Shapes:
        """By their names in the module."""
        return {"decay_logit": (model.head_dim,), "gamma": (model.hidden_size, model.head_dim)}

    @staticmethod
    def forward_flops_per_token(model: ModelConfig) -> float:
        """A short Toeplitz product, and the state read and written, per channel."""
        return model.hidden_size * (2 * get_operator("tpe").chunk_size + 4 * model.head_dim)

    @staticmethod
    def exchange_values(model: ModelConfig, *, rows: int) -> tuple[int, int]:
        """Numbers that each sequence rank contributes to an exchange, forward and backward: states, and λ^n per row."""
        state = rows * model.hidden_size * model.head_dim
        return state + rows * model.head_dim, state

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n, b, d / tensor), this tensor rank's channels of all tokens -> the same."""
        rows, log_decay = x.transpose(0, 1), F.logsigmoid(self.decay_logit)
        if context.exchange is not None:
            return x + context.begin(TPEScan, rows, log_decay, layer=None)(self.gamma).transpose(0, 1)
        if context.states is None:
            y, _ = tpe_scan(rows, log_decay, self.gamma, cu_seqlens=context.cu_seqlens)
            return x + y.transpose(0, 1)
        state = incoming_state(context, STATE_NAME, {"u": (rows.size(0), *self.gamma.shape)}, state_dtype(x.dtype))
        before = None if state is None else state["u"]
        if before is not None and rows.size(1) == 1:
            one, after = recurrent_step(rows[:, 0], log_decay, self.gamma, before)
            context.states[STATE_NAME] = {"u": after}
            return x + one[None]
        y, final = tpe_scan(
            rows,
            log_decay,
            self.gamma,
            initial_state=before,
            output_final_state=True,
            cu_seqlens=context.cu_seqlens,
        )
        assert final is not None, "asked for with output_final_state"
        context.states[STATE_NAME] = {"u": final}
        return x + y.transpose(0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description for checkpoints: gamma is split along dim 0."""
        return make_sharded_tensors_for_checkpoint(
            {"decay_logit": self.decay_logit, "gamma": self.gamma},
            prefix,
            {"gamma": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
