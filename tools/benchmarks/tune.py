"""Tiles of the Triton kernels, tried on this GPU: ``python tools/bench.py kernels --tune``.

The tiles of an operator are one table, in ``lightscale/kernels/OPERATOR/triton/tiling.py``, which its launches read.
Changes of it are tried one after the other, each on top of those that made it faster. What is best is printed and
saved, to be written into the table.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from benchmarks.gpu_kernels import Bench, Failure
from benchmarks.subjects import OURS, subjects
from lightscale.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is tried of an operator's tiles, and by what it is judged."""

    subjects: tuple[str, ...]
    """Of ``subjects.py``: the sum of their times, forward and with backward, counts."""
    changes: tuple[dict[str, int], ...]
    """Of the tiles for half precision."""


SEARCHES = {
    "lightning": Search(
        subjects=("constant decay", "constant decay with LRPE"),
        changes=(
            {"attend_stages": 2},
            {"width": 128},
            {"chunk": 256},
            {"scan_stages": 3},
            {"state_value": 128},
            {"state_value": 128, "scan_stages": 3},
        ),
    ),
    "gla": Search(
        subjects=("decay per channel",),
        changes=(
            {"gradient_value": 128},
            {"gradient_value": 32},
            {"gradient_stages": 2},
            {"gradient": 16},
            {"width": 128},
            {"contracted": 64, "attend_stages": 2},
            {"scan_stages": 3},
            {"state_key": 128},
            {"state_value": 128},
        ),
    ),
    "lightnet": Search(
        subjects=("LightNet", "LightNet with LRPE"),
        changes=(
            {"product_stages": 2},
            {"value_width": 64},
            {"partners": 16},
            {"tile_tokens": 32},
            {"state_value": 32},
            {"chunk": 256},
        ),
    ),
    "delta_rule": Search(
        subjects=("delta rule, decay per head", "delta rule, decay per channel"),
        changes=(
            {"scan_stages": 1},
            {"scan_stages": 3},
            {"state_value": 64, "state_elements": 8192, "scan_stages": 1},
            {"prepared": 128},
            {"channel_prepared": 64},
            {"gradient": 32},
            {"gradient_value": 32},
            {"gradient_value": 128},
        ),
    ),
}
# A change counts when it takes off so much of the time; less is noise.
LEAST_GAIN = 0.02


@dataclass(frozen=True, kw_only=True)
class TileTrial:
    """One choice of tiles."""

    changes: dict[str, int]
    """Of the shipped tiles."""
    ns: dict[str, dict[str, float | str]]
    """Per token-head, by subject and pass; or why there is no time."""
    total_ns: float | None
    """None where a time is missing."""


@dataclass(kw_only=True)
class Found:
    """The search so far."""

    tried: list[TileTrial] = field(default_factory=list)
    best: dict[str, int] | None = None
    """Changes of the shipped tiles; None where nothing ran."""
    best_ns: float | None = None

    def add(self, trial: TileTrial) -> None:
        """Keep ``trial``, and as the best one if it is."""
        self.tried.append(trial)
        if trial.total_ns is None:
            return
        if self.best_ns is None or trial.total_ns < (1 - LEAST_GAIN) * self.best_ns:
            self.best, self.best_ns = trial.changes, trial.total_ns


class Tiles:
    """The table of an operator's tiles for a dtype."""

    def __init__(self, operator: str, dtype: torch.dtype) -> None:
        self._module = import_module(f"lightscale.kernels.{operator}.triton.tiling")
        self._name = "_FULL" if dtype == torch.float32 else "_HALF"
        self.shipped = getattr(self._module, self._name)

    @contextmanager
    def changed(self, changes: dict[str, int]) -> Iterator[None]:
        """What is launched meanwhile has these tiles."""
        setattr(self._module, self._name, replace(self.shipped, **changes))
        try:
            yield
        finally:
            setattr(self._module, self._name, self.shipped)


def check_device() -> None:
    """Refuse where there is nothing to tune.

    Raises:
        UserError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("--tune times tiles of Triton kernels, which needs a GPU; torch.cuda.is_available() is false")


def tune(bench: Bench, *, tokens: int = 65536) -> Iterator[dict[str, dict[str, Any]]]:
    """What was found of each operator's tiles, after each trial."""
    figures: dict[str, dict[str, Any]] = {}
    for operator, search in SEARCHES.items():
        tiles, found = Tiles(operator, bench.setting.dtype), Found()
        for change in ({}, *search.changes):
            with tiles.changed({**(found.best or {}), **change}):
                found.add(_trial(bench, search, {**(found.best or {}), **change}, tokens))
            figures[operator] = asdict(found)
            yield dict(figures)


def _trial(bench: Bench, search: Search, changes: dict[str, int], tokens: int) -> TileTrial:
    known = {subject.name: subject for subject in subjects(bench.setting, with_fla=False)}
    ns: dict[str, dict[str, float | str]] = {}
    times: list[float | None] = []
    for name in search.subjects:
        lines = bench.measure(known[name], OURS, (1, tokens), compiled=False)
        ns[name] = {x.passes: x.reason if isinstance(x, Failure) else x.ns_per_token_head for x in lines}
        times += [None if isinstance(x, Failure) else x.ns_per_token_head for x in lines]
    total = None if None in times else sum(filter(None, times))
    return TileTrial(changes=changes, ns=ns, total_ns=total)


def said(figures: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What was tried and what is best, for people."""
    for operator, found in figures.items():
        for trial in found["tried"]:
            total = "did not run" if trial["total_ns"] is None else f"{trial['total_ns']:.2f} ns"
            yield f"tiles of {operator}, {_named(trial['changes'])}: {total}"
        first, best = found["tried"][0]["total_ns"], found["best_ns"]
        times = f", {first / best:.2f} times as fast as shipped" if found["best"] and first else ""
        yield f"best tiles of {operator}: {'none runs' if best is None else _named(found['best'])}{times}"


def _named(changes: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in changes.items()) or "as shipped"
