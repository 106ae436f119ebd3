"""Facts about the tokens of a pass that a layer needs beside their activations."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightscale.config.model import GridConfig
from lightscale.kernels.attention import (
    DocumentAttention,
    DocumentStarts,
    HeadMaxima,
    leading_tokens,
    read_starts,
    to_device,
)
from lightscale.kernels.common.angles import Phases
from lightscale.kernels.common.captures import CannotCapture
from lightscale.models.layers.grid import coordinates
from lightscale.parallel.sequence import (
    AttentionExchange,
    BothWays,
    DiagonalScan,
    Replay,
    Scan,
    SplitAttention,
    StateExchange,
    begin,
    begin_gather,
    begin_tail,
)

MixerState = dict[str, Tensor]
"""The tensors that a mixer keeps from one call to the next, by name; each has the batch as its first dim."""

Finish = Callable[[Tensor], Tensor]
"""The second half of an operator: queries (b, n, h, k) to outputs (b, n, h, v)."""


@dataclass(frozen=True, kw_only=True)
class SequenceContext:
    """Positions, document boundaries, and where states come from and go to. Shared by all layers of a forward pass.

    It reaches the mixers through the argument that Megatron calls ``packed_seq_params``.

    positions: (b, n) int64, tokens since the document's start; 0 exactly where a document starts.
    cu_seqlens: (N + 1,) int64, boundaries over the flattened b·n tokens, every row start included; None when no
        document starts inside a row, so that kernels do no work for boundaries.
    continues: (b,) bool, whether a row's first token continues a document of the sequence rank before.
    starts: where documents start, on the host; None: not read yet.
    documents_stay: whether they must not be read on the host either, because a CUDA graph is captured.
    exchange: the ranks that hold the other segments of these rows; None when every row is whole.
    across: how queries and keys of softmax attention meet over the ranks of ``exchange``.
    replay: where the layers that are recomputed keep their incoming states; None when none is.
    lengths: n of every sequence rank where they differ; None when they are equal.
    states: layer name to state, in generation: read as the incoming state, then replaced by the outgoing one.
    grid: of documents; None: they are rows of tokens.
    conditions: (b, 2) int64, timestep and class of each row's one image; None: nothing is conditioned.
    places: (b,) int64, what tells each row from all others of a run; None: nothing is drawn for its tokens.
    shared: results of the model's parts for all layers (``StagePart.forward``), by the name of the part.
    """

    positions: Tensor
    cu_seqlens: Tensor | None
    continues: Tensor
    starts: DocumentStarts | None = None
    exchange: StateExchange | None = None
    across: AttentionExchange | None = None
    replay: Replay | None = None
    lengths: Sequence[int] | None = None
    states: dict[str, MixerState] | None = None
    grid: GridConfig | None = None
    conditions: Tensor | None = None
    places: Tensor | None = None
    shared: Mapping[str, Any] = field(default_factory=dict)
    documents_stay: bool = False
    _attentions: dict[tuple[bool, int | None, float | None], DocumentAttention] = field(default_factory=dict)
    _splits: dict[DocumentAttention, SplitAttention] = field(default_factory=dict)
    _phases: dict[Hashable, Phases] = field(default_factory=dict)

    @property
    def first_slot(self) -> int:
        """Of this rank's segment in its rows."""
        return 0 if self.exchange is None else sum(self._rank_lengths[: self.exchange.rank])

    def attention_of(self, *, causal: bool, window: int | None = None, cap: float | None = None) -> DocumentAttention:
        """``attention`` or ``attention_both_ways`` with a window and capped scores; one for all layers of a kind."""
        key = causal, window, cap
        if key not in self._attentions:
            whole = self.attention if causal else self.attention_both_ways
            self._attentions[key] = whole if key[1:] == (None, None) else replace(whole, window=window, cap=cap)
        return self._attentions[key]

    def begin_attention(
        self,
        attention: DocumentAttention,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        maxima: HeadMaxima | None = None,
    ) -> Finish:
        """Start attention across the sequence ranks; see ``parallel.sequence.AttentionExchange.begin``.

        ``attention`` is what ``attention_of`` gives.
        """
        assert self.exchange is not None, "rows are whole here"
        assert self.across is not None, "ranks were not told how queries and keys meet"
        if attention not in self._splits:
            self._splits[attention] = SplitAttention(attention, self.positions, self._rank_lengths, self.exchange)
        return self.across.begin(k, v, self._splits[attention], sinks, maxima)

    def phases_of(self, key: Hashable, make: Callable[[Tensor], Phases]) -> Phases:
        """``make(positions)``, computed once for all layers that give the same ``key``; without a gradient."""
        if key not in self._phases:
            with torch.no_grad():
                self._phases[key] = make(self.positions)
        return self._phases[key]

    def begin(self, scan: Callable[..., Scan], *written: Tensor | None, layer: str | None) -> Callable[..., Tensor]:
        """Start passing states along the sequence ranks; see ``parallel.sequence.begin``.

        ``scan`` is the type of one, or a partial of it with the operator's options. ``layer`` is the name of a layer
        whose activations may be recomputed; None: the scan is outside the layers.
        """
        assert self.exchange is not None, "rows are whole here"
        own = scan(continues=self.continues, cu_seqlens=self.cu_seqlens)
        return begin(own, self.exchange, *written, name=layer or "", replay=self._replay_of(layer))

    def begin_both_ways(self, scan: Callable[..., DiagonalScan], *written: Tensor | None, layer: str) -> Finish:
        """``begin`` of ``scan`` from the left and from the right, whose outputs are added; also of whole rows."""
        assert self.states is None, "only models that predict the next token generate"
        both = functools.partial(BothWays, of=scan)
        if self.exchange is not None:
            return self.begin(both, *written, layer=layer)
        whole = both(continues=self.continues, cu_seqlens=self.cu_seqlens)
        return lambda q: whole.of_whole_rows(*written, q)

    def begin_tail(self, own: Tensor, size: int, *, layer: str) -> Callable[[], Tensor]:
        """Start fetching the ``size`` tokens before this rank's; see ``parallel.sequence.begin_tail``."""
        assert self.exchange is not None, "rows are whole here"
        return begin_tail(own, self.exchange, self._rank_lengths, size, name=layer, replay=self._replay_of(layer))

    @property
    def _rank_lengths(self) -> tuple[int, ...]:
        """n of every sequence rank."""
        assert self.exchange is not None, "rows are whole here"
        return (self.positions.size(1),) * self.exchange.size if self.lengths is None else tuple(self.lengths)

    def _replay_of(self, layer: str | None) -> Replay | None:
        return self.replay if self.replay is not None and layer in self.replay.layers else None

    @cached_property
    def coordinates(self) -> Tensor:
        """(b, n, axes) int64 in grids of several axes; otherwise ``positions``, the coordinates along the only axis."""
        grid = self.grid
        return self.positions if grid is None or grid.axes == 1 else coordinates(self.positions, grid)

    @cached_property
    def positions_on_host(self) -> Tensor:
        """``positions``; without ``starts`` the host waits for them on a GPU, once for all layers."""
        if self.documents_stay:
            raise CannotCapture("a layer reads the positions of documents on the host")
        if self.starts is None or self.positions.device.type == "cpu":
            return self.positions.cpu()
        slots, first = self.starts.slots, self.starts.positions
        tokens = torch.arange(self.positions.numel())
        document = torch.searchsorted(slots, tokens, right=True) - 1
        return (tokens - slots[document] + first[document]).view(self.positions.shape)

    @cached_property
    def attention(self) -> DocumentAttention:
        """Softmax attention of these rows' tokens to the tokens of this rank and of earlier ones; without ``states``.

        Its facts about the documents are computed once for all layers.
        """
        return DocumentAttention(*self._documents)

    @cached_property
    def attention_both_ways(self) -> DocumentAttention:
        """The same to all tokens of their documents, on all ranks.

        Where a document ends is asked of the sequence ranks behind, once a pass, unless the batch tells: on a GPU the
        host waits for it.
        """
        starts, b, n, before, device = self._documents
        after = torch.zeros(b, dtype=torch.int64)
        if self.exchange is not None and starts.after is not None:
            after = starts.after
        elif self.exchange is not None:
            leading = leading_tokens(starts, b, n)
            wait = begin_gather(to_device(leading, device)[:, None], self.exchange)
            lengths = self._rank_lengths
            goes_on = torch.ones(b, dtype=torch.bool)
            behind = range(self.exchange.rank + 1, self.exchange.size)
            gathered = wait().cpu()
            for rank in behind:
                after += torch.where(goes_on, gathered[:, rank], 0)
                goes_on &= gathered[:, rank] == lengths[rank]
        return DocumentAttention(starts, b, n, before, device, after=after)

    @cached_property
    def document_bounds(self) -> Tensor | None:
        """``cu_seqlens`` on the host, where it is known, so that a GPU need not be asked."""
        if self.cu_seqlens is None:
            return None
        starts, b, n, *_ = self._documents
        return torch.cat([starts.slots, starts.slots.new_tensor([b * n])])

    @property
    def document_starts(self) -> DocumentStarts:
        """Starts of documents, read from ``positions`` if ``starts`` is unset; then on a GPU the host waits."""
        return self._documents[0]

    @cached_property
    def _documents(self) -> tuple[DocumentStarts, int, int, int, torch.device]:
        b, n = self.positions.shape
        before = 0
        if self.exchange is not None:
            own = self.exchange.rank
            before = sum(self._rank_lengths[:own])
        starts = self.starts
        if starts is None and self.documents_stay:
            raise CannotCapture("a layer reads the starts of documents on the host")
        if starts is None:
            starts = read_starts(self.positions) if n else DocumentStarts(*torch.empty(2, 0, dtype=torch.int64))
        return starts, b, n, before, self.positions.device

    @staticmethod
    def of(
        positions: Tensor,
        *,
        starts: DocumentStarts | None = None,
        exchange: StateExchange | None = None,
        across: AttentionExchange | None = None,
        replay: Replay | None = None,
        lengths: Sequence[int] | None = None,
        states: dict[str, MixerState] | None = None,
        grid: GridConfig | None = None,
        places: Tensor | None = None,
        shared: Mapping[str, Any] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> "SequenceContext":
        """The context of rows with these ``positions`` (b, n).

        ``starts``: of their documents, if they are on the host; None: they are read from ``positions``, unless
        ``cu_seqlens`` is given: then documents stay on the device.
        """
        b, n = positions.shape
        # One token to a row has no start inside it: generation on a GPU does not wait for the answer.
        documents_stay = cu_seqlens is not None
        if starts is None and n > 1 and not documents_stay:
            starts = read_starts(positions)
        if starts is not None and len(starts.slots) > b:
            cu_seqlens = to_device(torch.cat([starts.slots, starts.slots.new_tensor([b * n])]), positions.device)
        # An empty segment begins no document: what came in goes on to the next rank unchanged.
        continues = positions[:, 0] != 0 if n else positions.new_ones(b, dtype=torch.bool)
        return SequenceContext(
            positions=positions,
            cu_seqlens=cu_seqlens,
            continues=continues,
            starts=starts,
            exchange=exchange,
            across=across,
            replay=replay,
            lengths=lengths,
            states=states,
            grid=grid,
            places=places,
            shared=shared or {},
            documents_stay=documents_stay,
        )
