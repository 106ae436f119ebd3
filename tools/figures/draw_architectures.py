#!/usr/bin/env python
"""Figures of the architectures: ``python tools/figures/draw_architectures.py [FOLDER] [--png]``, an SVG of each.

Left the model, right what its mixer computes. The same text gives the same files.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

_FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference" / "architectures" / "figures"
# Between white and black: the page behind is either.
_LINE = "#808080"
_BOX = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": _LINE, "linewidth": 1.0}
_STEP = 0.95


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One architecture."""

    columns: tuple[tuple[str, ...], ...]
    """What becomes of the input on its ways to the operator, bottom up; the first boxes are projections."""
    operator: str
    """What joins the columns."""
    behind: tuple[str, ...]
    """What follows, bottom up."""
    gate: tuple[str, ...] = ()
    """A way beside the operator, which meets the last but one box of ``behind``."""
    encoded: bool = False
    """Whether TPE stands behind the embedding."""
    activation: str = ""
    """Of the gated linear unit."""
    has_unit: bool = True
    """Whether blocks have one."""


_GATE = ("W_down W_up", "sigmoid")
FIGURES = {
    "tnl": Figure(
        columns=(("W_q", "silu", "LRPE (layer 0)"), ("W_k", "silu", "LRPE (layer 0)"), ("W_v",)),
        operator=r"$S_t = \lambda S_{t-1} + k_t v_t^T,\ \ o_t = S_t^T q_t$",
        behind=("norm over all heads", "times gate", "W_o"),
        gate=_GATE,
    ),
    "cosformer2": Figure(
        columns=(("W_q", "silu", "LRPE"), ("W_k", "silu", "LRPE"), ("W_v",)),
        operator=r"$S_t = S_{t-1} + k_t v_t^T,\ \ o_t = S_t^T q_t$",
        behind=("norm over all heads", "times gate", "W_o"),
        gate=_GATE,
        encoded=True,
    ),
    "lightnet": Figure(
        columns=(("W_q", "silu", "LRPE"), ("W_k", r"$\bar k_t = e^{k_t - z_t}$", "LRPE"), ("W_v",)),
        operator=r"$S_t = (1-\bar k_t) S_{t-1} + \bar k_t v_t^T,\ \ o_t = S_t^T q_t$",
        behind=("norm over all heads", "times gate", "W_o"),
        gate=_GATE,
        encoded=True,
        activation="silu",
    ),
    "hgrn2": Figure(
        columns=(("W_q", "silu"), ("W_f", r"$f = \beta + (1-\beta)\,\sigma$", "k = 1 - f"), ("W_v",)),
        operator=r"$S_t = \mathrm{diag}(f_t) S_{t-1} + k_t v_t^T,\ \ o_t = S_t^T q_t$",
        behind=("norm over all heads", "W_o"),
    ),
    "llama": Figure(
        columns=(("W_q", "RoPE"), ("W_k", "RoPE"), ("W_v",)),
        operator=r"$o_t = \Sigma_{s \leq t}\, \mathrm{softmax}_s(q_t^T k_s / \sqrt{k})\, v_s$",
        behind=("W_o",),
        activation="silu",
    ),
    "decay-attention": Figure(
        columns=(("W_q", r"$\phi$"), ("W_k", r"$\phi$"), ("W_v", "1 beside v (LION-S)"), ("w, b", r"$a$, $g$")),
        operator=r"$S_t = a_t S_{t-1} + g_t k_t [v_t, 1]^T,\ \ [y_t, z_t] = S_t^T q_t$",
        behind=(r"$y_t / (z_t + \epsilon)$, or norm and gate", "W_o"),
        activation="silu",
    ),
    "delta-net": Figure(
        columns=(
            ("W_q", "conv, silu", "length 1"),
            ("W_k", "conv, silu", "length 1"),
            ("W_v", "conv, silu"),
            (r"$W_\beta$, $W_\alpha$", r"$\beta$, $\alpha$"),
        ),
        operator=r"$S_t = (I - \beta_t k_t k_t^T)\,\alpha_t S_{t-1} + \beta_t k_t v_t^T,\ \ o_t = S_t^T q_t$",
        behind=("norm of each head", "times gate", "W_o"),
        gate=("W_g", "silu, or sigmoid"),
        activation="silu",
    ),
    "causal-rn": Figure(
        columns=(("W_a, c", "LN"), ("W_b", "LN", r"$z_t = \log \Sigma_{s \leq t}\, e^{b_s}$")),
        operator=r"$o_t = \exp(a_t + z_t)$",
        behind=("LN", "W_o, c_o"),
        has_unit=False,
    ),
    "lion": Figure(
        columns=(("W_q", r"$\phi$"), ("W_k", r"$\phi$"), ("W_v",), ("w, b", r"$a = \sigma$ (LION-S)")),
        operator=r"$o_i = \Sigma_j M_{ij}\, q_i^T k_j\, v_j\ /\ \Sigma_j M_{ij}\, q_i^T k_j$",
        behind=("W_o",),
        activation="silu",
    ),
}


def draw(figure: Figure) -> plt.Figure:
    """The picture."""
    drawn, axes = plt.subplots(figsize=(9, 5.6))
    axes.set_xlim(-1.4, 8.9)
    axes.set_ylim(-0.6, 7.6)
    axes.axis("off")
    _model(axes, figure)
    _mixer(axes, figure)
    return drawn


def _box(axes: Any, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=8.5, bbox=_BOX, zorder=5)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    look = {"arrowstyle": "->", "color": _LINE, "linewidth": 0.9, "shrinkA": 9, "shrinkB": 9}
    axes.annotate("", xy=end, xytext=start, arrowprops=look)


def _chain(axes: Any, x: float, y: float, names: tuple[str, ...]) -> float:
    """Boxes above each other from y on; the height of the last."""
    for number, name in enumerate(names):
        _box(axes, x, y + number * _STEP, name)
        if number:
            _arrow(axes, (x, y + (number - 1) * _STEP), (x, y + number * _STEP))
    return y + (len(names) - 1) * _STEP


def _model(axes: Any, figure: Figure) -> None:
    unit = f"GLU{f' ({figure.activation})' if figure.activation else ', no activation'}"
    first = ("embedding", "+ TPE") if figure.encoded else ("embedding",)
    block = ("norm", "mixer", *(("norm", unit) if figure.has_unit else ()))
    _chain(axes, 0.0, 0.0, (*first, *block, "norm", "logits (embedding)"))
    low, high = (len(first) - 0.45) * _STEP, (len(first) + len(block) - 0.55) * _STEP
    axes.add_patch(mpl.patches.Rectangle((-1.15, low), 2.3, high - low, fill=False, linestyle=":", color=_LINE))
    axes.text(1.2, (low + high) / 2, "x L", fontsize=9, color=_LINE)
    axes.text(-1.15, low - 0.18, "both added to", fontsize=6.5, color=_LINE, va="center")
    axes.text(0.45, low - 0.18, "their input", fontsize=6.5, color=_LINE, va="center")


def _mixer(axes: Any, figure: Figure) -> None:
    ways = [*figure.columns, *([figure.gate] if figure.gate else [])]
    places = [2.9 + 5.2 * number / max(1, len(ways) - 1) for number in range(len(ways))]
    top = max(len(column) for column in figure.columns) * _STEP + 0.75
    middle = sum(places[: len(figure.columns)]) / len(figure.columns)
    _box(axes, 5.3, -0.25, "x, normalised")
    for place, names in zip(places, ways, strict=True):
        _arrow(axes, (5.3, -0.25), (place, 0.85))
        end = _chain(axes, place, 0.85, names)
        if names is not figure.gate:
            # To the operator's box, which is wide where more goes in.
            reach = 0.45 if len(figure.columns) > 2 else 0.15
            _arrow(axes, (place, end), (middle + reach * (place - middle), top + 0.2))
    _box(axes, middle, top + 0.35, figure.operator)
    _arrow(axes, (middle, top + 0.35), (middle, top + 0.35 + _STEP))
    end = _chain(axes, middle, top + 0.35 + _STEP, figure.behind)
    if figure.gate:
        _arrow(axes, (places[-1], 0.85 + (len(figure.gate) - 1) * _STEP), (middle + 0.6, end - _STEP))


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=_FOLDER)
    parser.add_argument("--png", action="store_true", help="PNG files instead, to look at")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "lightscale"
    kind = "png" if arguments.png else "svg"
    for name, figure in FIGURES.items():
        drawn = draw(figure)
        metadata = None if arguments.png else {"Date": None}
        path = arguments.folder / f"{name}.{kind}"
        drawn.savefig(path, bbox_inches="tight", metadata=metadata, transparent=not arguments.png)
        plt.close(drawn)


if __name__ == "__main__":
    main()
