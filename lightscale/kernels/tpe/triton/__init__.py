"""The scan of Toeplitz positional encoding in Triton: the passes of ``chunked.py``.

There are three kinds of launches. A sweep without output computes states, so that the splits of a row run side by side.
A second sweep reads these states. One more sweep computes the gradients of the parameters. Only the inputs are saved,
and the workspace does not grow with the number of tokens.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lightscale.kernels.common.documents import document_numbers
from lightscale.kernels.common.states import Arriving, arrived, without_state
from lightscale.kernels.common.triton.launch import dense_last, dot_precision, on_device_of, power_of_two
from lightscale.kernels.tpe.chunk_batches import powers
from lightscale.kernels.tpe.chunked import TPEGradients
from lightscale.kernels.tpe.triton.cases import COMPILE_CASES
from lightscale.kernels.tpe.triton.kernels import parameter_sums, recurrent, sweep
from lightscale.kernels.tpe.triton.tiling import CHANNELS, PARAMETER_MODES, STEP

__all__ = ["COMPILE_CASES", "grad_bwd", "out_fwd", "recurrent_step", "row_gradients", "state_bwd", "state_fwd"]

# Least tokens of a split, and most splits of all rows together. With tiles of 16 channels every multiprocessor has
# programs, and a state per split stays small beside the activations.
_LEAST_SPLIT_TOKENS = 512
_MOST_SPLITS = 16


class _Scan(NamedTuple):
    """The splits of rows, their tables, and the constants of every launch."""

    B: int
    T: int
    D: int
    E: int
    split_tokens: int
    num_splits: int
    powers: Tensor  # (STEP + 1, E)
    through: Tensor  # (E,): λ^split_tokens
    documents: Tensor | None  # (B, T)
    constants: dict[str, Any]

    def grid(self, num_splits: int, mode_tiles: int = 1) -> tuple[int, int, int]:
        # Rows first: only that dimension of a grid has more than 65,535.
        return self.B, triton.cdiv(self.D, CHANNELS) * mode_tiles, num_splits

    def new_states(self, like: Tensor) -> Tensor:
        """Uninitialised memory for a state per split, (B, S, E, D)."""
        return like.new_empty(self.B, self.num_splits, self.E, self.D, dtype=torch.float32)


def _scan(x: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None) -> _Scan:
    """The splits of x (B, T, D), T > 0."""
    B, T, D = x.shape
    E = log_decay.shape[0]
    most = max(1, _MOST_SPLITS // B)
    tokens = max(_LEAST_SPLIT_TOKENS, triton.cdiv(T, most))
    split_tokens = triton.cdiv(tokens, STEP) * STEP
    steps = torch.arange(STEP + 1, device=x.device)
    documents = None
    if cu_seqlens is not None:
        documents = document_numbers(cu_seqlens, num_rows=B, num_tokens=T).int()
    constants = {
        "E": E,
        "BLOCK_E": triton.next_power_of_2(max(16, E)),
        "BLOCK_D": CHANNELS,
        "STEP": STEP,
        "PRECISION": dot_precision(x.dtype),
        "num_warps": 4,
    }
    return _Scan(
        B=B,
        T=T,
        D=D,
        E=E,
        split_tokens=split_tokens,
        num_splits=triton.cdiv(T, split_tokens),
        powers=powers(log_decay, steps, torch.float32),
        through=powers(log_decay, torch.full_like(steps[0], split_tokens), torch.float32),
        documents=documents,
        constants=constants,
    )


def _kernel(log_decay: Tensor, gamma: Tensor) -> Tensor:
    """Σ_r γ λ^τ, (STEP, D), in fp64 and rounded once; it is small."""
    steps = torch.arange(STEP, device=gamma.device)
    return (powers(log_decay, steps, torch.float64) @ gamma.detach().double().mT).float()


class _Swept(NamedTuple):
    """Results of a sweep over whole rows."""

    y: Tensor  # (B, T, D); empty unless requested
    last: Tensor  # (B, D, E) fp32: the state behind the last token, in the order of the sweep


def _sweep(
    x: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    entering: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    reverse: bool,
    with_output: bool = True,
) -> _Swept:
    """Outputs and last state of rows of x (B, T, D), T > 0; in reverse x is a cotangent."""
    x, gamma = dense_last(x), gamma.contiguous()
    scan = _scan(x, log_decay, cu_seqlens)
    kappa = _kernel(log_decay, gamma) if with_output else None
    entering = None if entering is None else entering.contiguous()
    y = x.new_empty(x.shape) if with_output else x.new_empty(0, 0, 0)
    last = x.new_empty(scan.B, scan.D, scan.E, dtype=torch.float32)
    before = _split_states(scan, x, gamma, reverse=reverse)[0] if scan.num_splits > 1 else None
    # Without outputs only the last split remains.
    first = 0 if with_output else scan.num_splits - 1
    sweep[scan.grid(scan.num_splits - first)](
        x,
        y if with_output else None,
        scan.documents,
        scan.powers,
        kappa,
        gamma,
        entering,
        before,
        scan.through,
        None,
        None,
        last,
        scan.T,
        scan.D,
        scan.split_tokens,
        scan.num_splits,
        first,
        *x.stride()[:2],
        *y.stride()[:2],
        REVERSE=reverse,
        **scan.constants,
    )
    return _Swept(y, last)


def _split_states(
    scan: _Scan, x: Tensor, gamma: Tensor, *, reverse: bool, with_slopes: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Each split's share in the state, (B, S, E, D), and on request its derivative by log λ."""
    states = scan.new_states(x)
    slopes = scan.new_states(x) if with_slopes else None
    sweep[scan.grid(scan.num_splits)](
        x,
        None,
        scan.documents,
        scan.powers,
        None,
        gamma,
        None,
        None,
        scan.through,
        states,
        slopes,
        None,
        scan.T,
        scan.D,
        scan.split_tokens,
        scan.num_splits,
        0,
        *x.stride()[:2],
        0,
        0,
        REVERSE=reverse,
        **scan.constants,
    )
    return states, slopes


def _parameter_gradients(
    x: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    dy: Tensor,
    u_in: Tensor | None,
    du_end: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """dlog_decay (E,) and dgamma (D, E) in fp32, T > 0."""
    x, dy, gamma = dense_last(x), dense_last(dy), gamma.contiguous()
    scan = _scan(x, log_decay, cu_seqlens)
    # A single split has no earlier splits: the kernel is compiled without the sum over them.
    before = slopes = None
    if scan.num_splits > 1:
        before, slopes = _split_states(scan, x, gamma, reverse=False, with_slopes=True)
    dgamma, dlog_decay = scan.new_states(x), scan.new_states(x)
    mode_tile = power_of_two(scan.E, most=PARAMETER_MODES)
    parameter_sums[scan.grid(scan.num_splits, triton.cdiv(scan.E, mode_tile))](
        x,
        dy,
        scan.documents,
        scan.powers,
        gamma,
        None if u_in is None else u_in.contiguous(),
        None if du_end is None else du_end.contiguous(),
        before,
        slopes,
        scan.through,
        dgamma,
        dlog_decay,
        scan.T,
        scan.D,
        scan.split_tokens,
        scan.num_splits,
        *x.stride()[:2],
        *dy.stride()[:2],
        **scan.constants | {"BLOCK_E": mode_tile},
    )
    return dlog_decay.sum((0, 1, 3)), dgamma.sum((0, 1)).mT.contiguous()


def _state_like(u: Tensor | None, x: Tensor, log_decay: Tensor) -> Tensor:
    """A copy of a state, or zeros (B, D, E): the state behind rows without tokens."""
    shape = x.shape[0], x.shape[2], log_decay.shape[0]
    return x.new_zeros(shape, dtype=torch.float32) if u is None else u.clone()


@torch.library.custom_op("lightscale::tpe_out_fwd", mutates_args=())
def _out_fwd(
    x: Tensor, log_decay: Tensor, gamma: Tensor, u_in: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return x.new_empty(x.shape), _state_like(u_in, x, log_decay)
    with on_device_of(x):
        y, last = _sweep(x, log_decay, gamma, u_in, cu_seqlens, reverse=False)
    return y, last


@_out_fwd.register_fake
def _(x: Tensor, log_decay: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape = x.shape[0], x.shape[2], log_decay.shape[0]
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("lightscale::tpe_last_state", mutates_args=())
def _last_state(x: Tensor, log_decay: Tensor, gamma: Tensor, cu_seqlens: Tensor | None, reverse: bool) -> Tensor:
    if not x.numel():
        return _state_like(None, x, log_decay)
    with on_device_of(x):
        return _sweep(x, log_decay, gamma, None, cu_seqlens, reverse=reverse, with_output=False).last


@_last_state.register_fake
def _(x: Tensor, log_decay: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], log_decay.shape[0], dtype=torch.float32)


@torch.library.custom_op("lightscale::tpe_gradients", mutates_args=())
def _gradients(
    x: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    dy: Tensor,
    u_in: Tensor | None,
    du_end: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not x.numel():
        zeros = (x.new_zeros(p.shape, dtype=torch.float32) for p in (log_decay, gamma))
        return x.new_empty(x.shape), *zeros, _state_like(du_end, x, log_decay)  # type: ignore[return-value]
    with on_device_of(x):
        dx, du = _sweep(dy, log_decay, gamma, du_end, cu_seqlens, reverse=True)
        dlog_decay, dgamma = _parameter_gradients(x, log_decay, gamma, dy, u_in, du_end, cu_seqlens)
    return dx, dlog_decay, dgamma, du


@_gradients.register_fake
def _(x: Tensor, log_decay: Tensor, gamma: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    state = x.new_empty(x.shape[0], *gamma.shape, dtype=torch.float32)
    return x.new_empty(x.shape), log_decay.float(), gamma.float(), state


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of ``_out_fwd``'s arguments; the cotangent of an unused result is None."""
    x, log_decay, gamma, u_in, cu_seqlens = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    dx, dlog_decay, dgamma, du = _gradients(x, log_decay, gamma, dy, u_in, dstate, cu_seqlens)
    du_in = du if ctx.needs_input_grad[3] else None
    return dx, dlog_decay.to(log_decay.dtype), dgamma.to(gamma.dtype), du_in, None


_out_fwd.register_autograd(_backward, setup_context=_save_inputs)


def state_fwd(x: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """u_loc and D, see ``chunked.state_fwd``."""
    num_rows, num_tokens, width = x.shape
    # A forward sweep sums x alone; gamma is part of outputs only.
    local = _last_state(x, log_decay, x.new_empty(width, log_decay.shape[0]), cu_seqlens, False)
    through = powers(log_decay, torch.full((num_rows,), num_tokens, device=x.device), torch.float32)
    if cu_seqlens is None or not num_tokens:
        return local, through
    last = document_numbers(cu_seqlens, num_rows=num_rows, num_tokens=num_tokens)[:, -1:]
    return local, through.masked_fill(last > 0, 0.0)


def out_fwd(
    x: Tensor, log_decay: Tensor, gamma: Tensor, u_in: Tensor | None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The outputs and the state that leaves, see ``chunked.out_fwd``; only the inputs are saved for its gradient."""
    y, state = _out_fwd(x, log_decay, gamma, u_in, cu_seqlens)
    return y, state


def state_bwd(dy: Tensor, log_decay: Tensor, gamma: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The cotangent U of the incoming state, see ``chunked.state_bwd``."""
    own: Tensor = _last_state(dy, log_decay, gamma, cu_seqlens, True)
    return own


def row_gradients(
    x: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    dy: Tensor,
    u_in: Tensor | None,
    du_end: Arriving[Tensor | None],
    cu_seqlens: Tensor | None = None,
) -> tuple[TPEGradients, Tensor]:
    """Every gradient of a row, see ``chunked.row_gradients``."""
    *gradients, du = _gradients(x, log_decay, gamma, dy, u_in, arrived(du_end), cu_seqlens)
    return TPEGradients(*gradients), du


grad_bwd = without_state(row_gradients)


def recurrent_step(x: Tensor, log_decay: Tensor, gamma: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """One token, see ``chunked.recurrent_step``, in one launch; it has no gradient."""
    B, D = x.shape
    E = log_decay.shape[0]
    y, after = x.new_empty(B, D), torch.empty_like(u, memory_format=torch.contiguous_format)
    if y.numel():
        with on_device_of(x):
            recurrent[(B, triton.cdiv(D, CHANNELS))](
                x.contiguous(),
                y,
                log_decay.float(),
                gamma.contiguous(),
                u.contiguous(),
                after,
                D,
                E,
                BLOCK_E=triton.next_power_of_2(E),
                BLOCK_D=CHANNELS,
                num_warps=4,
            )
    return y, after
