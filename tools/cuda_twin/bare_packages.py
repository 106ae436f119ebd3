"""Packages of this environment that a bare machine lacks: what neither it nor the folder of ``make bundle`` has.

A bare machine has PyTorch and Triton with their requirements. The bundle brings those of lightscale without extras, and
pytest with its limit of time.
"""

from importlib.metadata import PackageNotFoundError, distributions, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

THERE = ("torch", "triton", "pip", "setuptools", "lightscale", "pytest", "pytest-timeout")
"""Distributions with all that they require."""


def lacking() -> frozenset[str]:
    """The other distributions, and the names of their top-level modules."""
    there = _with_requirements(THERE)
    # Once setuptools is imported, copies of its requirements inside it are found too: they are there where it is.
    own = [one for one in distributions() if "_vendor" not in Path(str(one.locate_file(""))).parts]
    installed = {str(canonicalize_name(one.name)) for one in own}
    found = installed - there
    for module, owners in packages_distributions().items():
        of_module = installed.intersection(map(canonicalize_name, owners))
        if of_module and there.isdisjoint(of_module):
            found.add(module)
    return frozenset(found)


def _with_requirements(names: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needed = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            continue
        waiting += [canonicalize_name(one.name) for one in needed if one.marker is None or one.marker.evaluate()]
    return found
