"""The passes of ``chunked.py`` for a decay per head and token (B, T, H): those of ``../gla``, whose channels share it.

There are no angles beside such decays.
"""

from torch import Tensor

from lightscale.kernels.common.angles import Angles
from lightscale.kernels.common.states import Arriving
from lightscale.kernels.gla import chunked
from lightscale.kernels.lightning.chunked import Gradients


def by_channel(log_decay: Tensor, x: Tensor) -> Tensor:
    """Log decays (B, T, H) as those of the channels of x (B, T, H, K); a view."""
    return log_decay[..., None].expand(x.shape)


def state_fwd(
    k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None = None, *, angles: Angles | None = None
) -> tuple[Tensor, Tensor]:
    """S_loc (B, H, K, V) and D (B, H), see ``chunked.state_fwd``."""
    assert angles is None
    local, through = chunked.state_fwd(k, v, by_channel(log_decay, k), cu_seqlens)
    # All channels of a head have the same decay.
    return local, through[..., 0].contiguous()


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
    assert angles is None
    return chunked.out_fwd(q, k, v, by_channel(log_decay, k), S_in, cu_seqlens)


def state_bwd(
    q: Tensor, do: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None = None, *, angles: Angles | None = None
) -> Tensor:
    """The cotangent U of the incoming state, see ``chunked.state_bwd``."""
    assert angles is None
    return chunked.state_bwd(q, do, by_channel(log_decay, q), cu_seqlens)


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
    """The gradients of a row's inputs, see ``chunked.grad_bwd``; that of the decays is (B, T, H)."""
    assert angles is None and not with_theta
    dq, dk, dv, of_channels = chunked.grad_bwd(q, k, v, by_channel(log_decay, k), do, S_in, dS_end, cu_seqlens)
    return Gradients(dq, dk, dv, of_channels.sum(-1) if with_decay else None, None)
