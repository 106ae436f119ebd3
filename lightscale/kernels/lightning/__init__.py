"""Lightning attention: linear attention with one fixed decay per head (TNL; cosFormer2 without decay).

S_t = λ_h S_{t-1} + k_t v_tᵀ and o_t = S_tᵀ q_t (Qin et al., TransNormerLLM, arXiv 2307.14995; Lightning Attention-2,
arXiv 2401.04658). ``lightning_attention`` is the operator; sequence parallelism and generation use the passes in this
package. docs/reference/operators/lightning.md has the mathematics.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from lightscale.kernels.common.angles import (
    Angles,
    check_angles,
    feature_width,
    features,
    parts_of,
    phases_of,
    wide_angles,
)
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
    check_documents,
    check_head_decay,
    check_inputs,
    check_state,
)
from lightscale.kernels.common.states import in_state_dtype, state_dtype
from lightscale.kernels.gla.chunked import DEFAULT_CHUNK_SIZE as GLA_CHUNK_SIZE
from lightscale.kernels.gla.chunked import ChunkedGLA
from lightscale.kernels.lightning import chunked, token_decays
from lightscale.kernels.lightning.chunked import DEFAULT_CHUNK_SIZE, ChunkedLightningAttention
from lightscale.kernels.lightning.reference import lightning_attention_reference

__all__ = [
    "DEFAULT_CHUNK_SIZE",
    "Angles",
    "grad_bwd",
    "lightning_attention",
    "lightning_attention_reference",
    "out_fwd",
    "recurrent_step",
    "state_bwd",
    "state_dtype",
    "state_fwd",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _by_decay(per_head: Callable[_P, _R], per_token: Callable[_P, _R]) -> Callable[_P, _R]:
    """A pass of the chunked back-end: ``per_token`` where log_decay is (B, T, H), else ``per_head``."""
    position = list(inspect.signature(per_head).parameters).index("log_decay")

    @wraps(per_head)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        log_decay: Any = args[position] if position < len(args) else kwargs["log_decay"]
        compute = per_token if log_decay is not None and log_decay.dim() == 3 else per_head
        return compute(*args, **kwargs)

    return run


state_fwd, out_fwd, state_bwd, grad_bwd = dispatch_passes(
    "lightning",
    _by_decay(chunked.state_fwd, token_decays.state_fwd),
    _by_decay(chunked.out_fwd, token_decays.out_fwd),
    _by_decay(chunked.state_bwd, token_decays.state_bwd),
    _by_decay(chunked.grad_bwd, token_decays.grad_bwd),
)
_recurrent_step = dispatch_step("lightning", chunked.recurrent_step)


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, S: Tensor, *, angles: Angles | None = None
) -> tuple[Tensor, Tensor]:
    """``chunked.recurrent_step`` by the back-end of the inputs, with angles whose positions are (B,).

    S is (B, H, F, V); angles first spread q and k (B, H, K) to the F = 2K features of the state.
    """
    if angles is not None:
        phases = phases_of(angles, S.dtype)
        q, k = features(q, phases).to(v.dtype), features(k, phases).to(v.dtype)
    return _recurrent_step(q, k, v, log_decay, S)


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    angles: Angles | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    if log_decay is not None and log_decay.dim() == 3:
        q, k = token_decays.spread(q, angles), token_decays.spread(k, angles)
        by_channel = token_decays.by_channel(log_decay, k)
        o, state = ChunkedGLA.apply(q, k, v, by_channel, initial_state, cu_seqlens, GLA_CHUNK_SIZE)
        return o, state
    o, state = ChunkedLightningAttention.apply(
        q, k, v, log_decay, *parts_of(angles), initial_state, cu_seqlens, chunk_size
    )
    return o, state


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    angles: Angles | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor | None]:
    """Causal linear attention with a decay per head: linear in T, differentiable in every input.

    Args:
        q: queries (B, T, H, K), fp16, bf16, fp32 or fp64, any strides.
        k: keys (B, T, H, K), of q's dtype.
        v: values (B, T, H, V), of q's dtype; V need not equal K.
        log_decay: log λ per head (H,), or per head and token (B, T, H), fp32 or fp64, at most 0; None for no decay. On
            CPUs the chunked form of ``gla`` computes decays per token, as decays that the channels of a head share.
        angles: theta (H, K) and positions (B, T) of LRPE. q and k become [q cos, q sin] and [k cos, k sin] as they are
            read; in memory only in the chunked form with decays per token. The states then have 2K rows. None: no
            angles.
        initial_state: the state (B, H, K, V) that enters each row, fp32 (fp64 for fp64 inputs); zero when
            None. Only the first document of a row reads it.
        output_final_state, cu_seqlens, chunk_size, backend: as in ``gla``.

    Returns:
        The outputs (B, T, H, V) in v's dtype, and None or the final state (B, H, K, V), fp32 (fp64 for fp64
        inputs).

    Raises:
        UserError: a shape, dtype, device or backend does not fit; the message names the argument. The values of
            log_decay and cu_seqlens are checked on a CPU only: on a GPU a read would stall the stream.
    """
    check_inputs(q, k, v)
    check_head_decay(log_decay, q)
    check_angles(angles, q)
    check_state(initial_state, q, v, feature_width(q, angles))
    check_documents(cu_seqlens, q)
    check_chunk_size(chunk_size)
    name = choose_backend("lightning", q, backend)
    if name == "reference":
        options = {"angles": wide_angles(angles, q), "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        o, state = in_state_dtype(lightning_attention_reference, q, k, v, log_decay, **options)
    elif name == "triton":
        o, state = implementation("lightning", name).out_fwd(
            q, k, v, log_decay, initial_state, cu_seqlens, angles=angles
        )
    else:
        o, state = _chunked(q, k, v, log_decay, angles, initial_state, cu_seqlens, chunk_size)
    return o, state if output_final_state else None


preload_backends("lightning")
