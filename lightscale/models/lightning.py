"""Lightning attention as the mixers use it: whole rows, rows split over ranks, or with carried states."""

from torch import Tensor

from lightscale.kernels.lightning import lightning_attention, recurrent_step, state_dtype
from lightscale.models.context import Finish, SequenceContext
from lightscale.models.mixer import incoming_state
from lightscale.parallel.sequence import LightningScan


def begin_attention(
    k: Tensor, v: Tensor, log_decay: Tensor | None, *, context: SequenceContext, state_name: str
) -> Finish:
    """k: (b, n, h, k), v: (b, n, h, v), log_decay: (h,) or None; the result maps q (b, n, h, k) to (b, n, h, v).

    Over sequence ranks, states travel from here until the result is called. With states in the context, the state
    ``S`` (b, h, k, v) under ``state_name`` is read and replaced: one token by the recurrence, at a cost that does not
    depend on its position, more in chunks.
    """
    if context.exchange is not None:
        return context.begin(LightningScan, k, v, log_decay, layer=state_name)
    return lambda q: _attend(q, k, v, log_decay, context, state_name)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, context: SequenceContext, state_name: str
) -> Tensor:
    if context.states is None:
        o, _ = lightning_attention(q, k, v, log_decay, cu_seqlens=context.cu_seqlens)
        return o
    shape = (q.size(0), q.size(2), q.size(3), v.size(3))
    state = incoming_state(context, state_name, {"S": shape}, state_dtype(q.dtype))
    before = None if state is None else state["S"]
    if before is not None and q.size(1) == 1:
        o, after = recurrent_step(q[:, 0], k[:, 0], v[:, 0], log_decay, before)
        context.states[state_name] = {"S": after}
        return o[:, None]
    o, final = lightning_attention(
        q, k, v, log_decay, initial_state=before, output_final_state=True, cu_seqlens=context.cu_seqlens
    )
    assert final is not None, "asked for with output_final_state"
    context.states[state_name] = {"S": final}
    return o
