"""The gradient of the entering state's z, without cancellation (docs/reference/operators/lightnet.md, "Backward").

Only a learned or differentiated initial state needs it, not training: ranks exchange (U, R). Names of shapes: B rows, T
tokens, H heads, K key width, V value width, R rows of the state: K, or 2K with angles.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles, features, phases_of
from lightscale.kernels.common.document_masks import in_first_document, masked
from lightscale.kernels.lightnet.state import LightNetState, StateCotangent, by_channel, by_row

# Tokens whose weights are computed at once; bounds the memory.
_TOKENS = 1024


@torch.no_grad()
def initial_z_gradient(
    state_fwd: Callable[..., tuple[LightNetState, Tensor]],
    state_bwd: Callable[..., StateCotangent],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    do: Tensor,
    state_in: LightNetState,
    end: tuple[Tensor, Tensor],
    cu_seqlens: Tensor | None,
) -> Tensor:
    """dz (B, H, K) of ``state_in``; 0 where it is empty.

    Args:
        state_fwd: this pass of the back-end that computes the row.
        state_bwd: this pass of the same back-end.
        q: queries (B, T, H, K).
        k: log-keys (B, T, H, K).
        v: values (B, T, H, V).
        angles: theta (H, K) and positions (B, T), or None.
        do: cotangents of the outputs (B, T, H, V).
        state_in: the state that entered the row.
        end: the cotangents of z and S of the state that left it.
        cu_seqlens: (N+1,) or None; only the row's first document reads the state.
    """
    local, through = state_fwd(k, v, angles, cu_seqlens)
    # With S = 0, R is the outputs' loss of the row's own values as z rises, without their gain from S.
    own_R = state_bwd(q, k, v, angles, do, LightNetState(state_in.z, torch.zeros_like(state_in.S)), cu_seqlens).R
    with torch.autocast(q.device.type, enabled=False):
        z, S = state_in
        width, state_rows = z.shape[2], S.shape[2]
        dz_end, dS_end = end
        kept = in_first_document(cu_seqlens, num_rows=k.shape[0], num_tokens=k.shape[1])
        reads = torch.zeros_like(S)
        written = torch.full_like(z, -torch.inf, dtype=torch.float64)
        for start in range(0, k.shape[1], _TOKENS):
            tokens = slice(start, start + _TOKENS)
            # In fp64, because a log-sum-exp over a million tokens drifts in fp32.
            keys = torch.cat([written[:, None], k[:, tokens].double()], dim=1).logcumsumexp(1)
            written = keys[:, -1]
            rise = keys[:, 1:] - z.double()[:, None]
            # The share of the state times the share of later writes: the slope of the state's share by z.
            slopes = (rise.sigmoid() * (-rise).sigmoid()).to(S.dtype)
            phases = None if angles is None else phases_of(angles.of(tokens), S.dtype)
            queries = masked(features(q[:, tokens] * slopes, phases), None if kept is None else kept[:, tokens])
            reads += torch.einsum("bthr,bthv->bhrv", queries, do[:, tokens].to(S.dtype))

        # The leaving state is the rest of the entering state plus the row's own.
        left, own = (z - local.z).sigmoid(), (local.z - z).sigmoid()
        passed = (through != 0)[:, None, None]
        reads += torch.where(passed[..., None], by_row(left * own, state_rows) * dS_end, 0.0)
        at_end = own * by_channel((local.S * dS_end).sum(-1), width) - dz_end
        lost = own_R + torch.where(passed, left * at_end, 0.0)
        return (by_channel((S * reads).sum(-1), width) - lost).masked_fill(z == -torch.inf, 0.0)
