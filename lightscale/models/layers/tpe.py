"""Toeplitz positional encoding: a causal convolution per channel, by a sum of decaying modes (LightNet, equation 11).

u_t[c, r] = λ_r u_{t-1}[c, r] + x_t[c];  y_t[c] = Σ_r γ[c, r] u_t[c, r];  the stream becomes x + y

Equation 11 has neither γ nor the sum with x, which are ours: y_t[c] = Σ_r u_t[c, r] is the stream with
``model.tpe.form = "printed"``.

In documents that are grids, y is the sum over the axes (MD-TPE): along each axis a line of tokens is a sequence of its
own, with decays and weights γ of the axis; the printed form has the same decays for all. Lines are views of the stream:
of stride s, every s-th token. Each axis costs one scan, linear in the tokens. A sequence rank sends the states of s
lines, and needs whole multiples of s tokens.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.arithmetic import near_multiple
from lightscale.config.model import GridConfig, ModelConfig
from lightscale.errors import UserError
from lightscale.kernels.attention import read_starts, to_device
from lightscale.kernels.tpe import recurrent_step, state_dtype, tpe_scan
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.grid import as_chains, chain_positions
from lightscale.models.layers.shared_parts import EmbeddingPart
from lightscale.models.layers.states import incoming_state
from lightscale.models.specs.interface import Shapes
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

    With several axes the state is ``u0``, ``u1``, …: (b, s, d / tensor, e), of the s lines along the axis that the next
    s tokens go on.

    Channels are independent, so tensor ranks share them out and each scans the whole segment of its sequence rank. (As
    further segments of the sequence, which the tensor ranks split behind the embedding, they would need an exchange
    of states, and every rank all of ``gamma``.)
    """

    spec = TPESpec

    decay_logit: nn.Parameter
    gamma: Tensor
    """(d / tensor, e), with several axes (d / tensor, axes, e): a parameter; ones, and none, in the printed form."""

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, groups: ProcessGroupCollection, *, stage: int
    ) -> None:
        super().__init__(config, model, groups, stage=stage)
        self.is_printed, self.modes = is_printed(model), tpe_modes(model)
        if self.is_printed:
            shape = (model.hidden_size // groups.tp.size(), self.modes)
            weights = torch.ones(shape, dtype=config.params_dtype, device=self.decay_logit.device)
            self.register_buffer("gamma", weights, persistent=False)

    @staticmethod
    def initial_values(model: ModelConfig) -> dict[str, DrawWeights]:
        """Decays of all time scales; ``gamma`` such that y starts as small as the embedding."""
        modes = tpe_modes(model)
        draws: dict[str, DrawWeights] = {
            "decay_logit": lambda weight, generator: weight.copy_(initial_decay_logits(modes))
        }
        return draws if is_printed(model) else draws | {"gamma": normal(model.init_std / math.sqrt(modes * model.axes))}

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n, b, d / tensor), this tensor rank's channels of all tokens -> the same."""
        y = self._encoding(x, context)
        # Contiguous: it is the stream, which pipeline ranks send.
        return y.contiguous() if self.is_printed else x + y

    def _encoding(self, x: Tensor, context: SequenceContext) -> Tensor:
        # log λ from the logit itself: in fp32 the logarithm of a rounded λ near 1 has lost its last digits, which
        # thousands of steps multiply. The decays stay positive and below 1 whatever the optimizer does to the logit.
        log_decay = F.logsigmoid(self.decay_logit)
        if context.grid is not None and context.grid.axes > 1:
            return self._along_axes(x, log_decay, context, context.grid)
        rows = x.transpose(0, 1)
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

    def _along_axes(self, x: Tensor, log_decay: Tensor, context: SequenceContext, grid: GridConfig) -> Tensor:
        """The sum of the encodings along the axes, each with exchanges and states of its own."""
        log_decays = log_decay.view(-1, self.modes).expand(grid.axes, -1).unbind(0)
        gammas = self.gamma.view(x.size(2), -1, self.modes).expand(-1, grid.axes, -1).unbind(1)
        if context.exchange is not None:
            _check_segments(x.size(0), context.lengths, grid)
            begun = [_begin_lines(x, context, grid, *axis) for axis in enumerate(log_decays)]
            ys = [finish(gamma) for finish, gamma in zip(begun, gammas, strict=True)]
            return _sum(y.transpose(0, 1).reshape(x.shape) for y in ys)
        (_, b, channels), dtype = x.shape, state_dtype(x.dtype)
        shapes: Shapes = {f"u{axis}": (b, s, channels, self.modes) for axis, s in enumerate(grid.strides)}
        states = incoming_state(context, STATE_NAME, shapes, dtype)
        if states is None:
            states = {name: x.new_zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        found = [
            _scan_lines(x, context, grid, axis, log_decays[axis], gammas[axis], states[f"u{axis}"])
            for axis in range(grid.axes)
        ]
        if context.states is not None:
            context.states[STATE_NAME] = {f"u{axis}": after for axis, (_, after) in enumerate(found)}
        return _sum(y for y, _ in found)


def _begin_lines(
    x: Tensor, context: SequenceContext, grid: GridConfig, axis: int, log_decay: Tensor
) -> Callable[..., Tensor]:
    """Start passing the states of the lines along ``axis``; the result maps γ to y (s b, n / s, d)."""
    rows = as_chains(x, grid.strides[axis]).transpose(0, 1)
    return _lines(context, grid, axis, x.size(0)).begin(TPEScan, rows, log_decay, layer=None)


def _scan_lines(
    x: Tensor, context: SequenceContext, grid: GridConfig, axis: int, log_decay: Tensor, gamma: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """y (n, b, d) along ``axis``, and the states u (b, s, d, e) of the lines that the next s tokens go on."""
    (n, b, channels), stride, ys = x.shape, grid.strides[axis], []
    whole, lines = n // stride * stride, u.transpose(0, 1).flatten(0, 1)
    if whole:
        within = _lines(context, grid, axis, whole)
        y, after = tpe_scan(
            as_chains(x[:whole], stride).transpose(0, 1),
            log_decay,
            gamma,
            initial_state=torch.where(within.continues[:, None, None], lines, 0.0),
            output_final_state=True,
            cu_seqlens=within.cu_seqlens,
        )
        assert after is not None, "asked for with output_final_state"
        lines = after
        ys.append(y.transpose(0, 1).reshape(whole, b, channels))
    if whole < n:
        # One more token for the first lines: the recurrence.
        first, others = lines.split([(n - whole) * b, (stride - n + whole) * b])
        goes_on = chain_positions(context.positions.T[whole:], grid, axis).flatten() != 0
        before = torch.where(goes_on[:, None, None], first, 0.0)
        y, after = recurrent_step(x[whole:].flatten(0, 1), log_decay, gamma, before)
        lines = torch.cat([others, after])
        ys.append(y.view(n - whole, b, channels))
    return torch.cat(ys) if ys else x, lines.unflatten(0, (stride, b)).transpose(0, 1).contiguous()


def _sum(ys: Iterable[Tensor]) -> Tensor:
    """In the order of the axes."""
    first, *others = ys
    for y in others:
        first = first + y
    return first


def _lines(context: SequenceContext, grid: GridConfig, axis: int, tokens: int) -> SequenceContext:
    """The lines along ``axis`` of the first ``tokens`` as rows (s b, tokens / s): documents and lines begin anew."""
    # On the host, which then need not wait for a GPU to learn where lines begin.
    positions = chain_positions(context.positions_on_host.T[:tokens], grid, axis)
    rows = as_chains(positions, grid.strides[axis]).T.contiguous()
    lengths = None if context.lengths is None else [n // grid.strides[axis] for n in context.lengths]
    starts = read_starts(rows) if rows.size(1) else None
    return SequenceContext.of(
        to_device(rows, context.positions.device), starts=starts, exchange=context.exchange, lengths=lengths
    )


def _check_segments(n: int, lengths: Sequence[int] | None, grid: GridConfig) -> None:
    """Refuse segments of sequence ranks after which lines are in another order; every stride divides the first."""
    stride = grid.strides[0]
    for length in (n,) if lengths is None else lengths:
        if length % stride:
            raise UserError(
                f"a sequence rank has {length} tokens, but TPE along axis 0 of model.grid.shape = {grid.shape} needs "
                f"multiples of {stride}; use {near_multiple(length, stride)} tokens per sequence rank, "
                "parallel.sequence = 1, or a mixer without TPE"
            )
