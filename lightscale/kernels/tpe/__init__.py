"""The scan of Toeplitz positional encoding: a causal convolution per channel, by a sum of decaying modes.

u_t[c, r] = λ_r u_{t-1}[c, r] + x_t[c] and y_t[c] = Σ_r γ[c, r] u_t[c, r] (LightNet, equation 11). ``tpe_scan`` is the
operator; sequence parallelism and generation use the passes in this package. docs/reference/operators/tpe.md has the
mathematics.
"""

import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.common.backends import (
    AUTO,
    choose_backend,
    dispatch_passes,
    dispatch_step,
    implementation,
    preload_backends,
)
from lightscale.kernels.common.checks import (
    check_at_most_one,
    check_chunk_size,
    check_device,
    check_documents,
    check_one_state,
)
from lightscale.kernels.common.states import in_state_dtype, state_dtype
from lightscale.kernels.tpe import chunked
from lightscale.kernels.tpe.chunked import DEFAULT_CHUNK_SIZE, ChunkedTPEScan
from lightscale.kernels.tpe.reference import tpe_scan_reference

__all__ = [
    "grad_bwd",
    "out_fwd",
    "recurrent_step",
    "state_bwd",
    "state_dtype",
    "state_fwd",
    "tpe_scan",
    "tpe_scan_reference",
]


state_fwd, out_fwd, state_bwd, grad_bwd = dispatch_passes(
    "tpe", chunked.state_fwd, chunked.out_fwd, chunked.state_bwd, chunked.grad_bwd
)
recurrent_step = dispatch_step("tpe", chunked.recurrent_step)


def tpe_scan(
    x: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor | None]:
    """A sum of E exponential moving sums per channel: linear in T, differentiable in every input.

    The caller adds the residual connection.

    Args:
        x: (B, T, D), fp16, bf16, fp32 or fp64, any strides.
        log_decay: log λ per mode (E,), fp32 or fp64, at most 0; ``logsigmoid(a)`` for λ = sigmoid(a).
        gamma: (D, E), of x's dtype, fp32 or fp64.
        initial_state: the state (B, D, E) that enters each row, fp32 (fp64 for fp64 inputs); zero when None. Only
            the first document of a row reads it.
        output_final_state, cu_seqlens, chunk_size, backend: as in ``gla``.

    Returns:
        y (B, T, D) in x's dtype, and None or the final state (B, D, E), fp32 (fp64 for fp64 inputs).

    Raises:
        UserError: a shape, dtype, device or backend does not fit; the message names the argument. The values of
            log_decay and cu_seqlens are checked on a CPU only: on a GPU a read would stall the stream.
    """
    _check_inputs(x, log_decay, gamma)
    _check_state(initial_state, x, gamma)
    check_documents(cu_seqlens, x, like="x")
    check_chunk_size(chunk_size)
    name = choose_backend("tpe", x, backend)
    if name == "reference":
        options = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
        y, state = in_state_dtype(tpe_scan_reference, x, log_decay, gamma, **options)
    elif name == "triton":
        y, state = implementation("tpe", name).out_fwd(x, log_decay, gamma, initial_state, cu_seqlens)
    else:
        y, state = ChunkedTPEScan.apply(x, log_decay, gamma, initial_state, cu_seqlens, chunk_size)
    return y, state if output_final_state else None


def _check_inputs(x: Tensor, log_decay: Tensor, gamma: Tensor) -> None:
    if x.dim() != 3:
        raise UserError(f"x must have 3 dimensions (B, T, D), got shape {tuple(x.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise UserError(f"x must be fp16, bf16, fp32 or fp64, got {x.dtype}")
    if log_decay.dim() != 1 or log_decay.dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"log_decay must be (E,), fp32 or fp64 whatever x's dtype, "
            f"got shape {tuple(log_decay.shape)}, {log_decay.dtype}"
        )
    expected = (x.shape[2], log_decay.shape[0])
    if gamma.shape != expected:
        raise UserError(f"gamma must be (D, E) = {expected}, got shape {tuple(gamma.shape)}")
    if gamma.dtype not in (x.dtype, torch.float32, torch.float64):
        raise UserError(f"gamma must be of x's dtype {x.dtype}, fp32 or fp64, got {gamma.dtype}")
    check_device("log_decay", log_decay, x, like="x")
    check_device("gamma", gamma, x, like="x")
    check_at_most_one(log_decay)


def _check_state(initial_state: Tensor | None, x: Tensor, gamma: Tensor) -> None:
    if initial_state is None:
        return
    check_one_state("initial_state", initial_state, x, "(B, D, E)", (x.shape[0], *gamma.shape), like="x")


preload_backends("tpe")
