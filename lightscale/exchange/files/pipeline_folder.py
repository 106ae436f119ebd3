"""Folders in diffusers' layout, which an export of a diffusion run is and nothing here reads back."""

from pathlib import Path

from lightscale.errors import UserError

INDEX = "model_index.json"


def refuse_pipeline(path: Path) -> None:
    """Raise ``UserError`` for a folder in diffusers' layout, and for the model in one."""
    for folder in (path, path.parent):
        if (folder / INDEX).is_file():
            raise UserError(
                f"{path}: {folder / INDEX} is of a pipeline of diffusers, which is not read back; use the run, or the "
                "export's pipeline.py"
            )
