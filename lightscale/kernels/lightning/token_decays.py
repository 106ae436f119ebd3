"""The passes of ``chunked.py`` for a decay per head and token (B, T, H), by ``../gla`` with one decay for all channels.

With angles queries and keys are spread in memory, fp32 or wider, before ``../gla`` reads them.
"""

import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles, Phases, features, features_bwd, phases_of
from lightscale.kernels.common.states import Arriving, state_dtype
from lightscale.kernels.gla import chunked
from lightscale.kernels.lightning.chunked import Gradients


def by_channel(log_decay: Tensor, x: Tensor) -> Tensor:
    """Log decays (B, T, H) expanded to the channels of x (B, T, H, K); a view."""
    return log_decay[..., None].expand(x.shape)


def spread(x: Tensor, angles: Angles | None) -> Tensor:
    """The features (B, T, H, 2K) of x (B, T, H, K), fp32 or wider; x itself without angles."""
    return x if angles is None else features(x.to(state_dtype(x.dtype)), _phases(x, angles))


def _phases(x: Tensor, angles: Angles) -> Phases:
    return phases_of(angles, state_dtype(x.dtype))


@torch.no_grad()
def state_fwd(
    k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None = None, *, angles: Angles | None = None
) -> tuple[Tensor, Tensor]:
    """S_loc (B, H, F, V) and D (B, H), see ``chunked.state_fwd``."""
    k = spread(k, angles)
    local, through = chunked.state_fwd(k, v, by_channel(log_decay, k), cu_seqlens)
    # All channels of a head have the same decay.
    return local, through[..., 0].contiguous()


@torch.no_grad()
def out_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    S_in: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs and the state that leaves, see ``chunked.out_fwd``."""
    q, k = spread(q, angles), spread(k, angles)
    return chunked.out_fwd(q, k, v, by_channel(log_decay, k), S_in, cu_seqlens)


@torch.no_grad()
def state_bwd(
    q: Tensor, do: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None = None, *, angles: Angles | None = None
) -> Tensor:
    """The cotangent U of the incoming state, see ``chunked.state_bwd``."""
    q = spread(q, angles)
    return chunked.state_bwd(q, do, by_channel(log_decay, q), cu_seqlens)


@torch.no_grad()
def grad_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    do: Tensor,
    S_in: Tensor | None,
    dS_end: Arriving[Tensor | None],
    cu_seqlens: Tensor | None = None,
    *,
    angles: Angles | None = None,
    with_decay: bool = False,
    with_theta: bool = False,
) -> Gradients:
    """The gradients of a row's inputs, see ``chunked.grad_bwd``; the decays' gradient is (B, T, H)."""
    wide_q, wide_k = spread(q, angles), spread(k, angles)
    of_decays = by_channel(log_decay, wide_k)
    dq, dk, dv, of_channels = chunked.grad_bwd(wide_q, wide_k, v, of_decays, do, S_in, dS_end, cu_seqlens)
    dtheta = None
    if angles is not None:
        phases = _phases(q, angles)
        (dq, of_q), (dk, of_k) = (features_bwd(x.to(dx.dtype), dx, angles, phases) for x, dx in ((q, dq), (k, dk)))
        dq, dk = dq.to(q.dtype), dk.to(k.dtype)
        dtheta = of_q + of_k if with_theta else None
    return Gradients(dq, dk, dv, of_channels.sum(-1) if with_decay else None, dtheta)
