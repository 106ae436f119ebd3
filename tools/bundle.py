#!/usr/bin/env python
"""A folder that installs lightscale on a machine without a network: ``make bundle PYTHON_VERSION=3.12 TORCH=2.11.0``.

It has the wheels of all packages that the named environment lacks, the source, and a small token store, the corpus of
``gpu_measurements.py``. There, ``bash FOLDER/install.sh`` installs them into a folder of its own and imports each.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpu_measurements import IMPORTS, STORE, STORE_COMMAND
from lightscale import cli
from lightscale.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
_BESIDE_TORCH = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "numpy", "setuptools")
"""What every environment with torch has."""
GLIBC = ("2_28", "2_27", "2_24", "2_17")
INSTALL = """\
#!/usr/bin/env bash
# bash install.sh [FOLDER]: installs without a network, beside the packages that Python has already.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); site=${1:-$here/site}; python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$site" "$here"/wheels/*.whl
export PYTHONPATH="$here/source:$site${PYTHONPATH:+:$PYTHONPATH}"
cd "$here" && "$python" -P - IMPORTS <<'END'
import importlib, sys
bad = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        bad[name] = repr(error)
for name, why in bad.items():
    print(f"error: import of {name} failed: {why}", file=sys.stderr)
sys.exit(bool(bad))
END
echo "installed; use: export PYTHONPATH=$PYTHONPATH"
"""


def missing(resolved: Iterable[dict[str, Any]], present: Iterable[str]) -> list[str]:
    """``name==version`` of what is neither present nor a requirement of what is."""
    by_name = {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in resolved}
    there: set[str] = set()
    waiting = [canonicalize_name(name) for name in present]
    while waiting:
        name = waiting.pop()
        if name in there:
            continue
        there.add(name)
        required = [Requirement(line) for line in by_name.get(name, {}).get("requires_dist", ())]
        # Extras of others bring no package; those of a platform are in the resolution or not.
        waiting += [canonicalize_name(one.name) for one in required if "extra" not in str(one.marker)]
    return sorted(f"{name}=={one['version']}" for name, one in by_name.items() if name not in there)


def stand_in(folder: Path, name: str, version: str, requires: Iterable[str] = ()) -> str:
    """A wheel without files for what the machine has, so that no index needs its build for GPUs; its requirement."""
    version += "+present"
    info = f"{name}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {x}" for x in requires),
    ]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return f"{name}=={version}"


def constraints(text: str, present: Iterable[str]) -> str:
    """The lock file without the lines of what is there already."""
    names = {canonicalize_name(name) for name in present}
    kept = [line for line in text.splitlines() if canonicalize_name(re.split("[=<>! ;]", line)[0]) not in names]
    return "\n".join(kept) + "\n"


def pip(*words: str, target: Sequence[str]) -> str:
    """What pip prints, for packages of that environment."""
    done = subprocess.run([sys.executable, "-m", "pip", *words, *target], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"pip {words[0]} failed: {done.stderr.strip()[-1500:]}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python-version", required=True, metavar="VERSION", help="of the machine, like 3.12")
    parser.add_argument("--torch", required=True, metavar="VERSION", help="release that the machine has, like 2.11.0")
    parser.add_argument("--machine", default="x86_64", help="architecture (default: x86_64)")
    parser.add_argument("--also", nargs="*", default=[], metavar="PACKAGE", help="packages besides, like fla-core")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bundle", help="folder (default: build/bundle)")
    args = parser.parse_args(arguments)
    platforms = [word for glibc in GLIBC for word in ("--platform", f"manylinux_{glibc}_{args.machine}")]
    platforms += ["--platform", f"manylinux2014_{args.machine}"]
    target = ["--python-version", args.python_version, "--only-binary=:all:", *platforms]
    try:
        for old in ("wheels", "source", STORE.name):
            shutil.rmtree(args.out / old, ignore_errors=True)
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            lock = Path(scratch, "constraints.txt")
            locked = (ROOT / "tools/constraints.txt").read_text("utf-8")
            lock.write_text(constraints(locked, ["torch", "triton", "setuptools"]), encoding="utf-8")
            torch = stand_in(Path(scratch), "torch", args.torch, _BESIDE_TORCH)
            triton = stand_in(Path(scratch), "triton", "999")
            wanted = [str(ROOT), torch, triton, "--find-links", scratch, "pytest", "pytest-timeout", *args.also]
            report = ["--dry-run", "--ignore-installed", "--quiet", "--report", "-", "--target", f"{scratch}/none"]
            found = json.loads(pip("install", *report, "--constraint", str(lock), *wanted, target=target))["install"]
        packages = [one for one in missing(found, ["torch", "triton"]) if not one.startswith("lightscale==")]
        pip("download", "--quiet", "--no-deps", "--dest", str(args.out / "wheels"), *packages, target=target)
        _copy_source(args.out / "source")
        if code := cli.main([*STORE_COMMAND, str(args.out / STORE.name)]):
            return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.EXIT_CODE
    (args.out / "install.sh").write_text(INSTALL.replace("IMPORTS", " ".join(IMPORTS)), encoding="utf-8")
    print(f"{len(packages)} wheels, the source and a token store in {args.out}; there: bash install.sh")
    return 0


def _copy_source(target: Path) -> None:
    """Tracked files as they are now, without results of benchmarks."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", ":!benchmarks"], cwd=ROOT, capture_output=True, check=True)
    target.mkdir(parents=True, exist_ok=True)
    reading = subprocess.run(
        ["tar", "cf", "-", "--null", "--files-from", "-"],
        cwd=ROOT,
        input=listed.stdout,
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "xf", "-", "-C", target], input=reading.stdout, check=True)


if __name__ == "__main__":
    sys.exit(main())
