"""Softmax attention within the documents of packed rows, causal or not.

    o_t = Σ_s softmax_s(q_t·k_s / sqrt(k)) v_s,   s from the start of t's document up to t, or to the document's end

The host holds the starts of documents, so it waits for no device. No mask over all pairs of tokens is made: memory is
linear in the tokens. There are three forms:

``flash``    on GPUs in half precision: PyTorch's variable-length flash attention, one launch for all documents.
``grouped``  everywhere else, in any dtype: documents of similar lengths are padded to one length and computed as the
             rows of one call. Padding comes last, where causal attention does not read it; otherwise a mask hides it. A
             document that other sequence ranks share has more keys than queries. It is computed alone, under a small
             mask, and block by block if attention is causal.
``tiled``    for windows that hide keys, in other dtypes or on CPUs, for capped scores and for sinks: see ``tiled.py``.
             Flash attention supports windows, but neither capped scores nor sinks.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lightscale.kernels.attention.tiled import KeyRanges, tiled_attention
from lightscale.kernels.common.captures import CannotCapture, is_capturing

_SHORT = 32
"""Most tokens of documents that are computed together if their lengths round up to one multiple of ``_LENGTH_STEP``.
A call per document would cost more than the copies and the padding. Longer documents need equal lengths."""
_LENGTH_STEP = 16
_MASK_ELEMENTS = 2**25
"""Most pairs of tokens that one mask is made for."""
_MOST_QUERIES = 1024
"""Most queries of a block: longer blocks only add hidden pairs."""


class DocumentStarts(NamedTuple):
    """Starts of document ranges in the rows that a rank holds; on the host."""

    slots: Tensor
    """(m,) int64 ascending, over the rows laid one after another; every row starts a range."""
    positions: Tensor
    """(m,) int64: the position there; above 0 only at the start of a row, where an earlier sequence rank began it."""
    after: Tensor | None = None
    """(b,) int64: tokens of each row's last document that the sequence ranks behind hold; None: they must be asked."""


def read_starts(positions: Tensor) -> DocumentStarts:
    """The document starts of rows with ``positions`` (b, n), n ≥ 1. On a GPU the host waits for the positions."""
    starts = positions == 0
    # Operators read the rows as one sequence: a row that continues a document must not continue the row above.
    starts[:, 0] = True
    slots = starts.flatten().nonzero().squeeze(-1)
    found = torch.stack([slots, positions.flatten()[slots]]).cpu()
    return DocumentStarts(found[0], found[1])


def leading_tokens(starts: DocumentStarts, rows: int, length: int) -> Tensor:
    """(rows,) int64: tokens at the beginning of each row whose document an earlier sequence rank began."""
    slots, positions = starts.slots.numpy(), starts.positions.numpy()
    firsts = np.flatnonzero(slots % length == 0) if length else np.empty(0, dtype=np.int64)
    if not len(firsts):
        return torch.zeros(rows, dtype=torch.int64)
    lengths = np.diff(slots, append=rows * length)[firsts]
    return torch.from_numpy(np.where(positions[firsts] > 0, lengths, 0))


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """``host`` on ``device``; the host does not wait for the copy.

    Refused while a CUDA graph is captured (``CannotCapture``), which would copy the same numbers each time.
    """
    if is_capturing(device):
        raise CannotCapture("tables of documents are made on the host")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class _Group(NamedTuple):
    """A set of documents, computed as ``rows`` rows of ``length`` tokens."""

    rows: int
    length: int


class _Continued(NamedTuple):
    """A document with ``length`` tokens in row ``row``, and ``before`` and ``after`` tokens on other ranks."""

    row: int
    length: int
    before: int
    after: int


class _Moves(NamedTuple):
    """Map of tokens between the order of the rows and the padded order of ``grouped``; on the device."""

    slots: Tensor
    """(b·n,) int64: the padded token of each token."""
    sources: Tensor
    """(padded tokens,) int64: the token of each padded token; for padding the last token of its document."""
    padding: Tensor
    """int64: the padded tokens that are padding."""


@dataclass(frozen=True)
class _Layout:
    """Layout of the documents in ``grouped``: one part after the other."""

    parts: tuple[_Group | _Continued, ...]
    moves: _Moves | None
    """None where the order stays, without padding."""
    masks: tuple[Tensor | None, ...]
    """For each part the mask (rows, 1, 1, length) bool, on the device, of its keys without padding; None: no padding,
    or causal attention does not read the padding."""


@dataclass(frozen=True, eq=False)
class DocumentAttention:
    """Attention over rows of n tokens whose documents start at ``starts``; one for all layers of a forward pass."""

    starts: DocumentStarts
    """Starts of the documents in these rows."""
    rows: int
    """b."""
    length: int
    """n."""
    before: int
    """Keys of each row before its own n, of the sequence ranks before."""
    device: torch.device
    after: Tensor | None = None
    """(b,) tokens of each row's last document that the sequence ranks behind hold; None: attention is causal, and the
    keys end with the row's own."""
    window: int | None = None
    """Most keys that a token reads, the last of them its own; None: all. With causal attention only."""
    cap: float | None = None
    """Largest score, by tanh; None: scores without a cap."""

    @property
    def is_causal(self) -> bool:
        """Whether tokens read no later tokens."""
        return self.after is None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q: (b, n, h, k); k, v: (b, keys, g, k), g a divisor of h; sinks: (h,) -> (b, n, h, k).

        The keys are the ``before`` tokens, the row's own, and, unless attention is causal, all tokens behind them.
        """
        if not self.length:
            # No outputs to compute, but other ranks wait for this rank in the backward pass of the gathering.
            o = sdpa(q, k, v)
            # Sinks have a gradient on every rank.
            return o if sinks is None else o + 0 * sinks[:, None]
        if self.cap is not None or sinks is not None:
            return self.tiled(q, k, v, sinks)
        # Inputs that the kernels support; they refuse others.
        if q.is_cuda and q.dtype.itemsize == 2 and q.size(-1) % 8 == 0 and q.size(-1) <= 256:
            return self.flash(q, k, v)
        return self.tiled(q, k, v) if self._hiding is not None else self.grouped(q, k, v)

    @cached_property
    def _hiding(self) -> int | None:
        """The window, if it hides a key of a document; else None."""
        assert self.window is None or self.is_causal, "windows are for causal attention"
        hides = self.window is not None and self.window < int((self._before + self._lengths).max())
        return self.window if hides else None

    @cached_property
    def ranges(self) -> KeyRanges:
        """``key_ranges`` within the window."""
        first, end = self.key_ranges
        if self.window is not None:
            first = torch.maximum(first, end - self.window)
        return KeyRanges(first, end, self.device)

    def tiled(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See the module; the arguments are those of ``__call__``."""
        return tiled_attention(q, k, v, self.ranges, cap=self.cap, sinks=sinks)

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        """(m,) tokens of each document here."""
        return np.diff(self.starts.slots.numpy(), append=self.rows * self.length)

    @cached_property
    def _before(self) -> NDArray[np.int64]:
        """(m,) tokens of each document that other ranks hold."""
        before: NDArray[np.int64] = np.minimum(self.starts.positions.numpy(), self.before)
        return before

    @cached_property
    def _after(self) -> NDArray[np.int64]:
        """(m,) tokens of each document on ranks behind that its tokens here read."""
        after = np.zeros_like(self._lengths)
        if self.after is not None:
            rows = self.starts.slots.numpy() // self.length
            # Only the last document of a row continues behind it.
            after[np.flatnonzero(np.diff(rows, append=self.rows))] = self.after.numpy()
        return after

    @cached_property
    def key_ranges(self) -> tuple[Tensor, Tensor]:
        """(b, n) int64 on the host: the first key that each token reads, and the end of its keys."""
        if not self.length:
            nothing = torch.empty(self.rows, 0, dtype=torch.int64)
            return nothing, nothing
        starts = self.starts.slots.numpy()
        firsts = self.before + starts % self.length - self._before
        first = torch.from_numpy(np.repeat(firsts, self._lengths)).view(self.rows, self.length)
        if self.is_causal:
            return first, (self.before + 1 + torch.arange(self.length)).expand(first.shape)
        ends = firsts + self._before + self._lengths + self._after
        return first, torch.from_numpy(np.repeat(ends, self._lengths)).view(first.shape)

    def flash(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See the module; the arguments are those of ``__call__``."""
        queries, keys, longest, most_keys = self._boundaries
        # Not torch.nn.attention.varlen, whose arguments differ between the supported versions of PyTorch. Where a
        # document has more keys than queries, its last query reads the last key: flash attention's causal mask.
        window = {} if self._hiding is None else {"window_size_left": self._hiding - 1, "window_size_right": 0}
        o: Tensor = torch.ops.aten._flash_attention_forward(
            *(q.flatten(0, 1), self._own(k), self._own(v), queries, keys, longest, most_keys),
            *(0.0, self.is_causal, False),
            **window,
        )[0]
        return o.view(q.shape)

    @cached_property
    def _boundaries(self) -> tuple[Tensor, Tensor, int, int]:
        """Boundaries of the documents among all queries and all keys, and the most of each in one document."""
        lengths, keys = self._lengths, self._before + self._lengths + self._after
        if is_capturing(self.device) and len({*lengths.tolist()}) == len({*keys.tolist()}) == 1:
            # Every row is one document: no table comes from the host.
            edges = torch.arange(len(lengths) + 1, dtype=torch.int32, device=self.device)
            return edges * int(lengths[0]), edges * int(keys[0]), int(lengths[0]), int(keys[0])
        boundaries = np.zeros((2, len(lengths) + 1), dtype=np.int32)
        np.cumsum([lengths, keys], axis=1, out=boundaries[:, 1:])
        on_device = to_device(torch.from_numpy(boundaries), self.device)
        return on_device[0], on_device[1], int(lengths.max()), int(keys.max())

    def _own(self, x: Tensor) -> Tensor:
        """(b, keys, h, k) -> (keys of the documents of all rows, h, k), without keys that no query reads."""
        firsts = self.before - self._before[self.starts.slots.numpy() % self.length == 0]
        stops = np.full(self.rows, self.before + self.length)
        if self.after is not None:
            stops += self.after.numpy()
        if (firsts == firsts[0]).all() and (stops == stops[0]).all():
            return x[:, firsts[0] : stops[0]].flatten(0, 1)
        edges = zip(firsts.tolist(), stops.tolist(), strict=True)
        return torch.cat([row[first:stop] for row, (first, stop) in zip(x, edges, strict=True)])

    def grouped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See the module; the arguments are those of ``__call__``."""
        layout, causal = self._layout, self.is_causal
        here = slice(self.before, self.before + self.length)
        if layout.moves is None and layout.parts == (_Group(self.rows, self.length),):
            # Every row is one document: no copy is necessary.
            return sdpa(q, k[:, here], v[:, here], is_causal=causal)
        sizes = [part.length * (part.rows if isinstance(part, _Group) else 1) for part in layout.parts]
        queries, keys, values = (self._spread(x).split(sizes) for x in (q, k[:, here], v[:, here]))
        outputs = []
        for part, mask, *inputs in zip(layout.parts, layout.masks, queries, keys, values, strict=True):
            if isinstance(part, _Group):
                group = (x.unflatten(0, part) for x in inputs)
                outputs.append(sdpa(*group, is_causal=causal, attn_mask=mask).flatten(0, 1))
            elif causal:
                seen = slice(self.before - part.before, self.before + part.length)
                outputs.append(_last_queries(inputs[0], k[part.row, seen], v[part.row, seen]))
            else:
                outputs.append(self._all_keys(part, inputs[0], k, v))
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if layout.moves is not None:
            o = _Collect.apply(o.flatten(1), layout.moves)
        return o.view(q.shape)

    def _all_keys(self, part: _Continued, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (n, h, k), tokens of a document of several ranks; k, v: all keys of all rows -> (n, h, k)."""
        # The document's part is at the row's beginning or end, or is the whole row.
        first = self.before if part.before else self.before + self.length - part.length
        seen = slice(first - part.before, first + part.length + part.after)
        return sdpa(q[None], k[part.row : part.row + 1, seen], v[part.row : part.row + 1, seen])[0]

    def _spread(self, x: Tensor) -> Tensor:
        """(b, n, h, k) -> (padded tokens, h, k)."""
        moves, flat = self._layout.moves, x.flatten(0, 1)
        if moves is None:
            return flat
        spread: Tensor = _Spread.apply(flat.flatten(1), moves)
        return spread.unflatten(1, x.shape[2:])

    @cached_property
    def _layout(self) -> _Layout:
        lengths, before, after, starts = self._lengths, self._before, self._after, self.starts.slots.numpy()
        # Documents of one kind are computed together; each other document has a number of its own.
        kind = np.where(lengths <= _SHORT, -(-lengths // _LENGTH_STEP), _SHORT + lengths)
        alone = before + after > 0
        kind[alone] = -1 - np.flatnonzero(alone)
        if 2 * len(np.unique(kind)) > len(kind):
            # Few calls are saved: less than the cost of a copy of all tokens.
            kind = np.arange(len(kind))
        _, index, place = np.unique(kind, return_index=True, return_inverse=True)
        parts: list[_Group | _Continued] = []
        masks: list[Tensor | None] = []
        firsts, first = np.empty_like(lengths), 0
        # In the order of each part's first document: where every document is alone, the order of tokens stays.
        for number in np.argsort(index):
            chosen = np.flatnonzero(place == number)
            length = int(lengths[chosen].max())
            one = int(chosen[0])
            if alone[one]:
                parts.append(_Continued(int(starts[one]) // self.length, length, int(before[one]), int(after[one])))
            else:
                parts.append(_Group(len(chosen), length))
            masks.append(None if self.is_causal else self._without_padding(lengths[chosen], length))
            firsts[chosen] = first + length * np.arange(len(chosen))
            first += length * len(chosen)
        shift = firsts - starts
        if not shift.any() and first == self.rows * self.length:
            return _Layout(tuple(parts), None, tuple(masks))
        slots = np.arange(self.rows * self.length) + np.repeat(shift, lengths)
        # Padding comes behind the last token of its document.
        is_token = np.zeros(first, dtype=bool)
        is_token[slots] = True
        sources = np.zeros(first, dtype=np.int64)
        sources[slots] = np.arange(len(slots))
        sources = sources[np.maximum.accumulate(np.where(is_token, np.arange(first), 0))]
        on_device = (to_device(torch.from_numpy(x), self.device) for x in (slots, sources, np.flatnonzero(~is_token)))
        return _Layout(tuple(parts), _Moves(*on_device), tuple(masks))

    def _without_padding(self, lengths: NDArray[np.int64], length: int) -> Tensor | None:
        """The mask of a part whose documents have ``lengths`` tokens."""
        if (lengths == length).all():
            return None
        mask = np.arange(length) < lengths[:, None]
        return to_device(torch.from_numpy(mask), self.device)[:, None, None]


# By hand, because autograd's backward pass of an index adds row after row, in case rows repeat.
class _Spread(torch.autograd.Function):
    """(tokens, w) -> (padded tokens, w); padding repeats the last token of its document."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: _Moves) -> Tensor:
        ctx.moves = moves
        return x.index_select(0, moves.sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # No query reads the padding: its gradient is zero.
        return grad.index_select(0, ctx.moves.slots), None


class _Collect(torch.autograd.Function):
    """(padded tokens, w) -> (tokens, w)."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, moves: _Moves) -> Tensor:
        ctx.moves = moves
        return padded.index_select(0, moves.slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.moves.sources).index_fill_(0, ctx.moves.padding, 0), None


def _last_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (n, h, k), the last n of the tokens of k and v (m, h, k): each query reads the keys up to its own."""
    before = len(k) - len(q)
    size = max(1, min(_MOST_QUERIES, _MASK_ELEMENTS // len(k)))
    edges = [*range(0, len(q), size), len(q)]
    outputs = []
    for first, last in pairwise(edges):
        keys = torch.arange(before + last, device=q.device)
        mask = keys <= keys[before + first :, None]
        block = (q[first:last], k[: before + last], v[: before + last])
        outputs.append(sdpa(*(x[None] for x in block), attn_mask=mask)[0])
    return torch.cat(outputs)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Scaled dot-product attention of (b, n, h, k) tensors; PyTorch's order is (b, h, n, k).

    With fewer heads of keys and values than of queries, neighbouring heads of queries share one.
    """
    how["enable_gqa"] = q.size(2) != k.size(2)
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **how)
    return o.transpose(1, 2)
