"""Curves over resolution: accuracy, speed and memory of each run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightscale.output.plot import DOTS_PER_INCH, new_figure

_PANELS = {
    "accuracy": ("top-1 accuracy", 1.0, "linear"),
    "top5_accuracy": ("top-5 accuracy", 1.0, "linear"),
    "images_per_s": ("images per second", 1.0, "log"),
    "peak_memory_bytes": ("memory of a pass, MiB", 2.0**20, "log"),
}
"""Key, title, divisor and scale of each."""


def draw(path: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write the picture; ``runs``: records of each run. Sizes without a number, such as out of memory, are skipped."""
    figure = new_figure(11, 7)
    for axes, (key, (title, divisor, scale)) in zip(figure.subplots(2, 2).flat, _PANELS.items(), strict=True):
        for name, records in runs.items():
            points = [(one["image_size"][0], one[key] / divisor) for one in records if one[key]]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=Path(name).name)
        axes.set(xlabel="height of the images, pixels", title=title, yscale=scale)
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=max(1, len(runs)))
    figure.savefig(path, dpi=DOTS_PER_INCH)
