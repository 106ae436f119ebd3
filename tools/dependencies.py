"""Checks what is installed for development: licences, version ranges, and the lock file.

    python tools/dependencies.py           # exit code 1 and one line for each fault
    python tools/dependencies.py --lock    # write the lock file: the versions that are installed now
    python tools/dependencies.py --audit PIP_AUDIT    # known weaknesses of the lock file's versions, by that program

All packages that lightscale needs with its extra `dev`, directly or through others, are looked at.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

LOCK = Path(__file__).resolve().with_name("constraints.txt")
PROJECT = "lightscale"
EXTRAS = ("dev",)

# Terms under which lightscale may be used and passed on with them, as SPDX identifiers: permissive ones, and those that
# ask for the source of changed files of the package alone (MPL).
ALLOWED = {
    *(
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "ISC",
        "MIT",
        "MIT-0",
        "MIT-CMU",
    ),
    *("LLVM-exception", "MPL-2.0", "PSF-2.0", "Unlicense", "Zlib"),
}
# What packages write in place of an identifier, in their classifiers or in the old free field.
_NAMES = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
}
# Read by a person: packages whose metadata says nothing that a program could judge.
_READ = {
    "docutils": "BSD-2-Clause",  # and public domain; the GPL in its classifiers is of an Emacs mode outside the wheel
    "mpich": "LicenseRef-MPICH",  # permissive, BSD-like
}

# Weaknesses by their ids, with the reason why they are none here.
_WEAKNESSES: dict[str, str] = {}
_MOST_AUDIT_S = 300

_OPERATORS = frozenset({"AND", "OR", "WITH"})

# What PyTorch's build for GPUs asks for by exact versions, and its build for CPUs does not: the lock file fits both.
_OF_A_BUILD = ("cuda-", "nvidia-", "triton")
# NVIDIA's own libraries, under its own terms; whoever takes that build has accepted them.
_OF_NVIDIA = ("cuda-", "nvidia-")

# Debian 12 has 3.11.2, and pip reports a locked version that needs 3.11.5 as one that is not to be had.
_OLDEST_PYTHON = "3.11.0"


def main() -> int:
    """0 where everything is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lock", action="store_true", help="write the lock file")
    parser.add_argument("--audit", type=Path, metavar="PIP_AUDIT", help="the program, which asks an index")
    args = parser.parse_args()
    if args.audit is not None:
        return audit(args.audit)
    installed = needed(PROJECT, EXTRAS)
    if args.lock:
        LOCK.write_text(lock_text(installed), encoding="utf-8")
        print(f"{LOCK.name}: {len(installed)} packages")
        return 0
    locked = read_lock()
    faults = [*range_faults(installed), *licence_faults(installed), *lock_faults(installed, locked)]
    for fault in faults:
        print(fault, file=sys.stderr)
    # No fault: who wants other versions within the ranges may have them.
    for name in installed.keys() & locked.keys():
        if (here := public_version(installed[name])) != locked[name]:
            print(f"note: {name} {here} is installed, {LOCK.name} has {locked[name]}")
    if not faults:
        print(f"{len(installed)} packages: licences, ranges and lock file are correct")
    return int(bool(faults))


def audit(program: Path) -> int:
    """1 where a locked version has a known weakness; 0, with a line that says so, where no index answers."""
    words = ["--requirement", str(LOCK), "--no-deps", "--disable-pip", "--format", "json", "--timeout", "10"]
    try:
        done = subprocess.run(
            [str(program), *words, "--progress-spinner", "off"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_MOST_AUDIT_S,
        )
        packages = json.loads(done.stdout)["dependencies"]
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        print(f"skipped: pip-audit ({type(error).__name__}); no index answers it, or it is not installed")
        return 0
    found = [(one, weakness) for one in packages for weakness in one.get("vulns", [])]
    for one, weakness in found:
        better = ", ".join(weakness.get("fix_versions", [])) or "no version yet"
        reason = _WEAKNESSES.get(weakness["id"], "install that and run `make lock`, or add the reason to _WEAKNESSES")
        print(f"{one['name']} {one['version']}: {weakness['id']}; corrected in {better}; {reason}")
    # An index may have packages without what is known of them.
    num_known = sum("skip_reason" not in one for one in packages)
    print(f"pip-audit: of {len(packages)} packages the index knows {num_known}, and the others were skipped")
    return int(any(weakness["id"] not in _WEAKNESSES for _, weakness in found))


def needed(project: str, extras: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """What `project` with `extras` needs, directly or not, and is installed, by canonical name; without itself."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [(project, extras)]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        for requirement in requirements(*one):
            name = canonicalize_name(requirement.name)
            try:
                distribution = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                continue
            if name != project:
                found[name] = distribution
            waiting.append((name, tuple(sorted(requirement.extras))))
    return dict(sorted(found.items()))


def requirements(name: str, extras: tuple[str, ...]) -> Iterator[Requirement]:
    """What the installed package `name` with `extras` asks for on this machine."""
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def range_faults(installed: Mapping[str, metadata.Distribution]) -> Iterator[str]:
    """Ranges that what is installed is outside of, and our own requirements without a lowest version."""
    for owner in (PROJECT, *installed):
        for requirement in requirements(owner, EXTRAS if owner == PROJECT else ()):
            name = canonicalize_name(requirement.name)
            if name not in installed:
                if name != PROJECT:
                    yield f"{owner} needs {requirement}, which is not installed"
            elif not requirement.specifier.contains(installed[name].version, prereleases=True):
                yield f"{owner} needs {requirement}, but {installed[name].version} is installed"
            is_ours = owner == PROJECT and name != PROJECT
            # Types of a package follow the package's own range.
            if (
                is_ours
                and not name.startswith("types-")
                and not any(one.operator in (">=", "==", "~=") for one in requirement.specifier)
            ):
                yield f"pyproject.toml: {requirement} has no minimum version; use {name}>=…"


def licence_faults(installed: Mapping[str, metadata.Distribution]) -> Iterator[str]:
    """Packages whose licence is not one of `ALLOWED`, or says nothing."""
    for name, distribution in installed.items():
        if name.startswith(_OF_NVIDIA):
            continue
        if name in _READ:
            if (said := _field(distribution, "License-Expression")) not in (_READ[name], ""):
                yield f"{name} {distribution.version}: its licence is now {said}, it was {_READ[name]} when reviewed"
            continue
        licences = licences_of(distribution)
        if not licences:
            yield f"{name} {distribution.version}: its metadata has no licence; review the licence, and add it to _READ"
        elif unknown := sorted(licences - ALLOWED):
            yield f"{name} {distribution.version}: licence {', '.join(unknown)}, which is not allowed"


def licences_of(distribution: metadata.Distribution) -> set[str]:
    """SPDX identifiers of all parts of a package; of "A OR B" both, which is stricter than asked for."""
    data = distribution.metadata
    if expression := _field(distribution, "License-Expression"):
        return set(re.findall(r"[A-Za-z0-9.+-]+", expression)) - _OPERATORS
    classifiers = [one for one in data.get_all("Classifier") or [] if one.startswith("License ::")]
    names = {one.rpartition(" :: ")[2].lower() for one in classifiers} - {"dfsg approved", "osi approved"}
    if not names:
        # Whole licences stand in this field too; their first line is the name.
        names = {_field(distribution, "License").strip().partition("\n")[0].strip().lower()} - {""}
    # Some write an expression there too.
    parts = {part for name in names for part in ([name] if name in _NAMES else re.split(r" (?:and|or|with) ", name))}
    spelled = {allowed.lower(): allowed for allowed in ALLOWED}
    return {_NAMES.get(part, spelled.get(part, part)) for part in parts}


def _field(distribution: metadata.Distribution, name: str) -> str:
    return (distribution.metadata.get_all(name) or [""])[0]


def lock_text(installed: Mapping[str, metadata.Distribution]) -> str:
    """The lock file: a constraints file of pip. Builds of one version, such as torch's for CPUs, are one version."""
    lines = [f"{name}=={public_version(one)}" for name, one in installed.items() if not name.startswith(_OF_A_BUILD)]
    head = f"# Versions of the development environment on {_platform()}; written by `make lock`."
    return "\n".join([head, *lines, ""])


def public_version(distribution: metadata.Distribution) -> str:
    """Without the name of a build: 2.13.0 of 2.13.0+cpu."""
    return distribution.version.partition("+")[0]


def _platform() -> str:
    return f"Python {sys.version_info.major}.{sys.version_info.minor} on {sys.platform}"


def read_lock() -> dict[str, str]:
    """Version by name; {} for another Python or system than the lock file's, of which it says nothing."""
    text = LOCK.read_text(encoding="utf-8")
    if f" {_platform()};" not in text:
        return {}
    return dict(line.split("==") for line in text.splitlines() if line and not line.startswith("#"))


def lock_faults(installed: Mapping[str, metadata.Distribution], locked: Mapping[str, str]) -> Iterator[str]:
    """Packages that the lock file lacks, has without need, or has in a version for newer Pythons than lightscale's."""
    for name, distribution in installed.items():
        pythons = _field(distribution, "Requires-Python")
        is_locked = public_version(distribution) == locked.get(name)
        if is_locked and not SpecifierSet(pythons).contains(_OLDEST_PYTHON):
            yield (
                f"{LOCK.name} has {name} {locked[name]}, which needs Python {pythons}; lightscale runs on "
                f"{_OLDEST_PYTHON}: install an older version, and run `make lock`"
            )
    lockable = {name for name in installed if not name.startswith(_OF_A_BUILD)}
    if locked and (lacking := sorted(lockable - locked.keys())):
        yield f"{LOCK.name} lacks {', '.join(lacking)}; run `make lock`"
    if unneeded := sorted(locked.keys() - lockable):
        yield f"{LOCK.name} has {', '.join(unneeded)}, which no package needs; run `make lock`"


if __name__ == "__main__":
    sys.exit(main())
