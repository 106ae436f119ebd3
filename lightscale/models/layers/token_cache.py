"""States that are the tokens themselves: caches that grow, by copies or within room that was made for them.

Without room every row goes up to its last token, and one whose document is shorter begins with what is hidden. With
room each row's document stands from the first column on, and ``length``, (b,) int64 on the host, is no less than its
tokens; the tensors are changed in place then.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightscale.models.layers.context import MixerState, SequenceContext
from lightscale.models.layers.states import check_state


class CachedTokens(NamedTuple):
    """All tokens of rows, those of this pass the last of them."""

    tensors: MixerState
    """(b, tokens, ...)."""
    in_room: bool

    def ranges(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of this pass's ``positions`` (b, n), on any device: the first token that each sees, and the last + 1."""
        if self.in_room:
            # What a shorter document has not reached yet is 0 there, and hidden.
            return torch.zeros_like(positions), positions + 1
        num_tokens = next(iter(self.tensors.values())).size(1)
        own = torch.arange(num_tokens - positions.size(1), num_tokens, device=positions.device)
        return own - positions, (own + 1).expand_as(positions)


def take_in(context: SequenceContext, name: str, new: MixerState) -> CachedTokens:
    """Put this pass's tokens behind those of the state ``name``, and give all of them.

    Args:
        context: holds the states.
        name: of the layer's state among them.
        new: (b, n, ...) each, of this pass.

    Raises:
        UserError: a state of other tensors.
    """
    assert context.states is not None
    cache = context.states.get(name)
    own = {} if cache is None else {key: tensor for key, tensor in cache.items() if key != "length"}
    if cache is not None:
        some = next(iter(new.values()))
        num_cached = next((tensor.size(1) for key, tensor in own.items() if key in new), 0)
        shapes = {key: (tensor.size(0), num_cached, *tensor.shape[2:]) for key, tensor in new.items()}
        check_state(name, own, shapes, some.dtype)
    if cache is not None and "length" in cache:
        return _in_room(context, name, {**cache}, new)
    # Copied where it is a view: that would keep all that was projected with it.
    found = {key: torch.cat([own[key], x], dim=1) if own else x.contiguous() for key, x in new.items()}
    context.states[name] = found
    return CachedTokens(found, False)


def _in_room(context: SequenceContext, name: str, cache: MixerState, new: MixerState) -> CachedTokens:
    """As ``take_in``, for rows that are at positions of their own."""
    assert context.states is not None
    b, n = context.positions.shape
    lengths = cache["length"] + n
    longest = int(lengths.max())
    rows = torch.arange(b, device=context.positions.device)[:, None]
    for key, x in new.items():
        room = cache[key].size(1)
        if longest > room:
            # Doubled, so that each token is copied a few times at most, however long the documents become.
            cache[key] = F.pad(cache[key], [*[0, 0] * (x.dim() - 2), 0, max(longest, 2 * room) - room])
        cache[key][rows, context.positions] = x
    context.states[name] = {**cache, "length": lengths}
    return CachedTokens({key: cache[key][:, :longest] for key in new}, True)


def with_room(state: MixerState, lengths: Sequence[int], tokens: int) -> MixerState:
    """See ``Mixer.with_room``; every row gets room for the longest document and ``tokens``."""
    room = max(lengths) + tokens
    found = {}
    for key, tensor in state.items():
        # Of a state with room there is as much as there are tokens: documents end together.
        if key == "length":
            continue
        found[key] = tensor.new_zeros(len(lengths), room, *tensor.shape[2:])
        for row, length in enumerate(lengths):
            found[key][row, :length] = tensor[row, tensor.size(1) - length :]
    return {**found, "length": torch.tensor(lengths)}
