"""The report of a study as one HTML file: curves, laws beside published numbers, evaluations."""

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightscale.errors import UserError
from lightscale.output.html import Html
from lightscale.study.cells import Cell
from lightscale.study.fit_output import WINDOW_HEADINGS, finish_all, fit, interval, window_row
from lightscale.study.fits.curves import PFLOP_DAY
from lightscale.study.fits.frontier import FrontierEstimate
from lightscale.study.fits.optimum import optimum
from lightscale.study.history import RunCurve
from lightscale.study.laws import BETWEEN, COUNTINGS, WINDOWS, ArchitectureLaws
from lightscale.study.published import TABLE_3
from lightscale.study.report.pictures import Line, curves_picture, isoflop_picture, laws_picture, lines_picture
from lightscale.study.report.scores import add_scores
from lightscale.study.report.search import add_search
from lightscale.study.report.seeds import add_seeds
from lightscale.study.search_results import search_results
from lightscale.study.study import Study, SweepChoice

_LAW_NAMES = ("loss", "parameters", "tokens")


@dataclass(frozen=True)
class StudyReport:
    """The page, and its first picture as SVG: the laws of all architectures, or None without a law."""

    page: str
    laws_picture: str | None


def make_report(study: Study, *, draws: int | None, seed: int, now: datetime.datetime) -> StudyReport:
    """Make the report as HTML and SVG. Raises `UserError` if no cell has a curve yet."""
    curves = finish_all(study)
    if not curves:
        raise UserError(f"{study.path} has no curves yet; run `lightscale study run {study.definition.path}` first")
    html = Html(f"Study {study.definition.name}")
    cells = study.cells()
    _add_beginning(html, study, cells, curves, now)
    picture = None
    if (search := study.definition.search) is not None:
        # Trials differ in more than size and tokens: no law is one of theirs.
        add_search(html, search, search_results(study))
    else:
        add_seeds(html, study, cells, curves)
        picture = _fit_laws(html, study, curves, draws=draws, seed=seed)
        _add_sweep(html, study, cells)
        add_scores(html, study, cells, curves)
    _add_cells(html, study, cells, curves)
    return StudyReport(html.text(), picture)


def _fit_laws(html: Html, study: Study, curves: dict[str, RunCurve], *, draws: int | None, seed: int) -> str | None:
    try:
        laws, _ = fit(study, curves, draws=draws, seed=seed)
    except UserError as error:
        # The curves and cells are worth a look all the same.
        html.heading("Laws")
        html.lines(str(error))
        return None
    return _add_laws(html, laws)


def _add_beginning(
    html: Html, study: Study, cells: Sequence[Cell], curves: dict[str, RunCurve], now: datetime.datetime
) -> None:
    if study.definition.about.about:
        html.paragraph(study.definition.about.about)
    finished = sum(study.finished_record(cell) is not None for cell in cells)
    html.paragraph(
        f"{finished} of {len(cells)} cells are finished; the report shows {len(curves)} curves. Created by `lightscale "
        f"study report {study.definition.path.name}` on {now:%Y-%m-%d}. Losses: measured. FLOPs, parameters: counted."
    )
    factor, skip = study.definition.about.smoothing, study.definition.fit.skip
    html.paragraph(
        f"The loss at D tokens is read from a line through log loss over log D, fitted to the steps from D/{factor:g} "
        f"to {factor:g}·D. Steps repeated after a failure count once. Fits of laws leave out the warm-up "
        f"and the first {skip:.1%} of a run. C is in PFLOP-days (8.64e19 FLOPs), N excludes the embedding.",
        note=True,
    )


def _add_laws(html: Html, laws: Sequence[ArchitectureLaws]) -> str | None:
    html.heading("All architectures")
    frontiers = {one.architecture: one.frontier for one in laws if one.counting == "ours" and one.frontier}
    picture = laws_picture(frontiers) if frontiers else None
    if picture is not None:
        html.picture(picture, f"Points: envelopes. Lines: power laws. {COUNTINGS['ours']}.")
    html.heading("Table 3: this study and the published numbers", 3)
    rows, published = _table_3(laws)
    html.table(("architecture", "counted", "L(C)", "N_opt(C)", "D_opt(C)", "a + b + c - 1"), rows, published=published)
    html.paragraph(
        "In grey italics: arXiv 2406.16690, Table 3, whose unit of C is most probably the PFLOP-day. Data, sizes and "
        "budgets differ: do not compare coefficients, and compare exponents with care. a, b and c are the exponents of "
        "N_opt, D_opt and C/(N·D); their sum is 1 if all are fitted at the same C.",
        note=True,
    )
    for one in laws:
        _add_architecture(html, one)
    return picture


def _table_3(laws: Sequence[ArchitectureLaws]) -> tuple[list[list[str]], list[int]]:
    rows: list[list[str]] = []
    published = []
    for architecture in dict.fromkeys(one.architecture for one in laws):
        for one in laws:
            if one.architecture == architecture:
                rows.append([architecture, one.counting, *_found_laws(one.frontier)])
        if architecture in TABLE_3:
            published.append(len(rows))
            texts = [f"{coefficient:.4g} C^{exponent:.4f}" for coefficient, exponent in TABLE_3[architecture]]
            total = sum(exponent for _, exponent in TABLE_3[architecture][1:])
            rows.append([architecture, "published", *texts, f"a + b = {total:.3f}"])
    return rows, published


def _found_laws(frontier: FrontierEstimate | None) -> list[str]:
    if frontier is None:
        return ["—"] * 4
    texts = []
    for name in _LAW_NAMES:
        law = frontier.laws[name]
        texts.append(f"{law.coefficient.value:.4g} C^{law.exponent.value:.4f} ({interval(law.exponent)})")
    return [*texts, f"{frontier.identity_residual:+.1e}"]


def _add_architecture(html: Html, laws: ArchitectureLaws) -> None:
    html.heading(f"{laws.architecture}, {laws.counting}")
    html.paragraph(f"{len(laws.curves)} runs. {COUNTINGS[laws.counting]}.", note=True)
    svg = curves_picture(laws.curves, laws.frontier, laws.architecture)
    which = "where the next smaller and larger models have data" if _is_between(laws) else "complete"
    html.picture(svg, f"Loss of every run during training; the envelope ({which}) and its power law.")
    rows, refused = [], {}
    for name, found in _estimates(laws):
        if isinstance(found, str):
            refused[name] = found
        else:
            rows.append(window_row(name, found))
    if rows:
        html.table(WINDOW_HEADINGS, rows)
        meanings = "; ".join(f"{name}: {text}" for name, text in WINDOWS.items())
        html.paragraph(f"The exponents by window. {meanings}. In brackets: 95 % intervals.", note=True)
    for reason in dict.fromkeys(refused.values()):
        html.lines(f"{', '.join(name for name, text in refused.items() if text == reason)}: {reason}")
    if not isinstance(laws.isoflop, str):
        svg = isoflop_picture(laws.isoflop, f"{laws.architecture}: equal compute")
        html.picture(svg, "Points: losses at equal compute. Lines: parabolas over log N. Crosses: their minima.")
    if isinstance(laws.surface, str):
        html.lines(f"loss surface: {laws.surface}")
    else:
        surface = laws.surface
        rows = [[name, f"{one.value:.5g}", interval(one)] for name, one in surface.constants.items()]
        html.paragraph("L = E + A/N^alpha + B/D^beta, fitted with the Huber loss of log L:")
        html.table(("constant", "value", "95 % interval"), rows)
        html.paragraph(
            f"{surface.num_points} points of {surface.num_runs} runs; residual {surface.residual:.2%} (RMS).",
            note=True,
        )


def _is_between(laws: ArchitectureLaws) -> bool:
    return not isinstance(laws.windows[BETWEEN], str)


def _estimates(laws: ArchitectureLaws) -> Iterator[tuple[str, FrontierEstimate | str]]:
    yield from laws.windows.items()
    yield "isoFLOP", laws.isoflop if isinstance(laws.isoflop, str) else laws.isoflop.laws


def _add_sweep(html: Html, study: Study, cells: Sequence[Cell]) -> None:
    sweep, choices = study.definition.sweep, study.choices(cells)
    if sweep is None:
        return
    html.heading(f"Sweep of {sweep.key}")
    lines = [
        Line(
            label=" ".join(one.choice) or "all",
            x=np.array(sorted(one.losses)),
            y=np.array([one.losses[value] for value in sorted(one.losses)]),
        )
        for one in choices
        if one.losses
    ]
    if lines:
        html.picture(lines_picture(lines, x=sweep.key, y="loss, nats per token", marked=True), "Last smoothed losses.")
    rows = [
        [
            " ".join(one.choice) or "all",
            "—" if one.value is None else f"{one.value:g}",
            "—" if one.value is None else f"{one.losses[one.value]:.4f}",
            "—" if one.missing else _lowest(one),
            one.warning or (f"waits for {len(one.missing)} runs" if one.missing else ""),
        ]
        for one in choices
    ]
    html.table((", ".join(sweep.per) or "for", f"best {sweep.key}", "loss", "lowest point (95 %)", ""), rows)


def _lowest(choice: SweepChoice) -> str:
    found = optimum({value: [loss] for value, loss in choice.losses.items()})
    return "—" if isinstance(found, str) else found.text()


def _add_cells(html: Html, study: Study, cells: Sequence[Cell], curves: dict[str, RunCurve]) -> None:
    html.heading("Cells")
    rows = []
    for cell in cells:
        counts, curve = study.counts(cell), curves.get(cell.name)
        if cell.stopped is not None:
            state = "lost"
        else:
            is_finished = study.finished_record(cell) is not None
            state = "finished" if is_finished else "waits" if curve is None else "on its way"
        row = [cell.name, state, f"{counts.parameters:,}", f"{cell.config.optimizer.lr:g}"]
        if curve is None:
            rows.append([*row, "—", "—", "—", "—"])
        else:
            tokens, compute = f"{curve.tokens[-1]:.4g}", f"{curve.flops[-1] / PFLOP_DAY:.3g}"
            rows.append([*row, tokens, compute, f"{curve.seconds[-1]:,.0f}", f"{curve.smoothed[-1]:.4f}"])
    html.table(("cell", "", "N", "lr", "tokens", "PFLOP-days", "seconds", "loss"), rows)
