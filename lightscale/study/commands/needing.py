"""Late imports of modules that need optional packages, such as scipy for fits."""

import importlib
from types import ModuleType

from lightscale.errors import UserError


def needing(module: str) -> ModuleType:
    """Import `module`. Raises `UserError` if a package that it needs is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"fits and reports need {error.name}: pip install 'lightscale[study]'") from error
