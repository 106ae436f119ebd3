"""Toeplitz positional encoding: a causal convolution per channel, by a sum of decaying modes (LightNet, equation 11).

u_t[c, r] = λ_r u_{t-1}[c, r] + x_t[c];  y_t[c] = Σ_r γ[c, r] u_t[c, r];  the stream becomes x + y

Equation 11 has neither γ nor the sum with x, which are ours: y_t[c] = Σ_r u_t[c, r] is the stream with
``model.tpe.form = "printed"``.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.model import ModelConfig
from lightscale.kernels.tpe import recurrent_step, state_dtype, tpe_scan
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.shared_parts import EmbeddingPart
from lightscale.models.layers.states import incoming_state
from lightscale.models.specs.tpe import TPESpec, is_printed, tpe_modes
from lightscale.parallel.initialization import DrawWeights, normal
from lightscale.parallel.megatron import ProcessGroupCollection, TransformerConfig
from lightscale.parallel.sequence import TPEScan

LONGEST_SCALE_TOKENS = 4096
STATE_NAME = "tpe"


def initial_decay_logits(num_modes: int) -> Tensor:
    """a with λ = sigmoid(a), (e,) fp64: the time scales -1 / log λ run from 1 to 4096 tokens in equal ratios."""
    scales = torch.logspace(0, math.log10(LONGEST_SCALE_TOKENS), num_modes, dtype=torch.float64)
    return torch.logit(torch.exp(-1 / scales))


class TPE(EmbeddingPart):
    """x (n, b, d / tensor) -> x + y, once per model, after the embedding. The state is ``u``: (b, d / tensor, e).

    Channels are independent, so tensor ranks share them out and each scans the whole segment of its sequence rank. (As
    further segments of the sequence, which the tensor ranks split behind the embedding, they would need an exchange
    of states, and every rank all of ``gamma``.)
    """

    spec = TPESpec

    decay_logit: nn.Parameter
    gamma: Tensor
    """(d / tensor, e): a parameter; ones, and none, in the printed form."""

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, groups: ProcessGroupCollection, *, stage: int
    ) -> None:
        super().__init__(config, model, groups, stage=stage)
        self.is_printed = is_printed(model)
        if self.is_printed:
            shape = (model.hidden_size // groups.tp.size(), tpe_modes(model))
            weights = torch.ones(shape, dtype=config.params_dtype, device=self.decay_logit.device)
            self.register_buffer("gamma", weights, persistent=False)

    @staticmethod
    def initial_values(model: ModelConfig) -> dict[str, DrawWeights]:
        """Decays of all time scales; ``gamma`` such that y starts as small as the embedding."""
        modes = tpe_modes(model)
        draws: dict[str, DrawWeights] = {
            "decay_logit": lambda weight, generator: weight.copy_(initial_decay_logits(modes))
        }
        return draws if is_printed(model) else draws | {"gamma": normal(model.init_std / math.sqrt(modes))}

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n, b, d / tensor), this tensor rank's channels of all tokens -> the same."""
        y = self._encoding(x, context)
        # Contiguous: it is the stream, which pipeline ranks send.
        return y.contiguous() if self.is_printed else x + y

    def _encoding(self, x: Tensor, context: SequenceContext) -> Tensor:
        # log λ from the logit itself: in fp32 the logarithm of a rounded λ near 1 has lost its last digits, which
        # thousands of steps multiply. The decays stay positive and below 1 whatever the optimizer does to the logit.
        rows, log_decay = x.transpose(0, 1), F.logsigmoid(self.decay_logit)
        if context.exchange is not None:
            # No layer name: only the layers are recomputed, so that no state is kept for a second pass.
            return context.begin(TPEScan, rows, log_decay, layer=None)(self.gamma).transpose(0, 1)
        if context.states is None:
            y, _ = tpe_scan(rows, log_decay, self.gamma, cu_seqlens=context.cu_seqlens)
            return y.transpose(0, 1)
        state = incoming_state(context, STATE_NAME, {"u": (rows.size(0), *self.gamma.shape)}, state_dtype(x.dtype))
        before = None if state is None else state["u"]
        # One token: the recurrence, whose cost does not depend on how many tokens came before.
        if before is not None and rows.size(1) == 1:
            one, after = recurrent_step(rows[:, 0], log_decay, self.gamma, before)
            context.states[STATE_NAME] = {"u": after}
            return one[None]
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
        return y.transpose(0, 1)
