"""Toeplitz positional encoding: a causal convolution per channel, by a sum of decaying modes (LightNet, equation 11).

u_t[c, r] = λ_r u_{t-1}[c, r] + x_t[c];  y_t[c] = Σ_r γ[c, r] u_t[c, r];  the stream becomes x + y
"""

import math

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from lightscale.config import ModelConfig
from lightscale.kernels.tpe import recurrent_step, state_dtype, tpe_scan
from lightscale.models.context import SequenceContext
from lightscale.models.mixer import Shapes, incoming_state
from lightscale.parallel.initialization import normal, set_initializer
from lightscale.parallel.sequence import TPEScan, sequence_parallel

LONGEST_SCALE_TOKENS = 4096
_CHUNK_TOKENS = 64
STATE_NAME = "tpe"


def initial_decay_logits(num_modes: int) -> Tensor:
    """a with λ = sigmoid(a), (e,) fp64: the time scales -1 / log λ run from 1 to 4096 tokens in equal ratios."""
    scales = torch.logspace(0, math.log10(LONGEST_SCALE_TOKENS), num_modes, dtype=torch.float64)
    return torch.logit(torch.exp(-1 / scales))


class TPE(MegatronModule):
    """x (n, b, d) -> x + y (n, b, d), once per model, after the embedding. The state is ``u``: (b, d, e).

    Every tensor rank holds it whole and scans the whole sequence, before the activations are split over the tensor
    ranks: their shards would be further segments of the same scan, and an exchange more than the scan is worth.
    """

    def __init__(self, config: TransformerConfig, model: ModelConfig) -> None:
        super().__init__(config)
        modes, device = model.head_width, torch.cuda.current_device()
        # In fp32 also in half-precision models: a decay near 1 is applied thousands of times.
        wide = torch.promote_types(config.params_dtype, torch.float32)
        self.decay_logit = nn.Parameter(torch.empty(modes, dtype=wide, device=device))
        self.gamma = nn.Parameter(torch.empty(model.width, modes, dtype=config.params_dtype, device=device))
        initial = initial_decay_logits(modes)
        set_initializer(self.decay_logit, lambda weight, generator: weight.copy_(initial))
        set_initializer(self.gamma, normal(model.init_std / math.sqrt(modes)))

    @staticmethod
    def parameter_shapes(model: ModelConfig) -> Shapes:
        """By their names in the module."""
        return {"decay_logit": (model.head_width,), "gamma": (model.width, model.head_width)}

    @staticmethod
    def forward_flops_per_token(model: ModelConfig) -> float:
        """A short Toeplitz product, and the state read and written, per channel."""
        return model.width * (2 * _CHUNK_TOKENS + 4 * model.head_width)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n, b, d), whole sequences -> (n, b, d)."""
        rows, log_decay = x.transpose(0, 1), F.logsigmoid(self.decay_logit)
        if context.exchange is not None:
            scan = TPEScan(continues=context.continues, cu_seqlens=context.cu_seqlens)
            return x + sequence_parallel(scan, context.exchange, rows, log_decay, self.gamma).transpose(0, 1)
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
