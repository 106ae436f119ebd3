"""Shipped configurations by name, and the search for a CONFIG or a file's `extends`."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from lightscale.config.text import path_fault
from lightscale.errors import UserError, shortened

FOLDER = Path(__file__).resolve().parents[1] / "configs"
"""Part of the package, both in a clone and in an installed wheel."""
STUDIES = FOLDER / "studies"
PARTS = ("arch", "size", "recipe")
"""Folders of parts that runs extend; see the README there."""

_SUFFIX = ".toml"
# Of a folder's files, in a message.
_MOST_NAMES = 50


def run_names() -> list[str]:
    """Names of the shipped runs, such as `tnl-1b`, for CONFIG."""
    return _stems(FOLDER)


def part_names() -> dict[str, list[str]]:
    """Names for `extends` in addition to the runs, such as `arch/tnl`, by folder."""
    return {part: [f"{part}/{name}" for name in _stems(FOLDER / part)] for part in PARTS}


def study_names() -> list[str]:
    """Names of the shipped studies, such as `two-cores`, for STUDY."""
    return _stems(STUDIES)


def shipped_file(name: str) -> Path:
    """The file of a run or part named by `run_names` or `part_names`."""
    return FOLDER / f"{name}{_SUFFIX}"


def find_config(given: Path) -> Path:
    """The file that CONFIG names: a path, or a shipped run, with or without `.toml`.

    Raises UserError with the nearest names and the folders searched.
    """
    if fault := path_fault(str(given)):
        raise UserError(f'CONFIG "{shortened(str(given))}": {fault}')
    if _is_there(given):
        return given
    if (name := str(given).removesuffix(_SUFFIX)) in (names := run_names()):
        return shipped_file(name)
    # A folder: reading it says so.
    if given.is_dir():
        return given
    looked = [given.parent] if len(given.parts) > 1 else [Path(), FOLDER]
    raise UserError(f"no configuration file {given}; {_advice(given, names, looked)}")


def find_base(base: str, of: Path) -> Path:
    """The file that `extends` names in the file `of`: relative to it, or shipped; with or without `.toml`."""
    beside = Path(os.path.normpath(of.parent / base))
    for path in (beside, beside.with_name(f"{beside.name}{_SUFFIX}")):
        if _is_there(path):
            return path
    names = [*(name for own in part_names().values() for name in own), *run_names()]
    if (name := os.path.normpath(base).removesuffix(_SUFFIX)) in names:
        return shipped_file(name)
    looked = list(dict.fromkeys([beside.parent, FOLDER]))
    raise UserError(f'{of}: extends "{base}": no such file; {_advice(Path(base), names, looked)}')


def _stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob(f"*{_SUFFIX}"))


def _is_there(path: Path) -> bool:
    """Whether `path` is there and no folder; reading it says what is wrong with a pipe."""
    try:
        return path.exists() and not path.is_dir()
    except OSError:
        # It may be there and must not be seen: reading it says why.
        return True


def _advice(wanted: Path, shipped: Iterable[str], looked: list[Path]) -> str:
    """The files of the first folder and the shipped names that are nearly `wanted`, and where it was looked for."""
    stem = wanted.name.removesuffix(_SUFFIX)
    there = {path.stem: str(path) for path in sorted(looked[0].glob(f"*{_SUFFIX}"))}
    near = [there[name] for name in difflib.get_close_matches(stem, there, n=1)]
    near += _nearest_shipped(wanted, shipped)
    where = f"searched {' and '.join(map(str, looked))}"
    if near:
        return f"did you mean {' or '.join(near)}? ({where})"
    names = ", ".join([*there.values()][:_MOST_NAMES]) or "no TOML files"
    if len(there) > _MOST_NAMES:
        names += f" and {len(there) - _MOST_NAMES} more"
    return f"{looked[0]} has {names}; `lightscale configs` lists the shipped ones ({where})"


def _nearest_shipped(wanted: Path, shipped: Iterable[str]) -> list[str]:
    """By the whole name, then by its last part: `configs/tnl-1b.toml` of a clone is `tnl-1b` elsewhere."""
    names = list(shipped)
    for text in (str(wanted), wanted.name):
        if found := difflib.get_close_matches(text.removesuffix(_SUFFIX), names, n=1):
            return [f"the shipped {found[0]}"]
    return []
