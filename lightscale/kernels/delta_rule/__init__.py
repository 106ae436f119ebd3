"""The gated delta rule: each write corrects the state at its key (DeltaNet, gated DeltaNet, KDA).

S_t = (I - β_t k_t k_tᵀ) diag(α_t) S_{t-1} + β_t k_t v_tᵀ and o_t = S_tᵀ q_t (Yang et al., Parallelizing Linear
Transformers with the Delta Rule, arXiv 2406.06484, Eq. 4; Yang, Kautz and Hatamizadeh, Gated Delta Networks, arXiv
2412.06464, Eq. 10; Kimi Team, Kimi Linear, arXiv 2510.26692, Eq. 1). ``delta_rule`` is the operator; sequence
parallelism and generation use the passes in this package. docs/reference/operators/delta-rule.md has the mathematics.
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
    check_chunk_size,
    check_decay,
    check_device,
    check_documents,
    check_one_state,
)
from lightscale.kernels.common.states import in_state_dtype, state_dtype
from lightscale.kernels.delta_rule import chunked
from lightscale.kernels.delta_rule.chunked import DEFAULT_CHUNK_SIZE, ChunkedDeltaRule
from lightscale.kernels.delta_rule.reference import delta_rule_reference

__all__ = [
    "delta_rule",
    "delta_rule_reference",
    "grad_bwd",
    "out_fwd",
    "recurrent_step",
    "state_bwd",
    "state_dtype",
    "state_fwd",
]


state_fwd, out_fwd, state_bwd, grad_bwd = dispatch_passes(
    "delta_rule", chunked.state_fwd, chunked.out_fwd, chunked.state_bwd, chunked.grad_bwd
)
recurrent_step = dispatch_step("delta_rule", chunked.recurrent_step)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule: linear in T, differentiable in every input.

    The operator neither normalises nor scales: layers pass queries and keys of unit length, queries times K^-1/2.

    Args:
        q: queries (B, T, H, K), fp16, bf16, fp32 or fp64, any strides.
        k: keys (B, T, H, K), of q's dtype, of length 1, or up to sqrt(2 / β): with longer keys the state grows.
        v: values (B, T, N, V), of q's dtype; N is a multiple of H, and head n reads queries and keys n // (N / H).
        log_decay: log α (B, T, N), of each head (gated DeltaNet), or (B, T, N, K), of each channel (KDA), fp32 or fp64
            for any dtype of q, at most 0; -inf forgets. None: no decay (DeltaNet).
        beta: (B, T, N), fp32 or q's dtype, 0 to 1, or to 2 where a state may change its sign.
        initial_state: the state (B, N, K, V) that enters each row, fp32 (fp64 for fp64 inputs); zero when
            None. Only the first document of a row reads it.
        output_final_state: also return the state after each row's last token.
        cu_seqlens: (M+1,) int32 or int64 document boundaries over the flattened B·T tokens, every row start
            included. No state passes from one document to the next.
        chunk_size: tokens per chunk of the chunked form; affects its speed alone.
        backend: "triton" (GPUs; fp16, bf16, fp32), "chunked", "reference" (one token at a time, slow); or "auto": the
            value of ``set_default_backend``, else Triton on GPUs for keys of up to 256 channels, and chunks elsewhere.

    Returns:
        The outputs (B, T, N, V) in v's dtype, and None or the final state (B, N, K, V), fp32 (fp64 for fp64
        inputs).

    Raises:
        UserError: a shape, dtype, device or backend does not fit; the message names the argument. The values of
            log_decay and cu_seqlens are checked on a CPU only: on a GPU a read would stall the stream.
    """
    _check_inputs(q, k, v, log_decay, beta)
    shape = (v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    if initial_state is not None:
        check_one_state("initial_state", initial_state, q, "(B, N, K, V)", shape)
    check_documents(cu_seqlens, q)
    check_chunk_size(chunk_size)
    name = choose_backend("delta_rule", q, backend)
    if name == "reference":
        options = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
        o, state = in_state_dtype(delta_rule_reference, q, k, v, log_decay, beta, **options)
    elif name == "triton":
        whole = implementation("delta_rule", name).out_fwd
        o, state = whole(q, k, v, log_decay, beta, initial_state, cu_seqlens)
    else:
        o, state = ChunkedDeltaRule.apply(q, k, v, log_decay, beta, initial_state, cu_seqlens, chunk_size)
    return o, state if output_final_state else None


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise UserError(f"{name} must have 4 dimensions (B, T, heads, width), got shape {tuple(x.shape)}")
        check_device(name, x, q)
    if q.shape != k.shape:
        raise UserError(f"q and k must have the same shape (B, T, H, K), got {tuple(q.shape)} and {tuple(k.shape)}")
    if v.shape[:2] != q.shape[:2] or v.shape[2] == 0 or v.shape[2] % q.shape[2]:
        raise UserError(
            f"v must be (B, T, N, V) = ({q.shape[0]}, {q.shape[1]}, a multiple of {q.shape[2]}, V), "
            f"got {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise UserError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise UserError(f"q, k and v must be fp16, bf16, fp32 or fp64, got {q.dtype}")
    if log_decay is not None:
        by_channel = (*v.shape[:3], q.shape[3])
        if log_decay.shape not in (v.shape[:3], by_channel):
            raise UserError(
                f"log_decay must be (B, T, N) = {tuple(v.shape[:3])} or (B, T, N, K) = {by_channel}, "
                f"got shape {tuple(log_decay.shape)}"
            )
        check_decay(log_decay, q)
    if beta.shape != v.shape[:3]:
        raise UserError(f"beta must be (B, T, N) = {tuple(v.shape[:3])}, got shape {tuple(beta.shape)}")
    check_device("beta", beta, q)


preload_backends("delta_rule")
