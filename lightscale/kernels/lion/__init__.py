"""LION: linear attention in both directions, with a decay per head and token (arXiv 2502.16249).

Y = scale(Q Kᵀ ⊙ M) V (equations 20 to 25). M_ij is the product of the decays between the tokens i and j, 1 on the
diagonal. scale divides each row by its sum, after the mask. LION-LIT has no decay, LION-RetNet one per head, LION-S one
per head and token. ``lion`` is the operator; sequence parallelism uses the passes in this package.
docs/reference/operators/lion.md has the mathematics.
"""

from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.common.backends import AUTO, choose_backend, dispatch_passes, implementation, preload_backends
from lightscale.kernels.common.checks import (
    check_chunk_size,
    check_documents,
    check_head_decay,
    check_inputs,
    check_one_state,
)
from lightscale.kernels.common.states import in_state_dtype, state_dtype
from lightscale.kernels.lion import chunked
from lightscale.kernels.lion.chunked import DEFAULT_CHUNK_SIZE, ChunkedLion
from lightscale.kernels.lion.reference import lion_reference
from lightscale.kernels.lion.state import GATES, Gate, LionOutputs, LionState
from lightscale.kernels.lion.vector import lion_vector

__all__ = [
    "DEFAULT_CHUNK_SIZE",
    "Gate",
    "LionOutputs",
    "LionState",
    "grad_bwd",
    "lion",
    "lion_reference",
    "lion_vector",
    "out_fwd",
    "state_bwd",
    "state_dtype",
    "state_fwd",
]

state_fwd, out_fwd, state_bwd, grad_bwd = dispatch_passes(
    "lion", chunked.state_fwd, chunked.out_fwd, chunked.state_bwd, chunked.grad_bwd
)


def lion(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    gate: Gate = "leave",
    normalize: bool = True,
    eps: float = 1e-6,
    initial_state: LionState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    backend: str = AUTO,
) -> tuple[Tensor, LionState | None]:
    """Linear attention of every token to all tokens of its document: linear in T, differentiable in every input.

    Padding is k = 0 and v = 0 with a log decay of 0: no token reads it, and no state decays by it.

    Args:
        q: queries (B, T, H, K), fp16, bf16, fp32 or fp64, any strides; the caller applies feature maps.
        k: keys (B, T, H, K), of q's dtype.
        v: values (B, T, H, V), of q's dtype; V need not equal K.
        log_decay: log of the decay per head (H,), or per head and token (B, T, H), fp32 or fp64, at most 0; None for
            no decay.
        gate: "leave": M_ij is the product of the decays a_t for j <= t < i and, the other way, for i < t <= j
            (equation 12 and the authors' code); "enter": for j < t <= i and i <= t < j (equations 8, 9 and 20).
        normalize: divide by the sum of the masked scores, Σ_j M_ij q_i · k_j + eps; False: no division.
        eps: added once to the sum. Where the result is 0, the output is 0.
        initial_state: the states that enter each row on both sides, (B, H, K, W) each, fp32 (fp64 for fp64 inputs); W
            is V + 1 with the normaliser's column, V without; zero when None. Only the row's first document reads the
            prefix, and its last one the suffix.
        output_final_state: also return the states that leave each row: the prefix for tokens behind, the suffix for
            tokens before.
        cu_seqlens: (N+1,) int32 or int64 document boundaries over the flattened B·T tokens, every row start included.
            No state passes from one document to another.
        chunk_size: tokens per chunk of the chunked form; affects its speed alone.
        backend: "triton" (GPUs; fp16, bf16, fp32), "chunked", "reference" (one token at a time, slow); or "auto": the
            value of ``set_default_backend``, else Triton on GPUs and chunks elsewhere.

    Returns:
        The outputs (B, T, H, V) in v's dtype, and None or the final state.

    Raises:
        UserError: a shape, dtype, device, gate or backend does not fit; the message names the argument. The values of
            log_decay and cu_seqlens are checked on a CPU only: on a GPU a read would stall the stream.
    """
    check_inputs(q, k, v)
    check_head_decay(log_decay, q)
    _check_state(initial_state, q, v, normalize=normalize)
    if gate not in GATES:
        raise UserError(f"gate must be one of {', '.join(GATES)}, got {gate!r}")
    if not eps >= 0:
        raise UserError(f"eps must be at least 0, got {eps}")
    check_documents(cu_seqlens, q)
    check_chunk_size(chunk_size)
    name = choose_backend("lion", q, backend)
    sides = (None, None) if initial_state is None else tuple(initial_state)
    if name == "reference":
        form = {"gate": gate, "normalize": normalize, "eps": eps}
        options = {**form, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        o, state = in_state_dtype(lion_reference, q, k, v, log_decay, **options)
    elif name == "triton":
        triton = implementation("lion", name)
        o, state = triton.triton_lion(q, k, v, log_decay, initial_state, cu_seqlens, gate, normalize, eps)
    else:
        o, *leaving = ChunkedLion.apply(q, k, v, log_decay, *sides, cu_seqlens, gate, normalize, eps, chunk_size)
        state = LionState(*leaving)
    return o, state if output_final_state else None


def _check_state(state: LionState | None, q: Tensor, v: Tensor, *, normalize: bool) -> None:
    if state is None:
        return
    shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3] + normalize)
    form = f"(B, H, K, {'V + 1' if normalize else 'V'})"
    for name, x in zip(LionState._fields, state, strict=True):
        check_one_state(f"initial_state.{name}", x, q, form, shape)


preload_backends("lion")
