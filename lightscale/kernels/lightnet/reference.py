"""The oracles of tests: LightNet's operator one token at a time, and over whole documents as full matrices."""

from itertools import pairwise

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles
from lightscale.kernels.common.references import beginnings, cleared
from lightscale.kernels.lightnet.state import LightNetState


def lightnet_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    angles: Angles | None = None,
    initial_state: LightNetState | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LightNetState]:
    """The recurrence written out: S_t = diag(1 - k̄_t) S_{t-1} + φ(k̄_t) v_tᵀ and o_t = S_tᵀ φ(q_t).

    k̄_t = exp(k_t - z_t) with z_t = logaddexp(z_{t-1}, k_t) (LightNet, equation 7). All arithmetic has the dtype of the
    inputs: fp64 inputs give an fp64 oracle. Autograd differentiates it. The chunked form shares no code with it.

    Args:
        q: queries (B, T, H, K).
        k: log-keys (B, T, H, K); -inf writes 0.
        v: values (B, T, H, V).
        angles: theta (H, K) and positions (B, T) of φ(x) = [x cos pθ, x sin pθ]; None for φ(x) = x.
        initial_state: z (B, H, K) and S (B, H, R, V), empty when None. Only the first document of each row
            reads it.
        cu_seqlens: (N+1,) document boundaries over the flattened B·T tokens, every row start included.

    Returns:
        The outputs (B, T, H, V) and each row's last state.
    """
    num_rows, num_tokens, num_heads, key_width = q.shape
    state_rows = key_width if angles is None else 2 * key_width
    z, S = initial_state or (
        k.new_full((num_rows, num_heads, key_width), -torch.inf),
        v.new_zeros(num_rows, num_heads, state_rows, v.shape[3]),
    )
    cos = sin = None
    if angles is not None:
        angle = (angles.positions[..., None, None] * angles.theta).flatten(2, -2)
        cos, sin = angle.cos(), angle.sin()

    outputs = []
    # unbind, because the backward of x[:, t] writes a whole zero tensor for every token.
    columns = [[None] * num_tokens if x is None else x.unbind(1) for x in (q, k, v, cos, sin)]
    for begins, q_t, k_t, v_t, cos_t, sin_t in zip(beginnings(cu_seqlens, q), *columns, strict=True):
        assert q_t is not None and k_t is not None and v_t is not None
        z, S = cleared(z, begins, -torch.inf), cleared(S, begins)
        # Plain logaddexp has no gradient where both are -inf.
        larger = torch.maximum(z, k_t).detach()
        finite = larger > -torch.inf
        larger = torch.where(finite, larger, 0.0)
        past, new = torch.exp(z - larger), torch.exp(k_t - larger)
        total = torch.where(finite, past + new, 1.0)
        z = torch.where(finite, larger + torch.log(total), -torch.inf)
        keep, write = past / total, new / total  # 1 - k̄ without cancellation, and k̄
        if cos_t is not None and sin_t is not None:
            q_t = torch.cat([q_t * cos_t, q_t * sin_t], dim=-1)
            write = torch.cat([write * cos_t, write * sin_t], dim=-1)
            keep = torch.cat([keep, keep], dim=-1)
        S = keep.unsqueeze(-1) * S + write.unsqueeze(-1) * v_t.unsqueeze(-2)
        outputs.append((q_t.unsqueeze(-2) @ S).squeeze(-2))
    return torch.stack(outputs, dim=1) if outputs else v.clone(), LightNetState(z, S)


def lightnet_noncausal_reference(
    q: Tensor, k: Tensor, v: Tensor, *, angles: Angles | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """o_t = Σ_s Σ_c q_tc p_sc cos((t - s) θ_c) v_s with p the softmax of k over the document (LightNet, equation 8).

    All arithmetic has the dtype of the inputs. Autograd differentiates it; memory grows with the square of the length.
    """
    outputs = []
    num_tokens = q.shape[1]
    edges = range(0, q.shape[0] * num_tokens + 1, num_tokens) if cu_seqlens is None else cu_seqlens.tolist()
    for start, end in pairwise(edges):
        q_d, k_d, v_d = (x.flatten(0, 1)[start:end] for x in (q, k, v))
        # A channel without writes has weight 0.
        weights = torch.nan_to_num(torch.softmax(k_d, dim=0))
        if angles is None:
            scores = torch.einsum("thc,shc->hts", q_d, weights)
        else:
            positions = angles.positions.flatten(0, 1)[start:end]
            cosines = torch.cos((positions[:, None] - positions)[..., None, None] * angles.theta).flatten(2, -2)
            scores = torch.einsum("thc,shc,tshc->hts", q_d, weights, cosines)
        outputs.append(torch.einsum("hts,shv->thv", scores, v_d))
    return torch.cat(outputs).view(v.shape)
