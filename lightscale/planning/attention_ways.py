"""Softmax attention across sequence ranks: what each way of `parallel.attention` holds, moves and computes.

Numbers are per token of a rank and for all tensor ranks; docs/explanation/attention-across-ranks.md has the formulas.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, get_args

from lightscale.config.layout import Layout
from lightscale.config.schema import Attention
from lightscale.planning.communication import Link, RankGroup, all_gather_s
from lightscale.planning.workload import LayerWork

ATTENTIONS: tuple[Attention, ...] = get_args(Attention)

_FP32_BYTES = 4


class Waits(NamedTuple):
    """Seconds of communication in a pass of a layer."""

    exposed_s: float
    total_s: float


@dataclass(frozen=True)
class AttentionWay(ABC):
    """One way for `layer`, whose keys and values other ranks read, on `layout`."""

    layer: LayerWork
    layout: Layout
    size: int
    """Bytes of a weight or an activation."""

    @property
    def ranks(self) -> int:
        """Sequence ranks, at least 2."""
        return self.layout.sequence

    @property
    @abstractmethod
    def kept(self) -> int:
        """Numbers kept for the backward pass, in the place of keys and values as projected and of rotated keys."""

    @property
    @abstractmethod
    def forward_bytes(self) -> int:
        """Bytes of buffers in the forward pass, beside what is kept."""

    @property
    @abstractmethod
    def backward_bytes(self) -> int:
        """Bytes of buffers and gradients in the backward pass of the operator."""

    @property
    @abstractmethod
    def busiest(self) -> float:
        """Pairs of queries and keys of the busiest rank, over the mean."""

    @abstractmethod
    def forward(self, group: RankGroup, compute_s: float, queries_s: float) -> Waits:
        """Communication of a forward pass; the operator takes `compute_s`, the projection of queries `queries_s`."""

    @abstractmethod
    def backward(self, group: RankGroup, compute_s: float) -> Waits:
        """Communication of a backward pass, whose operator takes `compute_s`."""

    def _bytes(self, numbers: float, size: int | None = None) -> float:
        """Of `numbers` per token, on one tensor rank and for all its tokens."""
        tokens = self.layout.micro_batch_size * self.layout.rank_sequence_tokens
        return tokens * numbers * (self.size if size is None else size) / self.layout.tensor


class _Gather(AttentionWay):
    """All keys and values on every rank."""

    @property
    def kept(self) -> int:
        return self.layer.gathered * self.ranks

    @property
    def forward_bytes(self) -> int:
        # While they are put together, the parts as they arrived stand beside them.
        return self.size * self.kept

    @property
    def backward_bytes(self) -> int:
        return self.size * self.kept

    @property
    def busiest(self) -> float:
        # The last rank's tokens see most.
        return 2 - 1 / self.ranks if self.layer.is_causal and self.layer.window is None else 1.0

    def forward(self, group: RankGroup, compute_s: float, queries_s: float) -> Waits:
        all_s = self._all_s(group)
        return Waits(max(0.0, all_s - queries_s), all_s)

    def backward(self, group: RankGroup, compute_s: float) -> Waits:
        return Waits(self._all_s(group), self._all_s(group))

    def _all_s(self, group: RankGroup) -> float:
        return all_gather_s(self.ranks, self._bytes(self.layer.gathered), group.collective(bulk=True))


class _Ring(AttentionWay):
    """Blocks from rank to rank; queries are traded where a causal mask has no window."""

    @property
    def _trades(self) -> bool:
        return self.layer.is_causal and self.layer.window is None

    @property
    def _hops(self) -> int:
        """Blocks of other ranks that a rank reads, at most."""
        window = self.layer.window
        reached = self.ranks if window is None else math.ceil(window / self.layout.rank_sequence_tokens)
        return min(self.ranks - 1, reached)

    @property
    def kept(self) -> int:
        # Its own block. Of traded queries the outputs are kept twice, behind the operator and as they came back.
        return self.layer.gathered + self.layer.queries * self._trades

    @property
    def forward_bytes(self) -> int:
        return 2 * self.size * self.layer.gathered + _FP32_BYTES * self.layer.queries

    @property
    def backward_bytes(self) -> int:
        # Two blocks; gradients of the own one and of four others; those of the queries.
        return 2 * self.size * self.layer.gathered + _FP32_BYTES * (5 * self.layer.gathered + self.layer.queries)

    @property
    def busiest(self) -> float:
        return 1.0

    def forward(self, group: RankGroup, compute_s: float, queries_s: float) -> Waits:
        link = self._link(group)
        return self._waits(link, link.message_s(self._bytes(self.layer.gathered)), compute_s)

    def backward(self, group: RankGroup, compute_s: float) -> Waits:
        link = self._link(group)
        gradient_s = link.message_s(self._bytes(self.layer.gathered, _FP32_BYTES))
        waits = self._waits(link, link.message_s(self._bytes(self.layer.gathered)) + gradient_s, compute_s)
        # The last gradient goes to its owner behind all computation.
        return Waits(waits.exposed_s + gradient_s, waits.total_s + gradient_s)

    def _link(self, group: RankGroup) -> Link:
        # Each step waits for the slowest of the links.
        return group.pair(within=group.nodes == 1)

    def _waits(self, link: Link, step_s: float, compute_s: float) -> Waits:
        # There and back; nothing runs beside it.
        trade_s = 2 * link.message_s(self._bytes(self.layer.queries / 2)) if self._trades else 0.0
        beside_s = compute_s / (self._hops + 1)
        return Waits(self._hops * max(0.0, step_s - beside_s) + trade_s, self._hops * step_s + trade_s)


class _AllToAll(AttentionWay):
    """All tokens of some heads on every rank."""

    @property
    def _keys(self) -> int:
        """Keys and values; of fewer heads than ranks each has copies."""
        return self.layer.gathered * max(1, self.ranks * self.layout.tensor // self.layer.key_heads)

    @property
    def kept(self) -> int:
        # Outputs are kept twice, of some heads and of some tokens.
        return self._keys + self.layer.queries

    @property
    def forward_bytes(self) -> int:
        # The largest, packed to be sent and as it arrived.
        return 2 * self.size * max(self._keys, self.layer.queries)

    @property
    def backward_bytes(self) -> int:
        return self.size * (self._keys + 3 * self.layer.queries)

    @property
    def busiest(self) -> float:
        return 1.0

    def forward(self, group: RankGroup, compute_s: float, queries_s: float) -> Waits:
        keys_s, one_s = self._move_s(group, self._keys), self._move_s(group, self.layer.queries)
        return Waits(max(0.0, keys_s - queries_s) + 2 * one_s, keys_s + 2 * one_s)

    def backward(self, group: RankGroup, compute_s: float) -> Waits:
        all_s = self._move_s(group, self._keys) + 2 * self._move_s(group, self.layer.queries)
        return Waits(all_s, all_s)

    def _move_s(self, group: RankGroup, numbers: int) -> float:
        # All but its own share.
        return group.collective(bulk=True).message_s((self.ranks - 1) / self.ranks * self._bytes(numbers))


_WAYS: dict[Attention, type[AttentionWay]] = {"gather": _Gather, "ring": _Ring, "all_to_all": _AllToAll}


def attention_way(attention: Attention, layer: LayerWork, layout: Layout, size: int) -> AttentionWay | None:
    """The way of `layer`; None where nothing is read of other ranks, or a state stands for it.

    Mixers that read all tokens without being softmax attention gather, whatever `attention` is.
    """
    if layout.sequence == 1 or not layer.gathered:
        return None
    return _WAYS[attention if layer.queries else "gather"](layer, layout, size)
