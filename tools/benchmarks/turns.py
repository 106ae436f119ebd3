"""How benchmarks take turns, and what they report.

Ways to do the same work are timed in one run and take turns, so that a machine that slows down slows all of them; what
counts is the ratio of the medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

# Way → pass → the work, ready to run.
Ways = dict[str, dict[str, Callable[[], object]]]

# A work that took longer than this in the first round counts from there, and is not run again.
SLOW_S = 10.0


@dataclass(frozen=True, kw_only=True)
class BenchmarkReport:
    """What a benchmark found: its settings, its figures for machines, and a table of them for people."""

    settings: dict[str, Any]
    figures: dict[str, Any]
    table: Table


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def passes(
    forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], cotangent: Tensor
) -> dict[str, Callable[[], object]]:
    """An operator's forward alone, and its forward with its backward."""

    def forward_alone() -> Tensor:
        with torch.no_grad():
            return forward()

    return {
        "forward": forward_alone,
        "forward_backward": lambda: torch.autograd.grad(forward(), leaves, cotangent),
    }


def time_in_turns(
    ways: Ways, repeats: int, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every pass of every way, ``repeats`` times in turns, after one round that does not count.

    A pass of more than ``SLOW_S`` is the exception: its one sample is that of the first round.
    """
    samples_s: dict[str, dict[str, list[float]]] = {way: {name: [] for name in ways[way]} for way in ways}
    slow = set()
    for repeat in range(repeats + 1):
        for way, works in ways.items():
            for name, work in works.items():
                if (way, name) in slow:
                    continue
                start = clock()
                work()
                elapsed_s = clock() - start
                if repeat == 0 and elapsed_s > SLOW_S:
                    slow.add((way, name))
                if repeat or (way, name) in slow:
                    samples_s[way][name].append(elapsed_s)
    return samples_s


def compare(ways: Ways, *, subject: str, settings: dict[str, Any], repeats: int) -> BenchmarkReport:
    """Medians of all ways, and how many times longer than ``subject`` the others take."""
    samples_s = time_in_turns(ways, repeats)
    median_s = {
        way: {name: statistics.median(samples) for name, samples in by_name.items()}
        for way, by_name in samples_s.items()
    }
    ratios = {
        way: {name: seconds / median_s[subject][name] for name, seconds in by_name.items()}
        for way, by_name in median_s.items()
    }
    table = Table()
    table.add_column("way")
    for name in median_s[subject]:
        table.add_column(f"{name.replace('_', ' + ')}, ms", justify="right")
        table.add_column(f"÷ {subject}", justify="right")
    for way, by_name in median_s.items():
        cells = [(f"{seconds * 1e3:.1f}", f"{ratios[way][name]:.1f}") for name, seconds in by_name.items()]
        table.add_row(way, *(cell for pair in cells for cell in pair))
    return BenchmarkReport(
        settings=settings | {"repeats": repeats},
        figures={"subject": subject, "median_s": median_s, "ratios": ratios, "samples_s": samples_s},
        table=table,
    )
