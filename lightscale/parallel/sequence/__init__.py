"""Sequence parallelism: every rank holds a segment of each sequence, and only states travel between ranks.

A small summary describes the effect of a segment on the state that enters it (``algebra``). Ranks exchange summaries
(``exchange``) while they compute results that need no other rank (``passing``). Each operator has its passes
(``scans``). Softmax attention gathers its keys and values instead (``keys_values``). (LASP, arXiv 2404.02882; LASP-2,
arXiv 2502.07563; both without document boundaries.)
"""

from lightscale.parallel.sequence.exchange import Gather, Ring, StateExchange, TwoLevel
from lightscale.parallel.sequence.keys_values import begin_gather
from lightscale.parallel.sequence.passing import Replay, begin
from lightscale.parallel.sequence.scans import (
    DeltaRuleScan,
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
    "DeltaRuleScan",
    "GatedScan",
    "Gather",
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
    "StateExchange",
    "TPEScan",
    "TwoLevel",
    "begin",
    "begin_gather",
    "begin_tail",
]
