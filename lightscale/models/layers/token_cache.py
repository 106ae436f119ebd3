"""States that are the tokens themselves: caches that grow, by copies or within room that was made for them.

Without room every row goes up to its last token, and one whose document is shorter begins with what is hidden. With
room each row's document stands from the first column on, and ``length``, (b,) int64 on the host, is no less than its
tokens; the tensors are changed in place then.

Within a window of W tokens only the last W - 1 are kept: without room the last columns, with room a ring, in which the
token at position p stands in column p modulo W - 1.
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
    window: int | None = None
    """Most tokens that one sees, itself the last of them; None: all."""

    def ranges(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of this pass's ``positions`` (b, n), on any device: the first token that each sees, and the last + 1."""
        if self.in_room:
            # What a shorter document has not reached yet is 0 there, and hidden.
            return torch.zeros_like(positions), positions + 1
        num_tokens = next(iter(self.tensors.values())).size(1)
        own = torch.arange(num_tokens - positions.size(1), num_tokens, device=positions.device)
        first, end = own - positions, (own + 1).expand_as(positions)
        # Of a document whose beginning was dropped the rest is there.
        return (first if self.window is None else torch.maximum(first, end - self.window)).clamp(min=0), end

    def seen(self, positions: Tensor) -> Tensor:
        """(b, n, tokens) bool: whether the token of this pass sees the other."""
        number = torch.arange(next(iter(self.tensors.values())).size(1), device=positions.device)
        first, end = self.ranges(positions)
        return (number >= first[..., None]) & (number < end[..., None])


class RingTokens(NamedTuple):
    """Tokens of a ring, then those of this pass."""

    tensors: MixerState
    """(b, W - 1 + n, ...)."""
    places: Tensor
    """(b, W - 1 + n) int64: position of each in its document; negative: nothing stands there."""
    window: int

    def seen(self, positions: Tensor) -> Tensor:
        """As ``CachedTokens.seen``."""
        distance = positions[..., None] - self.places[:, None]
        return (distance >= 0) & (distance < self.window) & (self.places >= 0)[:, None]


def kept_tokens(window: int) -> int:
    """Tokens of a state within a window; one at least, so that the state tells what it is of."""
    return max(1, window - 1)


def take_in_window(context: SequenceContext, name: str, new: MixerState, window: int) -> CachedTokens | RingTokens:
    """As ``take_in``, for mixers whose tokens see the last ``window`` ones: only what they see is kept."""
    assert context.states is not None
    cache = context.states.get(name)
    if cache is None or "length" not in cache:
        found = take_in(context, name, new).tensors
        # Copied: a part would keep the whole.
        keep = kept_tokens(window)
        context.states[name] = {key: x[:, -keep:].clone() if x.size(1) > keep else x for key, x in found.items()}
        return CachedTokens(found, False, window)
    _check(cache, name, new)
    positions = context.positions
    size = cache[next(iter(new))].size(1)
    before = positions[:, :1] - 1
    places = before - (before - torch.arange(size, device=positions.device)) % size
    found = {key: torch.cat([cache[key], x], dim=1) for key, x in new.items()}
    rows, columns = torch.arange(len(positions), device=positions.device)[:, None], positions[:, -size:] % size
    for key, x in new.items():
        cache[key][rows, columns] = x[:, -size:]
    context.states[name] = {**cache, "length": cache["length"] + positions.size(1)}
    return RingTokens(found, torch.cat([places, positions], dim=1), window)


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
    own = {} if cache is None else _check(cache, name, new)
    if cache is not None and "length" in cache:
        return _in_room(context, name, {**cache}, new)
    # Copied where it is a view: that would keep all that was projected with it.
    found = {key: torch.cat([own[key], x], dim=1) if own else x.contiguous() for key, x in new.items()}
    context.states[name] = found
    return CachedTokens(found, False)


def _check(cache: MixerState, name: str, new: MixerState) -> MixerState:
    """The tensors of ``cache`` without its lengths. UserError for a state of other tensors."""
    own = {key: tensor for key, tensor in cache.items() if key != "length"}
    some = next(iter(new.values()))
    num_cached = next((tensor.size(1) for key, tensor in own.items() if key in new), 0)
    shapes = {key: (tensor.size(0), num_cached, *tensor.shape[2:]) for key, tensor in new.items()}
    check_state(name, own, shapes, some.dtype)
    return own


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


def with_room(state: MixerState, lengths: Sequence[int], tokens: int, window: int | None = None) -> MixerState:
    """See ``Mixer.with_room``; rows get room for the longest document and ``tokens``, or within a window a ring."""
    room = max(lengths) + tokens if window is None else kept_tokens(window)
    found = {}
    for key, tensor in state.items():
        # Of a state with room there is as much as there are tokens: documents end together.
        if key == "length":
            continue
        found[key] = tensor.new_zeros(len(lengths), room, *tensor.shape[2:])
        for row, length in enumerate(lengths):
            last = min(length, tensor.size(1))
            columns = torch.arange(length - last, length, device=tensor.device) % room
            found[key][row, columns] = tensor[row, tensor.size(1) - last :]
    return {**found, "length": torch.tensor(lengths)}
