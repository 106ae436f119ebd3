"""With this folder on PYTHONPATH every process of a twin computes, from its import of PyTorch to its end.

So whole commands run on the twin with all the processes that they start: launchers, ranks, workers of pytest, pools.
Packages that TWIN_HIDES names are not found, as on a machine without them.
Python imports a module of this name at its start, before anything else.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import DistributionFinder, PathDistribution
from types import ModuleType


class _BehindTorch(MetaPathFinder, Loader):
    """Imports PyTorch as ever, and then lets its operations be computed; processes without it are not held up."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Of PyTorch, once."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            assert spec.loader is not None
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As PyTorch's own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """PyTorch's own, and the mode that computes, for good."""
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # What these import needs PyTorch.
        from cuda_twin.forks import keep_devices_unused  # noqa: PLC0415

        keep_devices_unused()
        from cuda_twin.computing import Computing  # noqa: PLC0415

        Computing().__enter__()


class _WithoutHidden(PathFinder):
    """Python's own, which finds nothing of what is hidden."""

    names = frozenset(os.environ.get("TWIN_HIDES", "").split(","))

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for a module of a hidden package."""
        if fullname.partition(".")[0] in cls.names:
            return None
        return super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, context: DistributionFinder.Context | None = None) -> Iterable[PathDistribution]:
        """Not those that are hidden: pytest loads plugins by their entry points."""
        found = super().find_distributions(context or DistributionFinder.Context())
        return (one for one in found if _canonical(one.name) not in cls.names)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


sys.meta_path[sys.meta_path.index(PathFinder)] = _WithoutHidden
if os.environ.get("NULL_DEVICE_COMPUTES") == "1":
    sys.meta_path.insert(0, _BehindTorch())
