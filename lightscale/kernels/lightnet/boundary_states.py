"""What the cotangent of the state that leaves a row adds to its gradients.

Sequence parallelism computes a row's own gradients while the cotangents travel, and adds this when they have arrived.
(Outputs cannot be begun so: the queries are scaled channel by channel by what entered.) Names of shapes: B rows,
T tokens, H heads, K key width, V value width, R rows of the state: K, or 2K with angles.
"""

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles, phases_of
from lightscale.kernels.common.document_masks import in_last_document, masked
from lightscale.kernels.lightnet.chunked import rotate, rotate_back
from lightscale.kernels.lightnet.state import StateCotangent


@torch.no_grad()
def write_bwd(
    k: Tensor,
    v: Tensor,
    angles: Angles | None,
    z_end: Tensor,
    cotangent: StateCotangent,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What ``grad_bwd`` with the cotangent gives beyond ``grad_bwd`` without it: dk and dv.

    Args:
        k: log-keys (B, T, H, K).
        v: values (B, T, H, V).
        angles: those of the keys, or None.
        z_end: (B, H, K), z of the state that leaves the row, what entered included.
        cotangent: (U, R) of that state in the form that is passed on; only the row's last document writes to it.
        cu_seqlens: (N+1,) or None.
    """
    with torch.autocast(k.device.type, enabled=False):
        dtype = cotangent.U.dtype
        phases = None if angles is None else phases_of(angles, dtype)
        kept = in_last_document(cu_seqlens, num_rows=k.shape[0], num_tokens=k.shape[1])
        # Where nothing was ever written z_end is -inf; no token of the last document is then kept or counts.
        reference = z_end.masked_fill(z_end == -torch.inf, 0.0)[:, None]
        shares = masked((k.to(dtype) - reference).exp(), kept)
        dkeys = rotate_back(torch.einsum("bthv,bhrv->bthr", v.to(dtype), cotangent.U), phases)
        dv = torch.einsum("bthr,bhrv->bthv", rotate(shares, phases), cotangent.U)
        return (shares * (dkeys - cotangent.R[:, None])).to(k.dtype), dv.to(v.dtype)
