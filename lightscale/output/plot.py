"""``--plot PATH`` of commands: a figure by matplotlib, which is installed with lightscale[study] only."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from lightscale.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 130


def check_plot_path(path: Path) -> None:
    """Raise UserError, before work begins, for a suffix or a folder that cannot be, or without matplotlib."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"--plot {path}: a picture has the suffix {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: no folder {path.parent}; create it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib; pip install 'lightscale[study]'")


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of this size in inches, behind ``check_plot_path``."""
    # Only where a picture is asked for: it is optional, and takes long to import.
    from matplotlib.figure import Figure  # noqa: PLC0415

    return Figure(figsize=(width, height), layout="constrained")
