#!/usr/bin/env python
"""Compile every Triton kernel for sm_90, without a GPU: ``python tools/compile_kernels.py [OPERATOR …] [--json]``.

Prints registers, spills, shared memory and tensor-core instructions. Exit code 1 when a kernel spills in half
precision, uses more shared memory than a block may, or multiplies matrices without tensor cores.
``--triton VERSION`` compiles with another release, installed once to a cache directory.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightscale"


def other_triton(version: str) -> Path:
    """The directory that holds Triton ``version``; installed by pip when it is not there yet."""
    target = CACHE / f"triton-{version}"
    if not target.exists():
        print(f"installing triton {version} to {target}", file=sys.stderr)
        whole = target.with_suffix(f".{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(whole)]
        subprocess.run([*pip, f"triton=={version}"], check=True)
        try:
            whole.rename(target)
        except OSError:  # another process was faster
            if not (target / "triton").is_dir():
                raise
            print(f"{target} exists, {whole} can be removed", file=sys.stderr)
    return target


def restart(version: str | None) -> int | None:
    """This command in a process with the compiler and Triton ``version``, or None when this process is it."""
    environment = dict(os.environ)
    if environment.pop("TRITON_INTERPRET", None) is None and version is None:
        return None
    arguments = list(sys.argv[1:])
    if version is not None:
        place = arguments.index(next(a for a in arguments if a.startswith("--triton")))
        del arguments[place : place + (1 if "=" in arguments[place] else 2)]
        paths = [str(other_triton(version)), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return subprocess.run([sys.executable, __file__, *arguments], env=environment, check=False).returncode


def report(operators: Sequence[str], *, usual: bool, names: Sequence[str], as_json: bool) -> int:
    """Compile and print, without `names` all cases; the exit code."""
    # Triton decides when it is imported whether it interprets or compiles.
    import triton  # noqa: PLC0415

    from lightscale.kernels.common.triton import compile  # noqa: PLC0415

    known = compile.operators()
    if unknown := set(operators) - set(known):
        print(f"error: no Triton kernels of {', '.join(sorted(unknown))}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    cases = [
        (name, index)
        for name in operators or known
        for index, case in enumerate(compile.cases_of(name))
        if (case.usual or not usual) and (not names or case.name in names)
    ]
    if not cases:
        print(f"error: no case of these names: {', '.join(names)}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    # Forked workers have the kernels already, which cannot be sent; nothing has touched a GPU.
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        found = pool.imap(compile.compile_nth, cases)
        compiled = list(track(found, "compiling", len(cases), console=Console(stderr=True), disable=as_json))
    title = f"sm_90, Triton {triton.__version__}, {len(cases)} cases in {time.perf_counter() - start:.0f} s"
    if as_json:
        print(json.dumps({"triton": triton.__version__, "target": "sm_90", "cases": [asdict(c) for c in compiled]}))
    else:
        table = Table("kernel", title=title)
        for column in ("registers", "spills", "shared KB", "wgmma", "mma", "instructions"):
            table.add_column(column, justify="right")
        table.add_column("faults")
        for c in compiled:
            figures = (c.registers, c.spills, f"{c.shared_bytes / 1024:.1f}", c.wgmma, c.mma, c.instructions)
            table.add_row(c.name, *map(str, figures), "; ".join(c.faults))
        Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 1 if any(c.faults for c in compiled) else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", help="folders of lightscale/kernels (default: all)")
    parser.add_argument("--usual", action="store_true", help="only the cases that test runs draw from")
    parser.add_argument("--cases", nargs="+", default=[], metavar="NAME", help="only the cases of these names")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--triton", metavar="VERSION", help="another release, for example 3.6.0")
    args = parser.parse_args()
    code = restart(args.triton)
    return report(args.operators, usual=args.usual, names=args.cases, as_json=args.json) if code is None else code


if __name__ == "__main__":
    sys.exit(main())
