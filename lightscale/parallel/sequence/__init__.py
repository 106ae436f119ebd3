"""Sequence parallelism: every rank holds a segment of each sequence, and only states travel between ranks.

A small summary describes the effect of a segment on the state that enters it (``algebra``). Ranks exchange summaries
(``exchange``) while they compute results that need no other rank (``passing``). Each operator has its passes
(``scans``). Softmax attention has no such state: its queries and keys meet in other ways (``attention``). (LASP, arXiv
2404.02882; LASP-2, arXiv 2502.07563; both without document boundaries.)
"""

from lightscale.parallel.sequence.attention import AttentionExchange, SplitAttention
from lightscale.parallel.sequence.both_ways import BothWays, added, doubled, doubled_bounds
from lightscale.parallel.sequence.exchange import Gather, Ring, StateExchange, TwoLevel
from lightscale.parallel.sequence.head_exchange import HeadExchange
from lightscale.parallel.sequence.key_ring import KeyRing
from lightscale.parallel.sequence.keys_values import KeyGather, begin_gather
from lightscale.parallel.sequence.passing import Replay, begin
from lightscale.parallel.sequence.scans import (
    DeltaRuleScan,
    DiagonalScan,
    GatedScan,
    LightNetScan,
    LightNetWholeScan,
    LightningScan,
    LionScan,
    LionVectorScan,
    LogSumScan,
    LogSumWholeScan,
    Scan,
    TPEScan,
)
from lightscale.parallel.sequence.tails import begin_tail

__all__ = [
    "AttentionExchange",
    "BothWays",
    "DeltaRuleScan",
    "DiagonalScan",
    "GatedScan",
    "Gather",
    "HeadExchange",
    "KeyGather",
    "KeyRing",
    "LightNetScan",
    "LightNetWholeScan",
    "LightningScan",
    "LionScan",
    "LionVectorScan",
    "LogSumScan",
    "LogSumWholeScan",
    "Replay",
    "Ring",
    "Scan",
    "SplitAttention",
    "StateExchange",
    "TPEScan",
    "TwoLevel",
    "added",
    "begin",
    "begin_gather",
    "begin_tail",
    "doubled",
    "doubled_bounds",
]
