"""Closed forms for the time of exchanges between ranks, from latency, bytes and links, independent of models.

P is a rank's contribution, in bytes. A message takes latency + bytes / bandwidth (Hockney's model). A collective takes
one latency plus the bytes that a rank receives in a ring algorithm (Thakur et al. 2005, doi 10.1177/1094342005051521),
divided by its receive bandwidth. No form models congestion.
"""

import math
from dataclasses import dataclass
from typing import get_args

from lightscale.config.schema import Exchange
from lightscale.planning.hardware import Hardware

EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between ranks."""

    latency_s: float
    bytes_s: float

    def message_s(self, num_bytes: float) -> float:
        """Time of one message."""
        return self.latency_s + num_bytes / self.bytes_s


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Ranks of one process group, every `stride`-th of all, and their places in nodes."""

    ranks: int
    stride: int
    hardware: Hardware

    @property
    def per_node(self) -> int:
        """Number of its ranks in one node."""
        return max(1, min(self.ranks, self.hardware.gpus_per_node // self.stride))

    @property
    def nodes(self) -> int:
        """Number of its nodes."""
        return math.ceil(self.ranks / self.per_node)

    def pair(self, *, within: bool) -> Link:
        """Link between two neighbours, `within` a node or across two."""
        hw = self.hardware
        gbytes_s = hw.nvlink_gbytes_s * hw.nvlink_pair_share if within else hw.nic_gbytes_s * hw.nic_pair_share
        return Link(latency_s=hw.hop_us * 1e-6, bytes_s=gbytes_s * 1e9)

    def collective(self, *, bulk: bool) -> Link:
        """Link of a rank in a collective of all ranks; `bulk`: messages of many MB.

        The ranks of a node share the bandwidth of its NICs, and none receives faster than NVLink.
        """
        hw = self.hardware
        gbytes_s = hw.nvlink_gbytes_s * hw.nvlink_collective_share
        if self.nodes > 1:
            # Every rank of the node brings its NIC. A flat collective keeps only a share of them busy, a small one when
            # messages are of some MBs; a node with a single rank of the group does as well as a pair.
            share = hw.nic_bulk_share if bulk else hw.nic_state_share
            gbytes_s = min(gbytes_s, hw.nic_gbytes_s * max(hw.nic_pair_share, self.per_node * share))
        return Link(latency_s=hw.collective_us * 1e-6, bytes_s=gbytes_s * 1e9)


def all_gather_s(ranks: int, payload_bytes: float, link: Link) -> float:
    """latency + (W - 1) P / B; the same for a reduce-scatter to P bytes per rank. 0 for one rank."""
    return link.message_s((ranks - 1) * payload_bytes) if ranks > 1 else 0.0


def all_reduce_s(ranks: int, num_bytes: float, link: Link) -> float:
    """Time of a reduce-scatter plus an all-gather of `num_bytes` in total."""
    return link.message_s(2 * (ranks - 1) / ranks * num_bytes) if ranks > 1 else 0.0


def chain_s(hops: int, payload_bytes: float, link: Link) -> float:
    """hops (latency + P / B): a chain from rank to rank."""
    return hops * link.message_s(payload_bytes)


def gather_s(group: RankGroup, payload_bytes: float) -> float:
    """Time of one flat all-gather of states."""
    return all_gather_s(group.ranks, payload_bytes, group.collective(bulk=False))


def two_level_s(group: RankGroup, payload_bytes: float, heads: int) -> float:
    """Gather inside nodes; gather the nodes' combined states, some heads per rank; gather these inside nodes.

    A NIC receives only (nodes - 1) P / g bytes, with g ranks per node, if g divides the heads. Within one node it is
    the flat gather.
    """
    g = group.per_node
    if not _is_two_level(group):
        return gather_s(group, payload_bytes)
    within = RankGroup(ranks=g, stride=group.stride, hardware=group.hardware).collective(bulk=False)
    # Ranks with the same heads of all nodes are a group of its own: each has a NIC to itself, as in a pair.
    across = Link(latency_s=within.latency_s, bytes_s=group.pair(within=False).bytes_s)
    share = _share_bytes(payload_bytes, heads, g)
    return (
        all_gather_s(g, payload_bytes, within)
        + all_gather_s(group.nodes, share, across)
        + all_gather_s(g, share, within)
    )


def _is_two_level(group: RankGroup) -> bool:
    return group.nodes > 1 and group.per_node > 1


def _share_bytes(payload_bytes: float, heads: int, ranks: int) -> float:
    """Of a payload, what one of `ranks` takes: whole heads, padded to as many on every rank."""
    return payload_bytes * math.ceil(heads / ranks) / heads


def ring_s(group: RankGroup, payload_bytes: float) -> float:
    """Time from the first rank to the last, by NVLink within nodes and by NICs between them."""
    # Neighbours in the ring are neighbours in the nodes, so that it leaves each node once.
    across = group.nodes - 1
    within = group.ranks - 1 - across
    return chain_s(within, payload_bytes, group.pair(within=True)) + chain_s(
        across, payload_bytes, group.pair(within=False)
    )


def exchange_s(exchange: Exchange, group: RankGroup, payload_bytes: float, heads: int) -> float:
    """Time from the moment when every rank has its summary until the last rank has its state."""
    if group.ranks == 1:
        return 0.0
    if exchange == "ring":
        return ring_s(group, payload_bytes)
    return two_level_s(group, payload_bytes, heads) if exchange == "two_level" else gather_s(group, payload_bytes)


def exchange_buffer_bytes(exchange: Exchange, group: RankGroup, payload_bytes: float, heads: int) -> float:
    """Bytes that a rank holds during the exchange, in addition to its own payload."""
    if group.ranks == 1:
        return 0.0
    if exchange == "ring":
        # The state that comes in, and the one that goes out.
        return 2 * payload_bytes
    if exchange == "two_level" and _is_two_level(group):
        share = _share_bytes(payload_bytes, heads, group.per_node)
        return group.per_node * payload_bytes + (group.nodes + group.per_node) * share
    return group.ranks * payload_bytes
