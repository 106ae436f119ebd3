"""``lightscale plan CONFIG --failures``: expected goodput and best checkpoint interval."""

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.padding import Padding
from rich.table import Table

from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.output.terminal import plain_console, plain_table
from lightscale.planning.failure_simulation import Estimate, as_good_as_best, simulate
from lightscale.planning.failures import DAY_S, Regime, Shares, daly_interval_s, expected_shares
from lightscale.planning.hardware import H100
from lightscale.planning.search import Fixed, best_layouts, explain_none, run_seconds
from lightscale.runs.goodput import duration
from lightscale.runs.save_interval import SaveInterval, best_interval_s

_HOUR_S = 3600.0
_TIME = re.compile(r"(?P<hours>[0-9]+):(?P<minutes>[0-5][0-9])")
# The best interval times these.
_INTERVAL_FACTORS = tuple(2 ** (half / 2) for half in range(-6, 7))
# A run that fails more often than this many times shows no more by being simulated to its end.
_MOST_FAILURES = 1000
# Below, the closed form is all that is given: a simulated run would hardly finish a save.
_LEAST_PROGRESS = 0.01


@dataclass(frozen=True, kw_only=True)
class _Option:
    default: float | None
    kind: type
    metavar: str
    help: str
    zero: bool = False
    """Whether 0 is valid."""


_OPTIONS = {
    "gpus": _Option(default=64, kind=int, metavar="N", help="number of GPUs (default: 64)"),
    "failures_per_gpu_day": _Option(
        default=4.7e-4,
        kind=float,
        metavar="R",
        zero=True,
        help="failures that end the run, per GPU and day (default: 4.7e-4, from 419 in 54 days on 16,384 H100, "
        "Llama 3; 3.7e-4 for BLOOM, 2e-3 for OPT)",
    ),
    "stall_s": _Option(default=1.0, kind=float, metavar="S", help="seconds of training's wait for a save (default: 1)"),
    "save_s": _Option(
        default=60.0,
        kind=float,
        metavar="S",
        help="seconds from the start of a save until it is complete on disk (default: 60, assumed); for synchronous "
        "saves equal to --stall-s",
    ),
    "restart_s": _Option(
        default=300.0,
        kind=float,
        metavar="S",
        zero=True,
        help="seconds from a failure to the first new step: detection, start, loading (default: 300, assumed)",
    ),
    "hours": _Option(
        default=None,
        kind=float,
        metavar="H",
        help="hours of work in the run (default: its tokens at the speed predicted for H100, as with --nodes)",
    ),
    "seed": _Option(default=0, kind=int, metavar="N", zero=True, help="seed of the simulated failures (default: 0)"),
    "simulations": _Option(
        default=None,
        kind=int,
        metavar="N",
        help="simulated runs per interval (default: as many as take a few seconds)",
    ),
}


@dataclass(frozen=True, kw_only=True)
class GoodputRow:
    """One interval."""

    name: str
    """best, configured, or empty."""
    interval_s: float
    expected: Shares
    simulated: Estimate | None
    """None: almost no progress."""


@dataclass(frozen=True, kw_only=True)
class FailurePlan:
    """The plan for failures."""

    regime: Regime
    gpus: int
    work_s: float
    """Wall time of the run without interruptions."""
    is_predicted: bool
    """Whether it comes from the speed predicted for H100."""
    young_s: float
    daly_s: float
    """Intervals by the formulas of Daly and Young."""
    best: GoodputRow
    """Daly's interval, bounded below by the time of a save."""
    configured: GoodputRow
    rows: tuple[GoodputRow, ...]
    """Rows by interval, including these two."""
    simulated_s: float
    """Wall time of a simulated run."""
    as_good: tuple[float, float]
    """Shortest and longest interval that the simulation cannot distinguish from its best."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the plan for failures."""
    group = parser.add_argument_group("goodput under failures, and the best checkpoint interval (expected, simulated)")
    group.add_argument("--failures", action="store_true", help="plan for failures and stops")
    for name, option in _OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=option.kind, metavar=option.metavar, help=option.help)
    group.add_argument(
        "--stop-every",
        metavar="H:MM",
        help="wall time between scheduled stops, such as a job's time limit; the run saves before each (default: none)",
    )
    group.add_argument(
        "--unannounced",
        action="store_true",
        help="stops without warning, such as preemptions: at random times, on average --stop-every apart",
    )


def refuse_without_failures(args: argparse.Namespace) -> None:
    """Raise UserError for an option without effect."""
    for name in (*_OPTIONS, "stop_every"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} requires --failures")
    if args.unannounced:
        raise UserError("--unannounced requires --failures and --stop-every")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    if args.processes is not None:
        raise UserError(f"--processes {args.processes} and --failures: use --gpus for the number of GPUs")
    values = {name: _value(args, name) for name in _OPTIONS}
    regime = _regime(values, args.stop_every, unannounced=args.unannounced)
    config = load(args.config, args.overrides)
    planned = _plan(config, regime, values)
    if args.json:
        print(json.dumps({"config": str(args.config), **_record(config, planned)}, indent=2))
    else:
        _show(str(args.config), config, planned)
    return 0


def _value(args: argparse.Namespace, name: str) -> Any:
    option, value = _OPTIONS[name], getattr(args, name)
    if value is None:
        return option.default
    if not math.isfinite(value) or value < 0 or (value == 0 and not option.zero):
        rule = "at least 0" if option.zero else "greater than 0"
        raise UserError(f"--{name.replace('_', '-')} {value:g}: must be {rule}")
    return value


def _regime(values: dict[str, Any], stop_every: str | None, *, unannounced: bool) -> Regime:
    stall_s, save_s, restart_s = (values[name] for name in ("stall_s", "save_s", "restart_s"))
    if save_s < stall_s:
        raise UserError(f"--save-s {save_s:g} is less than --stall-s {stall_s:g}; use at least the stall")
    if unannounced and stop_every is None:
        raise UserError("--unannounced requires --stop-every H:MM, the mean time between the stops")
    regime = Regime(
        failures_per_s=values["gpus"] * values["failures_per_gpu_day"] / DAY_S,
        stall_s=stall_s,
        save_s=save_s,
        restart_s=restart_s,
        stop_every_s=None if stop_every is None else _time_s(stop_every),
        stops_announced=not unannounced,
    )
    if regime.losses_per_s == 0:
        raise UserError(
            "--failures-per-gpu-day 0 and no --unannounced stops: no work is ever lost, so no interval is best"
        )
    if regime.stop_every_s is not None and not unannounced and regime.stop_every_s <= restart_s + save_s:
        raise UserError(
            f"--stop-every {stop_every}: the restart ({restart_s:g} s) and the last save ({save_s:g} s) of a job leave "
            "no time to train"
        )
    return regime


def _time_s(text: str) -> float:
    match = _TIME.fullmatch(text)
    seconds = 0.0 if match is None else int(match["hours"]) * _HOUR_S + int(match["minutes"]) * 60
    if not seconds:
        raise UserError(f"--stop-every {text}: must be H:MM, hours and minutes above 0, such as 24:00")
    return seconds


def _plan(config: RunConfig, regime: Regime, values: dict[str, Any]) -> FailurePlan:
    work_s = _predicted_s(config, values["gpus"]) if values["hours"] is None else values["hours"] * _HOUR_S
    daly_s = daly_interval_s(regime.stall_s, regime.mtbf_s)
    best_s = max(daly_s, regime.shortest_interval_s)
    if best_s > work_s:
        raise UserError(
            f"the run is {duration(work_s)} of work, and the best interval {duration(best_s)}: it needs only the "
            "checkpoint at its end; set a longer run with --hours"
        )
    if expected_shares(regime, best_s).progress < _LEAST_PROGRESS:
        raise UserError(
            f"work is lost every {duration(regime.mtbf_s)}, a restart takes {duration(regime.restart_s)} and a save "
            f"{duration(regime.save_s)}: no interval gives much progress; use fewer --gpus, a shorter --restart-s or "
            "a shorter --save-s"
        )
    intervals = [best_s * factor for factor in _INTERVAL_FACTORS]
    names = {interval_s: "" for interval_s in intervals if regime.shortest_interval_s <= interval_s <= work_s}
    names[_configured_s(config, regime.stall_s, work_s / config.own_steps)] = "configured"
    # Last, so that it has its name where it is the configured one too.
    names[best_s] = "best"
    simulated_s = min(work_s, _MOST_FAILURES * regime.mtbf_s)
    rows = _rows(regime, names, simulated_s, seed=values["seed"], runs=values["simulations"])
    as_good = [one.interval_s for one in as_good_as_best([row.simulated for row in rows if row.simulated is not None])]
    by_name = {row.name: row for row in rows}
    return FailurePlan(
        regime=regime,
        gpus=values["gpus"],
        work_s=work_s,
        is_predicted=values["hours"] is None,
        young_s=best_interval_s(regime.stall_s, regime.mtbf_s),
        daly_s=daly_s,
        best=by_name["best"],
        configured=by_name.get("configured", by_name["best"]),
        rows=rows,
        simulated_s=simulated_s,
        as_good=(as_good[0], as_good[-1]),
    )


def _rows(
    regime: Regime, names: dict[float, str], duration_s: float, *, seed: int, runs: int | None
) -> tuple[GoodputRow, ...]:
    expected = {interval_s: expected_shares(regime, interval_s) for interval_s in sorted(names)}
    simulated_intervals = [interval_s for interval_s, shares in expected.items() if shares.progress >= _LEAST_PROGRESS]
    estimates = simulate(regime, simulated_intervals, duration_s=duration_s, seed=seed, runs=runs)
    simulated = dict(zip(simulated_intervals, estimates, strict=True))
    return tuple(
        GoodputRow(name=names[one], interval_s=one, expected=shares, simulated=simulated.get(one))
        for one, shares in expected.items()
    )


def _predicted_s(config: RunConfig, gpus: int) -> float:
    """How long the run's tokens take on so many H100 at the predicted speed."""
    node = H100.gpus_per_node
    if gpus > node and gpus % node:
        raise UserError(
            f"--gpus {gpus}: predictions need whole nodes of {node} GPUs; use --gpus {round(gpus / node) * node}, "
            "or set the run's length with --hours"
        )
    hardware = dataclasses.replace(H100, gpus_per_node=min(gpus, node))
    where = {"nodes": max(1, gpus // node), "sequence_length": config.data.sequence_length}
    found = best_layouts(config, **where, hardware=hardware, fixed=Fixed())
    if not found:
        raise explain_none(config, **where, hardware=hardware, fixed=Fixed())
    if not found[0].fits:
        raise UserError(
            f"--gpus {gpus}: no layout is predicted to fit in memory; use more GPUs, or set the length with --hours"
        )
    return run_seconds(config, found[0], hardware)


def _configured_s(config: RunConfig, stall_s: float, step_s: float) -> float:
    """The interval that the configuration gives."""
    if config.checkpoint.every is not None:
        return config.checkpoint.every * step_s
    return SaveInterval(mtbf_s=config.checkpoint.mtbf_hours * _HOUR_S, now_s=0.0, stalls_s=[stall_s]).interval_s


def _record(config: RunConfig, planned: FailurePlan) -> dict[str, Any]:
    regime = planned.regime
    return {
        "gpus": planned.gpus,
        "work_s": planned.work_s,
        "work_is_predicted": planned.is_predicted,
        "regime": {**dataclasses.asdict(regime), "mtbf_s": regime.mtbf_s},
        "young_interval_s": planned.young_s,
        "daly_interval_s": planned.daly_s,
        "best": _row_record(planned.best),
        "configured": _row_record(planned.configured),
        "as_good_as_best": {"shortest_s": planned.as_good[0], "longest_s": planned.as_good[1]},
        "expected_wall_s": planned.work_s / planned.best.expected.progress,
        "simulated_s": planned.simulated_s,
        "rows": [_row_record(row) for row in planned.rows],
    }


def _row_record(row: GoodputRow) -> dict[str, Any]:
    record: dict[str, Any] = {"interval_s": row.interval_s, "expected": dataclasses.asdict(row.expected)}
    one = row.simulated
    if one is not None:
        more = {"error": one.error, "low": one.low, "runs": len(one.goodputs)}
        record["simulated"] = {**dataclasses.asdict(one.shares), **more}
    return record


def _show(path: str, config: RunConfig, planned: FailurePlan) -> None:
    # Wider than a pipe's 80 columns, so that no line of numbers is broken.
    console = plain_console(least_width=120)
    for sentence in _circumstances(path, config, planned):
        console.print(sentence, soft_wrap=True)
    console.print(_table(planned.rows))
    for sentence in _advice(config, planned):
        console.print(sentence, soft_wrap=True)
    console.print("Assumptions:")
    for sentence in _ASSUMPTIONS:
        console.print(Padding(sentence, (0, 0, 0, 2), expand=False))


_ASSUMPTIONS = (
    "goodput: share of the wall time spent on kept work; time in a queue is not counted",
    "failures are Poisson, at a constant rate, also during restarts",
    "a save stalls training and is then written in the background; a failure meanwhile loses it, the next save waits",
    "a restart takes the same time after a failure and after a stop; the newest complete checkpoint is intact",
)


def _circumstances(path: str, config: RunConfig, planned: FailurePlan) -> Iterable[str]:
    regime = planned.regime
    tokens = config.own_tokens
    source = "at the speed predicted for H100" if planned.is_predicted else "as given"
    yield f"{path} on {planned.gpus:,} GPUs: {tokens:,} tokens are {duration(planned.work_s)} of work, {source}"
    failures = planned.work_s * regime.failures_per_s
    often = f"every {duration(1 / regime.failures_per_s)}, " if regime.failures_per_s else ""
    yield f"failures: {often}{failures:.2g} in that time"
    if regime.stop_every_s is not None:
        how = "announced" if regime.stops_announced else "without warning, on average"
        stops = planned.work_s / regime.stop_every_s
        yield f"stops: every {duration(regime.stop_every_s)} {how}, {stops:.2g} in that time"
    yield (
        f"a save stalls training for {duration(regime.stall_s)} and is complete after {duration(regime.save_s)}; "
        f"a restart takes {duration(regime.restart_s)}"
    )


def _advice(config: RunConfig, planned: FailurePlan) -> Iterable[str]:
    best, estimate = planned.best, planned.best.simulated
    assert estimate is not None
    shortest, longest = map(duration, planned.as_good)
    formulas = f"Daly {duration(planned.daly_s)}, Young {duration(planned.young_s)}"
    as_good = f"{shortest} to {longest} are equally good" if shortest != longest else f"best at {shortest}"
    yield f"best interval: {duration(best.interval_s)} ({formulas}); simulated: {as_good}"
    more_s = planned.work_s / best.expected.progress - planned.work_s
    yield f"expected goodput: {best.expected.progress:.2%}, {duration(more_s)} on top of {duration(planned.work_s)}"
    runs = f"{len(estimate.goodputs):,} simulated runs of {duration(planned.simulated_s)}"
    yield f"one run in ten is below {estimate.low:.2%} ({runs})"
    if config.checkpoint.every is None:
        hours = planned.regime.mtbf_s / _HOUR_S
        yield f"override for automatic checkpoint intervals: checkpoint.mtbf_hours={hours:.3g}"
    yield ""


def _table(rows: Sequence[GoodputRow]) -> Table:
    table = plain_table(
        (),
        ("interval", "goodput", "simulated", "save stalls", "lost work", "restarts", "stops"),
        has_notes=True,
        caption="shares of the wall time, by closed forms; simulated goodput ± standard error",
    )
    for row in rows:
        shares, one = row.expected, row.simulated
        table.add_row(
            duration(row.interval_s),
            f"{shares.progress:.2%}",
            "—" if one is None else f"{one.shares.progress:.2%} ± {one.error:.2%}",
            *(f"{share:.2%}" for share in (shares.stalls, shares.lost, shares.restarts, shares.stops)),
            row.name,
        )
    return table
