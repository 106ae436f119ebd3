"""``--plot PATH`` of commands: a figure by matplotlib, which is installed with lightscale[study] only."""

from pathlib import Path
from typing import TYPE_CHECKING

from lightscale.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 130


def check_plot_path(path: Path) -> None:
    """Raise UserError for a suffix or a folder that cannot be, before work begins."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"--plot {path}: a picture has the suffix {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: no folder {path.parent}; create it first")


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of this size in inches. UserError where matplotlib is not installed."""
    try:
        # Only where a picture is asked for.
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise UserError("--plot needs matplotlib; pip install 'lightscale[study]'") from None
    return Figure(figsize=(width, height), layout="constrained")
