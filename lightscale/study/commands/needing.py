"""Modules that need what not every installation has, imported when they are needed: fits import scipy."""

import importlib
from types import ModuleType

from lightscale.errors import UserError


def needing(module: str) -> ModuleType:
    """The module called `module`; `UserError` where a package that it needs is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"fits and reports need {error.name}: pip install 'lightscale[study]'") from error
