"""Heatmaps of needles, over lengths and depths."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def draw(
    path: Path, heatmap: Mapping[str, Any], *, grade: str, worst_rank: int, title: str, depth_of: str = "length"
) -> bool:
    """Write a PNG file with the grade and the rank of each cell; False where matplotlib is not installed.

    Args:
        path: of the file.
        heatmap: lengths (n,) in tokens, depths (m,) from 0 to 1, and rows (m, n) of ``grade`` and rank, None where
            there is no prompt.
        grade: name of the drawn quantity, from 0 to 1.
        worst_rank: the last place.
        title: of the picture.
        depth_of: the whole that depths are shares of.
    """
    try:
        # Optional, and slow to import.
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return False
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title)
    # Green is good in both.
    for axes, name, limits, colors in zip(
        figure.subplots(1, 2), (grade, "rank"), ((0, 1), (1, worst_rank)), ("RdYlGn", "RdYlGn_r"), strict=True
    ):
        values = np.array(heatmap[name], dtype=float)
        image = axes.imshow(values, vmin=limits[0], vmax=limits[1], cmap=colors, aspect="auto", interpolation="none")
        axes.set_facecolor("lightgrey")
        axes.set_xticks(*_ticks([str(length) for length in heatmap["lengths"]]), rotation=45)
        axes.set_yticks(*_ticks([f"{depth:.0%}" for depth in heatmap["depths"]]))
        axes.set(xlabel="length in tokens", ylabel=f"depth of the needle, of the {depth_of}", title=name)
        figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=120, format="png")
    return True


def _ticks(labels: Sequence[str]) -> tuple[list[int], list[str]]:
    """At most a dozen of them."""
    numbers = list(range(0, len(labels), -(-len(labels) // 12)))
    return numbers, [labels[number] for number in numbers]
