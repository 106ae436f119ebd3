#!/usr/bin/env python
"""Draws what ``bench.py kernels --save`` has written: ``python tools/plot_kernels.py FILE.json`` writes FILE.png."""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_kernels import TARGET_DEVICE
from benchmarks.subjects import FLA, OURS, PASSES, SOFTMAX
from lightscale.errors import UserError

COLORS = {OURS: "tab:blue", FLA: "tab:orange", SOFTMAX: "tab:gray"}


def check_matplotlib() -> None:
    """Refuse before anything is measured.

    Raises:
        UserError: there is no matplotlib.
    """
    if find_spec("matplotlib") is None:
        raise UserError("the picture needs matplotlib, of the extra `dev`; use `pip install matplotlib`")


def draw(figures: dict[str, Any], path: Path) -> None:
    """ns per token-head over tokens, a column for each operator and a row for each pass."""
    # Optional, and slow to import. Figure instead of pyplot: there may be no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    operators = [name for name in dict.fromkeys(x["operator"] for x in figures["lines"]) if name != SOFTMAX]
    figure = Figure(figsize=(3.4 * max(len(operators), 2), 7.5), layout="constrained")
    grid = figure.subplots(len(PASSES), len(operators), sharex=True, sharey="row", squeeze=False)
    for row, passes in zip(grid, PASSES, strict=True):
        for axes, operator in zip(row, operators, strict=True):
            _panel(axes, figures, operator, passes)
        row[0].set_ylabel(f"{passes}\nns per token and head")
    for axes, operator in zip(grid[0], operators, strict=True):
        axes.set_title(operator, fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("tokens (rows x length)")
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    figure.suptitle(
        f"{figures['device']}, {figures['dtype']}, {figures['heads']} heads of width {figures['width']}, "
        f"{figures['machine']['date']}\n"
        f"copy {figures['copy_gb_per_s']:,.0f} GB/s, product {figures['matmul_tflop_per_s']:,.3g} TFLOP/s"
    )
    figure.savefig(path, dpi=120)


def _panel(axes: Any, figures: dict[str, Any], operator: str, passes: str) -> None:
    """One operator and pass: every way, our floor and target, softmax attention."""
    lines = [x for x in figures["lines"] if x["passes"] == passes]
    of_operator = [x for x in lines if x["operator"] == operator]
    for way in dict.fromkeys(x["way"] for x in of_operator):
        color = COLORS.get(way, "tab:green")
        chosen = [x for x in of_operator if x["way"] == way]
        _curve(axes, chosen, "ns_per_token_head", label=way, color=color, marker="o")
        _curve(axes, [x for x in chosen if x["floor_ns"]], "floor_ns", label="floor", color=color, linestyle=":")
    softmax = [x for x in lines if x["operator"] == SOFTMAX]
    _curve(axes, softmax, "ns_per_token_head", label="softmax attention (flash)", color=COLORS[SOFTMAX], marker="s")
    target = figures["targets_ns"].get(operator, {}).get(passes) if TARGET_DEVICE in figures["device"] else None
    if target is not None:
        axes.axhline(target, color="tab:red", linestyle="--", linewidth=1, label="target")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    ticks = sorted({x["rows"] * x["tokens"] for x in lines})
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])


def _curve(axes: Any, lines: list[dict[str, Any]], value: str, *, label: str, color: str, **style: Any) -> None:
    if not lines:
        return
    fewest = min(x["rows"] for x in lines)
    points, others = (
        sorted((x["rows"] * x["tokens"], x[value]) for x in lines if (x["rows"] == fewest) == connected)
        for connected in (True, False)
    )
    axes.plot(*zip(*points, strict=True), label=label, color=color, linewidth=1.3, markersize=4, **style)
    if others and "marker" in style:
        label = f"the same, more rows than {fewest}"
        open_markers = {"linestyle": "none", "fillstyle": "none", "markersize": 7}
        axes.plot(*zip(*others, strict=True), color=color, label=label, **style, **open_markers)


def _short(tokens: int) -> str:
    """131072 -> "128K"."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return str(tokens)


def main(arguments: list[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="JSON file of `bench.py kernels --save`")
    args = parser.parse_args(arguments)
    try:
        check_matplotlib()
        if not args.file.is_file():
            raise UserError(f"{args.file}: no such file")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return UserError.EXIT_CODE
    path = args.file.with_suffix(".png")
    draw(json.loads(args.file.read_text(encoding="utf-8")), path)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
