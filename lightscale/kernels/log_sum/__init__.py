"""The log of running sums of exponentials, z_t = log Σ_{s ≤ t} e^{b_s}: CausalRN's and BiRN's operator in linear time.

Σ_s e^{a_t + b_s} = e^{a_t + z_t} (CausalRN, "Linear-Time Sequence Modeling with MLPs", equation 9), so that a state is
one number per channel. ``log_sum`` is causal, ``log_sum_whole`` reads whole documents. Sequence parallelism and
generation use the passes in this package. docs/reference/operators/log-sum.md has the mathematics.
"""

from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.common.backends import AUTO, choose_backend, dispatch_passes, implementation, preload_backends
from lightscale.kernels.common.checks import check_chunk_size, check_documents, check_one_state
from lightscale.kernels.common.documents import check_cu_seqlens
from lightscale.kernels.common.states import state_dtype
from lightscale.kernels.log_sum import chunked, whole
from lightscale.kernels.log_sum.chunked import DEFAULT_CHUNK_SIZE, ChunkedLogSum
from lightscale.kernels.log_sum.reference import log_sum_reference
from lightscale.kernels.log_sum.whole import DocumentLogSum

__all__ = [
    "grad_bwd",
    "log_sum",
    "log_sum_reference",
    "log_sum_whole",
    "out_fwd",
    "recurrent_step",
    "state_bwd",
    "state_dtype",
    "state_fwd",
    "whole",
]

state_fwd, out_fwd, state_bwd, grad_bwd = dispatch_passes(
    "log_sum", chunked.state_fwd, chunked.out_fwd, chunked.state_bwd, chunked.grad_bwd
)
recurrent_step = chunked.recurrent_step


def log_sum(
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    backend: str = AUTO,
) -> Tensor:
    """z_t = log Σ_{s ≤ t} e^{b_s} per channel: linear in T, differentiable in b and the state.

    Args:
        b: (B, T, D), fp16, bf16, fp32 or fp64, any size and strides; -inf adds nothing.
        initial_state: (B, D), the log-sum that enters each row, fp32 (fp64 for fp64 inputs); log 0 when None. Only the
            first document of a row reads it.
        cu_seqlens: (N+1,) int32 or int64 document boundaries over the flattened B·T tokens, every row start included.
            No state passes from one document to the next.
        chunk_size: most tokens per chunk; affects the speed alone.
        backend: "auto", "triton", "chunked", "reference" (all pairs, slow).

    Returns:
        z (B, T, D), fp32 (fp64 for fp64 inputs): half precision would round e^z by up to 12 %. The z of a row's last
        token is the state behind the row.

    Raises:
        UserError: a shape, dtype, device or backend does not fit; the message names the argument.
    """
    _check(b)
    if initial_state is not None:
        check_one_state("initial_state", initial_state, b, "(B, D)", (b.shape[0], b.shape[2]), like="b")
    check_documents(cu_seqlens, b, like="b")
    check_chunk_size(chunk_size)
    chosen = choose_backend("log_sum", b, backend)
    if chosen == "triton":
        found: Tensor = implementation("log_sum", chosen).triton_log_sum(b, initial_state, cu_seqlens)
        return found
    if chosen == "reference":
        wide = b.to(state_dtype(b.dtype))
        return log_sum_reference(wide, initial_state=initial_state, cu_seqlens=cu_seqlens)[0]
    z: Tensor = ChunkedLogSum.apply(b, initial_state, cu_seqlens, chunk_size)
    return z


def log_sum_whole(b: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """log Σ_s e^{b_s} over the whole document of each token, (B, T, D).

    Arguments, result and errors are those of ``log_sum``; without cu_seqlens a row is one document. With cu_seqlens on
    the host, the call does not wait for a GPU.
    """
    _check(b)
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        check_cu_seqlens(cu_seqlens, num_rows=b.shape[0], num_tokens=b.shape[1])
    else:
        check_documents(cu_seqlens, b, like="b")
    z: Tensor = DocumentLogSum.apply(b, None if cu_seqlens is None else tuple(cu_seqlens.tolist()))
    return z


def _check(b: Tensor) -> None:
    if b.dim() != 3 or not b.is_floating_point():
        raise UserError(f"b must be (B, T, D) of floating point numbers, got shape {tuple(b.shape)} of {b.dtype}")


preload_backends("log_sum")
