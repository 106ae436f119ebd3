"""The states that layers keep from one call to the next, and checks of states from a caller."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.errors import UserError
from lightscale.models.layers.context import MixerState, SequenceContext
from lightscale.models.specs.interface import Shapes


def incoming_state(
    context: SequenceContext, name: str, shapes: Shapes, dtype: torch.dtype, *, empty: Mapping[str, float] | None = None
) -> MixerState | None:
    """The state under ``name`` as it enters the rows; None when there is none.

    Args:
        context: holds the states.
        name: of the layer's state among them.
        shapes, dtype: expected ones of the state.
        empty: the value of each tensor where a row begins a document here; 0 unless named.

    Raises:
        UserError: see ``check_state``.
    """
    state = None if context.states is None else context.states.get(name)
    if state is None:
        return None
    check_state(name, state, shapes, dtype)
    empty = empty or {}
    # Replaced where a document begins, not scaled by zero: whatever the row's last document left must have no effect.
    return {
        key: torch.where(context.continues.view(-1, *[1] * (tensor.dim() - 1)), tensor, empty.get(key, 0.0))
        for key, tensor in state.items()
    }


def going_on(
    context: SequenceContext,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    num_tokens: int,
    step: Callable[[Tensor], tuple[Tensor, Tensor]],
    chunks: Callable[[Tensor | None], tuple[Tensor, Tensor | None]],
) -> Tensor:
    """Outputs (b, n, h, v) of rows that go on from the state ``S`` under ``name``, which is replaced.

    Args:
        context: holds the states.
        name: of the layer's state among them.
        shape, dtype: expected ones of ``S``.
        num_tokens: n.
        step: of the state, for one token: (b, h, v) and the next state. By the recurrence, at a cost that does not
            depend on the token's position.
        chunks: of the state (None: no state), for several tokens: outputs and the next state. For a prompt or its next
            part, at the cost of training's forward pass.
    """
    assert context.states is not None, "rows are whole here"
    state = incoming_state(context, name, {"S": shape}, dtype)
    before = None if state is None else state["S"]
    after: Tensor | None
    if before is not None and num_tokens == 1:
        o, after = step(before)
        o = o[:, None]
    else:
        o, after = chunks(before)
    assert after is not None, "asked for with output_final_state"
    context.states[name] = {"S": after}
    return o


def check_state(name: str, state: MixerState, shapes: Shapes, dtype: torch.dtype) -> None:
    """Raise UserError unless ``state`` has the tensors of ``shapes`` in ``dtype``; the message names both."""
    if state.keys() != shapes.keys():
        raise UserError(f"the state of {name} must hold {', '.join(shapes)}, got {', '.join(state) or 'nothing'}")
    for key, shape in shapes.items():
        found = state[key]
        if found.shape != shape or found.dtype != dtype:
            raise UserError(
                f"the state of {name}: {key} must be {shape} in {dtype}, got {tuple(found.shape)} in {found.dtype}"
            )


def joined(states: Sequence[MixerState]) -> MixerState:
    """The rows of ``states`` of one layer as those of one state; caches with less room get that of the largest."""

    def cat(tensors: Sequence[Tensor]) -> Tensor:
        room = max((tensor.size(1) for tensor in tensors if tensor.dim() > 1), default=0)
        # Dims are padded from the last one on; behind a row's tokens, which begin in the first column.
        return torch.cat(
            [
                tensor if tensor.dim() < 2 else F.pad(tensor, [0, 0] * (tensor.dim() - 2) + [0, room - tensor.size(1)])
                for tensor in tensors
            ]
        )

    return states[0] if len(states) == 1 else {key: cat([state[key] for state in states]) for key in states[0]}


def chosen(state: MixerState, rows: Sequence[int]) -> MixerState:
    """A copy of these ``rows`` of ``state``."""
    return {key: tensor[rows] for key, tensor in state.items()}
