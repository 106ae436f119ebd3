"""Gated linear attention: linear attention with a data-dependent decay per key channel (HGRN2).

S_t = diag(f_t) S_{t-1} + k_t v_tᵀ and o_t = S_tᵀ q_t (Yang et al., Gated Linear Attention, arXiv 2312.06635, Eq. 3; Qin
et al., HGRN2, arXiv 2404.07904, where k = 1 - f). ``gla`` is the operator; sequence parallelism and generation use the
passes in this package. docs/reference/operators/gla.md has the mathematics.
"""

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
from lightscale.kernels.common.checks import check_chunk_size, check_decay, check_documents, check_inputs, check_state
from lightscale.kernels.common.states import in_state_dtype, state_dtype
from lightscale.kernels.gla import chunked
from lightscale.kernels.gla.chunked import DEFAULT_CHUNK_SIZE, ChunkedGLA
from lightscale.kernels.gla.reference import gla_reference

__all__ = ["gla", "gla_reference", "grad_bwd", "out_fwd", "recurrent_step", "state_bwd", "state_dtype", "state_fwd"]


state_fwd, out_fwd, state_bwd, grad_bwd = dispatch_passes(
    "gla", chunked.state_fwd, chunked.out_fwd, chunked.state_bwd, chunked.grad_bwd
)
recurrent_step = dispatch_step("gla", chunked.recurrent_step)


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor | None]:
    """Causal linear attention with a decay per token and key channel: linear in T, differentiable in every input.

    Args:
        q: queries (B, T, H, K), fp16, bf16, fp32 or fp64, any strides.
        k: keys (B, T, H, K), of q's dtype.
        v: values (B, T, H, V), of q's dtype; V need not equal K.
        log_decay: log f (B, T, H, K), fp32 or fp64 for any dtype of q, at most 0; -inf forgets the channel. The
            strength of the decays affects the speed alone: all values give finite and accurate results.
        initial_state: the state (B, H, K, V) that enters each row, fp32 (fp64 for fp64 inputs); zero when
            None. Only the first document of a row reads it.
        output_final_state: also return the state after each row's last token.
        cu_seqlens: (N+1,) int32 or int64 document boundaries over the flattened B·T tokens, every row start
            included. No state passes from one document to the next.
        chunk_size: tokens per chunk of the chunked form; affects its speed alone.
        backend: "triton" (GPUs; fp16, bf16, fp32), "chunked", "reference" (one token at a time, slow); or "auto": the
            value of ``set_default_backend``, else Triton on GPUs and chunks elsewhere.

    Returns:
        The outputs (B, T, H, V) in v's dtype, and None or the final state (B, H, K, V), fp32 (fp64 for fp64
        inputs).

    Raises:
        UserError: a shape, dtype, device or backend does not fit; the message names the argument. The values of
            log_decay and cu_seqlens are checked on a CPU only: on a GPU a read would stall the stream.
    """
    check_inputs(q, k, v)
    _check_decay(log_decay, q)
    check_state(initial_state, q, v)
    check_documents(cu_seqlens, q)
    check_chunk_size(chunk_size)
    name = choose_backend("gla", q, backend)
    if name == "reference":
        options = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
        o, state = in_state_dtype(gla_reference, q, k, v, log_decay, **options)
    elif name == "triton":
        o, state = implementation("gla", name).out_fwd(q, k, v, log_decay, initial_state, cu_seqlens)
    else:
        o, state = ChunkedGLA.apply(q, k, v, log_decay, initial_state, cu_seqlens, chunk_size)
    return o, state if output_final_state else None


def _check_decay(log_decay: Tensor, q: Tensor) -> None:
    if log_decay.shape != q.shape:
        raise UserError(
            f"log_decay must be (B, T, H, K) = {tuple(q.shape)}, like q, got shape {tuple(log_decay.shape)}"
        )
    check_decay(log_decay, q)


preload_backends("gla")
