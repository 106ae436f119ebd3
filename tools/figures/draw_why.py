#!/usr/bin/env python
"""The picture of README: ``python tools/figures/draw_why.py [FOLDER] [--png]``, for light and dark pages.

Left the bytes that stand for all earlier tokens in one layer, counted from the shapes of the shipped 1B models. Right
their training speed on 8 nodes of 8 H100 as ``lightscale plan --nodes 8 --length 8K..4M`` predicts it.
"""

import argparse
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightscale.config.files import load
from lightscale.planning.hardware import HARDWARE
from lightscale.planning.search import Fixed, best_layouts
from lightscale.planning.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
MODELS = {"llama-1b": "LLaMA", "tnl-1b": "TNL", "gated-delta-net-1b": "Gated DeltaNet"}
LENGTHS = tuple(2**power for power in range(13, 23))
_COLOURS = {"llama-1b": "#d1495b", "tnl-1b": "#2a7de1", "gated-delta-net-1b": "#1a936f"}
# TNL and gated DeltaNet keep as much of the past: one line lies on the other.
_DASHES = {"gated-delta-net-1b": "--"}
_THEMES = {"light": "#1f2328", "dark": "#d9dee4"}
_FP32_BYTES, _BF16_BYTES = 4, 2
_NODES = 8


def past_bytes(name: str, length: int) -> int:
    """Of one layer and sequence: the state of a linear mixer in fp32, or keys and values in bf16."""
    work = Workload(load(name).model, length)
    layer = work.layers[-1]  # the first one of TNL has features of twice the width (LRPE)
    if layer.has_state:
        return _FP32_BYTES * work.summary(layer, 1).state
    return _BF16_BYTES * layer.gathered * length


@cache
def tokens_per_s(name: str, length: int) -> float:
    """Of the best layout, predicted."""
    best = best_layouts(load(name), nodes=_NODES, sequence_length=length, hardware=HARDWARE["h100"], fixed=Fixed())[0]
    return best.tokens_per_s if best.fits else float("nan")


def draw(theme: str) -> Figure:
    """Both panels in the colours of a page."""
    ink = _THEMES[theme]
    style: dict[Any, Any] = {
        "font.size": 11,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name, label in MODELS.items():
            look: dict[str, Any] = {"color": _COLOURS[name], "linestyle": _DASHES.get(name, "-"), "label": label}
            past = [past_bytes(name, length) / 2**20 for length in LENGTHS]
            left.loglog(LENGTHS, past, marker="o", markersize=4, **look)
            speed = [tokens_per_s(name, length) / 1e6 for length in LENGTHS]
            right.semilogx(LENGTHS, speed, marker="o", markersize=4, **look)
        left.set_ylabel("MiB per layer and sequence")
        left.set_title("Keys and values grow, a state does not (counted)", fontsize=11)
        right.set_ylabel("million tokens/s")
        right.set_ylim(bottom=0)
        right.set_title("Training 1B models on 64 H100 (predicted)", fontsize=11)
        for axes in (left, right):
            _finish(axes)
        left.legend(frameon=False)
    return figure


def _finish(axes: Axes) -> None:
    axes.set_xlabel("context, tokens")
    axes.set_xticks(LENGTHS[::3], [_short(length) for length in LENGTHS[::3]])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.patch.set_visible(False)


def _short(length: int) -> str:
    return f"{length >> 20}M" if length >= 2**20 else f"{length >> 10}K"


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "images", help="default: docs/images")
    parser.add_argument("--png", action="store_true", help="PNG files, to look at")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    # Also where the file is written, or every drawing would have other names of its parts.
    mpl.rcParams["svg.hashsalt"] = "why"
    for theme in _THEMES:
        path = options.folder / f"why-{theme}.{'png' if options.png else 'svg'}"
        draw(theme).savefig(path, transparent=True, metadata=None if options.png else {"Date": None})
        print(path)


if __name__ == "__main__":
    main()
