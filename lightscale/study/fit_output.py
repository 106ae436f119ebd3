"""The results of ``lightscale study fit``, as tables and as JSON."""

import argparse
import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightscale.errors import UserError
from lightscale.output.terminal import plain_console, plain_table
from lightscale.runs.run_directory import write_atomically
from lightscale.study.curve_files import write_parquet
from lightscale.study.fits.bootstrap import FittedNumber
from lightscale.study.fits.frontier import FrontierEstimate
from lightscale.study.fits.parametric import SurfaceEstimate, estimate_surface
from lightscale.study.history import RunCurve
from lightscale.study.laws import COUNTINGS, ArchitectureLaws, study_laws
from lightscale.study.points_file import read_points
from lightscale.study.study import Study

_DRAWS_OF_POINTS = 1000
_MEANINGS = {
    "E": "irreducible loss",
    "alpha": "exponent of N",
    "beta": "exponent of D",
    "a": "optimal N grows as C^a, with C = 6·N·D",
    "b": "optimal D grows as C^b",
}


def fit_points(args: argparse.Namespace) -> None:
    """Fit the loss surface of points; print its constants with intervals, as a table or as JSON."""
    draws = args.draws or _DRAWS_OF_POINTS
    estimate = estimate_surface(read_points(args.points), draws=draws, seed=args.seed)
    if args.json:
        print(json.dumps({"points": str(args.points), **estimate.to_json(), "draws": draws, "seed": args.seed}))
    else:
        _print_surface(estimate, plain_console(least_width=136))


def fit_study(study: Study, args: argparse.Namespace) -> None:
    """Fit, store and print the laws of a study."""
    laws, record = fit(study, finish_all(study), draws=args.draws, seed=args.seed)
    if args.json:
        print(json.dumps(record))
        return
    console = plain_console(least_width=136)
    for one in laws:
        _print_architecture(one, console)
    console.print(f"saved: {study.path / 'fit.json'}; curves: {study.path / 'curves.parquet'} and cells/*.csv")


def fit(
    study: Study, curves: dict[str, RunCurve], *, draws: int | None, seed: int
) -> tuple[list[ArchitectureLaws], dict[str, Any]]:
    """Fit the laws of `curves` and write fit.json. Raises `UserError` with all missing data if there is no law.

    Curves of unfinished cells count too: with a constant learning rate, each of their points is the end of a shorter
    run.
    """
    laws = study_laws(study, curves, draws=draws or study.definition.fit.draws, seed=seed)
    if not any(one.has_any for one in laws):
        reasons = dict.fromkeys(f"{one.architecture}: {one.windows['all']}" for one in laws if one.counting == "ours")
        raise UserError("no law can be fitted yet:\n" + ("\n".join(reasons) or f"{study.path} has no curves"))
    record = {
        "study": study.definition.name,
        "draws": draws or study.definition.fit.draws,
        "seed": seed,
        "smoothing": study.definition.about.smoothing,
        "laws": [one.to_json() for one in laws],
    }
    write_atomically(study.path / "fit.json", json.dumps(record, indent=1) + "\n")
    return laws, record


def finish_all(study: Study) -> dict[str, RunCurve]:
    """The curves of all cells with one, by name. Writes curves of ended runs as CSV, and all curves as parquet."""
    curves = {}
    for cell in study.cells():
        if cell.is_pending:
            continue
        study.finish(cell)
        if (curve := study.curve(cell)) is not None:
            curves[cell.name] = curve
    write_parquet(study.path / "curves.parquet", curves)
    return curves


def interval(constant: FittedNumber) -> str:
    """The interval in words: "0.31 to 0.36", or "unknown"."""
    return f"{constant.low:.4g} to {constant.high:.4g}" if constant.low <= constant.high else "unknown"


def window_row(name: str, found: FrontierEstimate) -> list[str]:
    """Row of a window: its C, points, three exponents with intervals, residual of L(C), residual of the identity."""
    cells = [name, f"{found.window[0]:.3g} to {found.window[1]:.3g}", f"{len(found.frontier.compute):,}"]
    for law in found.laws.values():
        cells.append(f"{law.exponent.value:.4f} ({interval(law.exponent)})")
    return [*cells, f"{found.laws['loss'].residual:.2%}", f"{found.identity_residual:+.1e}"]


WINDOW_HEADINGS = ("window", "C, PFLOP-days", "points", "L ∝ C^", "N_opt ∝ C^", "D_opt ∝ C^", "RMS residual", "a+b+c-1")


def _print_architecture(laws: ArchitectureLaws, console: Console) -> None:
    console.print(f"\n{laws.architecture}, {len(laws.curves)} runs; {COUNTINGS[laws.counting]}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in WINDOW_HEADINGS:
        table.add_column(heading, overflow="fold", justify="left" if heading == "window" else "right")
    every: dict[str, FrontierEstimate | str] = dict(laws.windows)
    every["isoFLOP"] = laws.isoflop if isinstance(laws.isoflop, str) else laws.isoflop.laws
    refused: dict[str, list[str]] = {}
    for name, found in every.items():
        if isinstance(found, str):
            refused.setdefault(found, []).append(name)
        else:
            # Intervals in lines of their own, so that no number is cut off.
            table.add_row(*(cell.replace(" (", "\n(") for cell in window_row(name, found)))
    if table.row_count:
        console.print(table)
    for reason, names in refused.items():
        # Behind the first line stands what each size has seen, which the report shows.
        console.print(f"{', '.join(names)}: {reason.splitlines()[0]}")
    if isinstance(laws.surface, str):
        console.print(f"surface: {laws.surface}")
    else:
        _print_surface(laws.surface, console)


def _print_surface(estimate: SurfaceEstimate, console: Console) -> None:
    table = plain_table(["constant"], ["value", "95 % interval"], has_notes=True)
    for name, constant in estimate.constants.items():
        table.add_row(name, f"{constant.value:.5g}", interval(constant), _MEANINGS.get(name, ""))
    console.print("loss = E + A / N^alpha + B / D^beta")
    console.print(table)
    console.print(
        f"{estimate.num_points:,} points of {estimate.num_runs:,} runs; residual {estimate.residual:.2%} (RMS); "
        "intervals: bootstrap over runs"
    )
