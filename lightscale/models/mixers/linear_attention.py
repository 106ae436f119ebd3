"""Linear attention with a decay per head, per head and token, or none, by lightning attention; per channel, by ``gla``.

Three ways to the same numbers: whole rows, segments of rows on several ranks, and rows that continue a state. With
``both_ways`` outputs are the sum of a scan from the left and one from the right: then there is no state to continue.
"""

from dataclasses import replace

from torch import Tensor

from lightscale.kernels import gla
from lightscale.kernels.common.angles import axes_of, by_axis, feature_width, for_axes, over_axes, parts_of
from lightscale.kernels.common.backends import default_backend
from lightscale.kernels.lightning import Angles, lightning_attention, recurrent_step, state_dtype
from lightscale.models.layers.context import Finish, SequenceContext
from lightscale.models.layers.states import going_on
from lightscale.parallel.sequence import GatedScan, LightningScan, added, doubled, doubled_bounds


def begin_attention(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    context: SequenceContext,
    state_name: str,
    angles: Angles | None = None,
    both_ways: bool = False,
) -> Finish:
    """k: (b, n, h, k), v: (b, n, h, v), log_decay: (h,), (b, n, h) or None; the result maps q to (b, n, h, v).

    ``angles`` are those of LRPE on k and q; the state has 2k rows then, and with several axes heads for each axis. Over
    sequence ranks, states travel from here until the result is called. With states in the context, the state ``S``
    (b, h, k, v) under ``state_name`` is read and replaced: one token by the recurrence, at a cost that does not depend
    on its position, more in chunks.
    """
    axes = axes_of(angles)
    if log_decay is not None:
        log_decay = for_axes(log_decay, axes, dim=-1)
    k, v = by_axis(k, axes), for_axes(v, axes)
    if both_ways and _is_by_reference(context):
        turns = None if angles is None else Angles(angles.theta, doubled(angles.positions))
        decays = log_decay if log_decay is None or log_decay.dim() == 1 else doubled(log_decay)
        rows, image = _image(context), (doubled(k), doubled(v), decays, turns)
        return along_axes(axes, lambda q: added(_attend(doubled(q), *image, rows, state_name)))
    if both_ways:
        written = k, v, log_decay, *parts_of(angles)
        return along_axes(axes, context.begin_both_ways(LightningScan, *written, layer=state_name))
    if context.exchange is not None:
        return along_axes(axes, context.begin(LightningScan, k, v, log_decay, *parts_of(angles), layer=state_name))
    return along_axes(axes, lambda q: _attend(q, k, v, log_decay, angles, context, state_name))


def along_axes(axes: int, finish: Finish) -> Finish:
    """``finish`` of heads made by ``by_axis`` for whole heads: scores are sums over channels, so outputs are sums."""
    return lambda q: over_axes(finish(by_axis(q, axes)), axes)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    angles: Angles | None,
    context: SequenceContext,
    state_name: str,
) -> Tensor:
    if context.states is None:
        o, _ = lightning_attention(q, k, v, log_decay, angles=angles, cu_seqlens=context.cu_seqlens)
        return o

    def step(before: Tensor) -> tuple[Tensor, Tensor]:
        here = None if angles is None else Angles(angles.theta, angles.positions[:, 0])
        decay = log_decay[:, 0] if log_decay is not None and log_decay.dim() == 3 else log_decay
        return recurrent_step(q[:, 0], k[:, 0], v[:, 0], decay, before, angles=here)

    def chunks(before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return lightning_attention(
            q,
            k,
            v,
            log_decay,
            angles=angles,
            initial_state=before,
            output_final_state=True,
            cu_seqlens=context.cu_seqlens,
        )

    shape = (q.size(0), q.size(2), feature_width(q, angles), v.size(3))
    return going_on(context, state_name, shape, state_dtype(q.dtype), num_tokens=q.size(1), step=step, chunks=chunks)


def begin_gated(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    context: SequenceContext,
    state_name: str,
    both_ways: bool = False,
) -> Finish:
    """``begin_attention`` with a decay for each channel of the keys: log_decay (b, n, h, k), fp32 or wider."""
    if both_ways and _is_by_reference(context):
        rows, image = _image(context), (doubled(k), doubled(v), doubled(log_decay))
        return lambda q: added(_attend_gated(doubled(q), *image, rows, state_name))
    if both_ways:
        return context.begin_both_ways(GatedScan, k, v, log_decay, layer=state_name)
    if context.exchange is not None:
        return context.begin(GatedScan, k, v, log_decay, layer=state_name)
    return lambda q: _attend_gated(q, k, v, log_decay, context, state_name)


def _attend_gated(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, context: SequenceContext, state_name: str
) -> Tensor:
    if context.states is None:
        o, _ = gla.gla(q, k, v, log_decay, cu_seqlens=context.cu_seqlens)
        return o
    shape = (q.size(0), q.size(2), q.size(3), v.size(3))
    return going_on(
        context,
        state_name,
        shape,
        state_dtype(q.dtype),
        num_tokens=q.size(1),
        step=lambda before: gla.recurrent_step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], before),
        chunks=lambda before: gla.gla(
            q, k, v, log_decay, initial_state=before, output_final_state=True, cu_seqlens=context.cu_seqlens
        ),
    )


def _is_by_reference(context: SequenceContext) -> bool:
    """Whether the operator is computed by its reference, which has no passes."""
    return context.exchange is None and default_backend() == "reference"


def _image(context: SequenceContext) -> SequenceContext:
    """The context of ``doubled`` rows, for operators that ask it for nothing but the bounds of documents."""
    return replace(context, cu_seqlens=doubled_bounds(context.cu_seqlens))
