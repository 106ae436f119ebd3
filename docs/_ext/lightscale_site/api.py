"""The public functions of the operators in `lightscale.kernels`, for autodoc."""

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import lightscale
from lightscale_site.markdown import block


def kernels_text() -> str:
    """A section for each folder with a public operator: what it computes, then its functions and types."""
    folder = Path(str(lightscale.__file__)).parent / "kernels"
    names = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    modules = [importlib.import_module(f"lightscale.kernels.{name}") for name in names]
    return "\n".join(_section(module) for module in modules if hasattr(module, "__all__"))


def _section(module: ModuleType) -> str:
    members = [name for name in module.__all__ if _is_shown(getattr(module, name), module.__name__)]
    lines = [f".. automodule:: {module.__name__}", f"   :members: {', '.join(members)}", "   :imported-members:"]
    return f"### {module.__name__}\n\n" + block("\n".join(lines), "{eval-rst}")


def _is_shown(member: object, package: str) -> bool:
    """Functions and classes of the package itself: what several share has its place once."""
    is_code = inspect.isfunction(member) or inspect.isclass(member)
    return is_code and str(getattr(member, "__module__", "")).startswith((package, f"{_COMMON}.backends"))


_COMMON = "lightscale.kernels.common"
