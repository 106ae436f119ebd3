"""LightNet's operator: linear attention with additive decay, a running softmax average over the past.

z_t = logaddexp(z_{t-1}, k_t), k̄_t = exp(k_t - z_t), S_t = diag(1 - k̄_t) S_{t-1} + φ(k̄_t) v_tᵀ, o_t = S_tᵀ φ(q_t)
(LightNet, equation 7; φ is LRPE or the identity). ``lightnet_attention`` is the operator, ``lightnet_noncausal`` its
form over whole documents. Sequence parallelism and generation use the passes in this package.
docs/reference/operators/lightnet.md has the mathematics.
"""

from torch import Tensor

from lightscale.kernels.common.angles import Angles, check_angles, parts_of, wide_angles
from lightscale.kernels.common.backends import (
    AUTO,
    choose_backend,
    dispatch_passes,
    dispatch_step,
    implementation,
    preload_backends,
)
from lightscale.kernels.common.checks import check_chunk_size, check_documents, check_inputs, check_one_state
from lightscale.kernels.common.documents import check_cu_seqlens
from lightscale.kernels.common.states import in_state_dtype, state_dtype
from lightscale.kernels.lightnet import chunked, noncausal
from lightscale.kernels.lightnet.chunked import DEFAULT_CHUNK_SIZE, ChunkedLightNetAttention
from lightscale.kernels.lightnet.noncausal import NoncausalLightNet
from lightscale.kernels.lightnet.reference import lightnet_attention_reference, lightnet_noncausal_reference
from lightscale.kernels.lightnet.state import (
    LightNetState,
    StateCotangent,
    empty_state,
    exchanged_cotangent,
    merge,
    passed_share,
    plain_cotangent,
)

__all__ = [
    "Angles",
    "LightNetState",
    "StateCotangent",
    "empty_state",
    "exchanged_cotangent",
    "grad_bwd",
    "lightnet_attention",
    "lightnet_attention_reference",
    "lightnet_noncausal",
    "merge",
    "noncausal",
    "out_fwd",
    "passed_share",
    "plain_cotangent",
    "recurrent_step",
    "state_bwd",
    "state_dtype",
    "state_fwd",
]


state_fwd, out_fwd, state_bwd, grad_bwd = dispatch_passes(
    "lightnet", chunked.state_fwd, chunked.out_fwd, chunked.state_bwd, chunked.grad_bwd
)
recurrent_step = dispatch_step("lightnet", chunked.recurrent_step)


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    initial_state: LightNetState | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, LightNetState]:
    z, S = initial_state or (None, None)
    o, z, S = ChunkedLightNetAttention.apply(q, k, v, *parts_of(angles), z, S, cu_seqlens, chunk_size)
    return o, LightNetState(z, S)


def lightnet_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    angles: Angles | None = None,
    initial_state: LightNetState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    backend: str = AUTO,
) -> tuple[Tensor, LightNetState | None]:
    """Causal linear attention with additive decay: linear in T, differentiable in q, k, v, theta and the state.

    Args:
        q: queries (B, T, H, K), fp16, bf16, fp32 or fp64, any strides.
        k: log-keys (B, T, H, K), of q's dtype, of any size: the operator computes no exponential above 1. A key of
            -inf writes 0, as padding needs.
        v: values (B, T, H, V), of q's dtype; V need not equal K.
        angles: theta (H, K) and positions (B, T) of LRPE. Queries and normalised keys become [x cos, x sin] as they are
            read, never in memory. The state then has 2K rows; theta may require a gradient. None: no angles.
        initial_state: z (B, H, K) and S (B, H, R, V) that enter each row, R = K or 2K, fp32 (fp64 for fp64
            inputs); empty when None. Only the first document of a row reads it.
        output_final_state, cu_seqlens, chunk_size, backend: as in ``gla``.

    Returns:
        The outputs (B, T, H, V) in v's dtype, and None or the final state, fp32 (fp64 for fp64 inputs).

    Raises:
        UserError: a shape, dtype, device or backend does not fit; the message names the argument. The values of
            cu_seqlens are checked on a CPU only: on a GPU a read would stall the stream.
    """
    check_inputs(q, k, v)
    check_angles(angles, q)
    _check_state(initial_state, q, v, halves=1 if angles is None else 2)
    check_documents(cu_seqlens, q)
    check_chunk_size(chunk_size)
    name = choose_backend("lightnet", q, backend)
    if name == "reference":
        options = {"angles": wide_angles(angles, q), "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        o, state = in_state_dtype(lightnet_attention_reference, q, k, v, **options)
    elif name == "triton":
        o, state = implementation("lightnet", name).out_fwd(q, k, v, angles, initial_state, cu_seqlens)
    else:
        o, state = _chunked(q, k, v, angles, initial_state, cu_seqlens, chunk_size)
    return o, state if output_final_state else None


def lightnet_noncausal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    angles: Angles | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = AUTO,
) -> Tensor:
    """Additive decay over whole documents: every token reads S = Σ_i φ(softmax_i(k)_i) v_iᵀ, the result of one scan.

    (LightNet, equation 8.) Arguments, result and errors are those of ``lightnet_attention``; without cu_seqlens a row
    is one document. With cu_seqlens on the host, the call does not wait for a GPU.
    """
    check_inputs(q, k, v)
    check_angles(angles, q)
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        check_cu_seqlens(cu_seqlens, num_rows=q.shape[0], num_tokens=q.shape[1])
    else:
        check_documents(cu_seqlens, q)
    name = choose_backend("lightnet_noncausal", q, backend)
    if name == "reference":
        wide = (x.to(state_dtype(q.dtype)) for x in (q, k, v))
        return lightnet_noncausal_reference(*wide, angles=wide_angles(angles, q), cu_seqlens=cu_seqlens).to(v.dtype)
    bounds = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
    o: Tensor = NoncausalLightNet.apply(q, k, v, *parts_of(angles), bounds, name)
    return o


def _check_state(state: LightNetState | None, q: Tensor, v: Tensor, *, halves: int) -> None:
    if state is None:
        return
    num_rows, _, num_heads, key_width = q.shape
    z, S = state
    check_one_state("initial_state's z", z, q, "(B, H, K)", (num_rows, num_heads, key_width))
    form = f"(B, H, {'K' if halves == 1 else '2K'}, V)"
    check_one_state("initial_state's S", S, q, form, (num_rows, num_heads, halves * key_width, v.shape[3]))


preload_backends("lightnet")
preload_backends("lightnet_noncausal")
