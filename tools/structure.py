#!/usr/bin/env python
"""The structure of the package in numbers, at any commit: ``python tools/structure.py [--json]``.

Without ``--at REV`` it measures the working tree; ``--against REV`` puts another commit in front. Sources are
read and parsed, never imported or checked out, and classes are found by name, so that a commit before files were moved
can be measured too. Only ``.py`` files of ``lightscale/`` count.

What is counted:

- lines of a file: all; of a function: from ``def`` to its last line, nested functions too;
- share of comments: lines with a comment, of those that are not blank; ``noqa`` and the like are no comments;
- duplicates: runs of at least 6 lines of code that an earlier file, or the same one before, has already. Comments,
  docstrings, imports and blank lines are no code; blanks within a line do not count. The second place of a run and
  each further one count once;
- hops of a batch: the modules on its way from the store to the checkpoint. The way passes the modules that define
  `WAYPOINTS`, and between two of these the shortest chain in which each module imports the next, in either direction;
- folder cycles: sets of folders that import each other, directly or by way of others.
"""

import argparse
import ast
import io
import itertools
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from rich.console import Console
from rich.table import Table

from lightscale.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lightscale"
WAYPOINTS = ("TokenStore", "TokenLoader", "train", "Engine", "Saver")
LEAST_DUPLICATE = 6
# Those whose comments are counted by themselves: engine, launcher, exchange.
COMMENTED = ("parallel", "launch", "parallel/sequence")
_DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|pragma|ruff|mypy)|#!")
_SHOWN = 3
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceFile:
    """One file of the package."""

    path: str
    """From the repository, with slashes."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.text, self.path)

    @cached_property
    def module(self) -> str:
        """Its name in imports."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def folder(self) -> str:
        """That holds it."""
        return str(PurePosixPath(self.path).parent)

    @cached_property
    def functions(self) -> list[_Function]:
        """All, methods and nested ones too."""
        return [node for node in ast.walk(self.tree) if isinstance(node, _Function)]

    @cached_property
    def comment_lines(self) -> int:
        """Lines with a comment for readers."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return len({t.start[0] for t in tokens if t.type == tokenize.COMMENT and not _DIRECTIVE.match(t.string)})

    @cached_property
    def written_lines(self) -> int:
        """Lines that are not blank."""
        return sum(bool(line.strip()) for line in self.text.splitlines())

    @cached_property
    def code(self) -> list[tuple[int, str]]:
        """(number, code without blanks) of the lines that duplicates are looked for in."""
        skipped = {line for node in ast.walk(self.tree) if _is_no_code(node) for line in _lines_of(node)}
        lines: dict[int, str] = defaultdict(str)
        no_text = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in no_text and token.string and token.start[0] not in skipped:
                lines[token.start[0]] += f"{token.string} "
        return sorted(lines.items())


def _is_no_code(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return is_text or isinstance(node, (ast.Import, ast.ImportFrom))


def _lines_of(node: ast.AST) -> range:
    first = getattr(node, "lineno", 0)
    return range(first, (getattr(node, "end_lineno", None) or first) + 1)


def read(root: Path, revision: str | None, package: str = PACKAGE) -> list[SourceFile]:
    """The files of `package` in the repository `root`, by path; None: as they are on disk.

    Raises:
        UserError: git does not know the revision, or it has no such package.
    """
    if revision is None:
        texts = {path.relative_to(root).as_posix(): path.read_text() for path in (root / package).rglob("*.py")}
    else:
        command = ["git", "-C", str(root), "archive", "--format=tar", revision, package]
        archived = subprocess.run(command, capture_output=True, check=False)
        if archived.returncode:
            raise UserError(f"{revision}: {archived.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as tar:
            members = [member for member in tar if member.isfile() and member.name.endswith(".py")]
            texts = {member.name: tar.extractfile(member).read().decode() for member in members}  # type: ignore[union-attr]
    if not texts:
        raise UserError(f"{root / package}: no Python files")
    return [SourceFile(path, text) for path, text in sorted(texts.items())]


def measure(files: list[SourceFile], waypoints: Iterable[str] = WAYPOINTS) -> dict[str, Any]:
    """All figures; see the module's docstring."""
    folders: dict[str, int] = defaultdict(int)
    for file in files:
        folders[file.folder] += 1
    graph = import_graph(files)
    duplicates = list(find_duplicates(files))
    return {
        "files": len(files),
        "files_by_folder": dict(folders),
        "file_lines": _lengths((file.path, len(file.text.splitlines())) for file in files),
        "function_lines": _lengths(
            (f"{file.path}:{function.name}", len(_lines_of(function))) for file in files for function in file.functions
        ),
        "comment_share": {
            "all": _comment_share(files, ""),
            **{part: _comment_share(files, f"/{part}/") for part in COMMENTED},
        },
        "duplicates": {"count": len(duplicates), "lines": sum(one["lines"] for one in duplicates), "runs": duplicates},
        "batch_path": batch_path(files, graph, list(waypoints)),
        "classes_of_one_name": classes_of_one_name(files),
        "imports_in_functions": [line for file in files for line in _imports_in_functions(file)],
        "folder_cycles": folder_cycles(files, graph),
    }


def _lengths(lengths: Iterable[tuple[str, int]]) -> dict[str, Any]:
    found = dict(lengths)
    longest = max(found, key=found.__getitem__, default="")
    return {"median": statistics.median(found.values() or [0]), "longest": found.get(longest, 0), "where": longest}


def _comment_share(files: list[SourceFile], part: str) -> float:
    chosen = [file for file in files if part in f"/{file.path}"]
    return sum(file.comment_lines for file in chosen) / max(1, sum(file.written_lines for file in chosen))


def find_duplicates(files: list[SourceFile]) -> Iterator[dict[str, Any]]:
    """Runs of code that stand further in front too: where, and how many lines of code."""
    seen: dict[tuple[str, ...], tuple[SourceFile, int]] = {}
    for file in files:
        lines = [text for _, text in file.code]
        start, free_from = 0, 0
        while start + LEAST_DUPLICATE <= len(lines):
            first = seen.setdefault(tuple(lines[start : start + LEAST_DUPLICATE]), (file, start))
            length = 0
            if start >= free_from and (first[0] is not file or first[1] + LEAST_DUPLICATE <= start):
                length = _common(first, (file, start))
                free_from = start + length
                yield {"at": _where(file, start), "also_at": _where(*first), "lines": length}
            # Windows within the run are entered too: those across its end may be met again.
            start += 1


def _common(first: tuple[SourceFile, int], second: tuple[SourceFile, int]) -> int:
    """How many lines are the same from there on; in one file the two do not overlap."""
    (one, here), (other, there) = first, second
    most = min(len(one.code) - here, len(other.code) - there, there - here if one is other else len(one.code))
    length = 0
    while length < most and one.code[here + length][1] == other.code[there + length][1]:
        length += 1
    return length


def _where(file: SourceFile, index: int) -> str:
    return f"{file.path}:{file.code[index][0]}"


def import_graph(files: list[SourceFile]) -> dict[str, set[str]]:
    """The modules that each module imports, those outside the package aside."""
    modules = {file.module for file in files}
    graph: dict[str, set[str]] = {file.module: set() for file in files}
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                within = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in modules else str(node.module) for name in within]
            else:
                continue
            graph[file.module].update(name for name in names if name in modules and name != file.module)
    return graph


def batch_path(files: list[SourceFile], graph: dict[str, set[str]], waypoints: list[str]) -> dict[str, Any]:
    """The modules that a batch passes; `missing`: what no module, or more than one, defines."""
    homes: dict[str, list[str]] = {name: [] for name in waypoints}
    for file in files:
        for node in file.tree.body:
            if isinstance(node, (ast.ClassDef, _Function)) and node.name in homes:
                homes[node.name].append(file.module)
    missing = [name for name, modules in homes.items() if len(modules) != 1]
    if missing:
        return {"hops": None, "modules": [], "missing": missing}
    stops = [modules[0] for modules in homes.values()]
    path = stops[:1]
    for here, there in itertools.pairwise(stops):
        legs = [leg for leg in (shortest(graph, here, there), shortest(graph, there, here)[::-1]) if leg]
        if not legs:
            return {"hops": None, "modules": path, "missing": [f"{here} to {there}"]}
        path += min(legs, key=len)[1:]
    return {"hops": len(path) - 1, "modules": path, "missing": []}


def shortest(graph: dict[str, set[str]], start: str, end: str) -> list[str]:
    """From `start` to `end` along imports, both included; [] where there is no way."""
    paths = [[start]]
    reached = {start}
    for path in paths:
        if path[-1] == end:
            return path
        onward = sorted(graph[path[-1]] - reached)
        reached.update(onward)
        paths += [[*path, module] for module in onward]
    return []


def classes_of_one_name(files: list[SourceFile]) -> dict[str, list[str]]:
    """Public classes that are defined more than once, and where."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{file.path}:{node.lineno}")
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def _imports_in_functions(file: SourceFile) -> list[str]:
    nodes = {node for function in file.functions for node in ast.walk(function)}
    lines = {node.lineno for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))}
    return [f"{file.path}:{line}" for line in sorted(lines)]


def folder_cycles(files: list[SourceFile], graph: dict[str, set[str]]) -> list[list[str]]:
    """Folders that reach each other by imports; the package's own folder, which holds the entry points, aside."""
    folder_of = {file.module: file.folder for file in files}
    root = min(folder_of.values(), key=len)
    folders: dict[str, set[str]] = {folder: set() for folder in folder_of.values() if folder != root}
    for importer, imported in graph.items():
        source = folder_of[importer]
        if source != root:
            folders[source] |= {folder_of[module] for module in imported} - {source, root}
    reach = {folder: _reached(folders, folder) for folder in folders}
    together = {tuple(sorted(other for other in reach[one] if one in reach[other])) for one in folders}
    return [list(cycle) for cycle in sorted(together) if cycle]


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """What imports lead to, `start` itself only by a way back."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        onward = graph[waiting.pop()] - found
        found |= onward
        waiting += onward
    return found


def rows(figures: dict[str, Any]) -> dict[str, str]:
    """The figures as a table shows them, by heading."""
    folders, files, functions = figures["files_by_folder"], figures["file_lines"], figures["function_lines"]
    largest = max(folders, key=folders.__getitem__)
    path, duplicates = figures["batch_path"], figures["duplicates"]
    hops = f"not found: {', '.join(path['missing'])}" if path["missing"] else str(path["hops"])
    return {
        "files": str(figures["files"]),
        "folders": str(len(folders)),
        "most files in a folder": f"{folders[largest]} ({largest})",
        "lines of a file: median": f"{files['median']:g}",
        "lines of a file: longest": f"{files['longest']} ({files['where']})",
        "lines of a function: median": f"{functions['median']:g}",
        "lines of a function: longest": f"{functions['longest']} ({functions['where']})",
        **{f"lines with a comment: {part}": f"{share:.1%}" for part, share in figures["comment_share"].items()},
        f"duplicates of {LEAST_DUPLICATE} lines or more": f"{duplicates['count']} ({duplicates['lines']} lines)",
        "hops of a batch": hops,
        "classes of one name": f"{len(figures['classes_of_one_name'])}{_some(figures['classes_of_one_name'])}",
        "imports in functions": str(len(figures["imports_in_functions"])),
        "folder cycles": f"{len(figures['folder_cycles'])}{_some(map(' <-> '.join, figures['folder_cycles']))}",
    }


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    more = ", …" if len(shown) > _SHOWN else ""
    return f" ({', '.join(shown[:_SHOWN])}{more})" if shown else ""


def show(reports: dict[str, dict[str, Any]]) -> None:
    """A table with a column for each report, the files of each folder, and each batch's way."""
    console = Console(highlight=False, markup=False, width=max(Console().width, 120))
    table, folders = Table(""), Table("files of a folder", *reports)
    for name in reports:
        table.add_column(name, overflow="fold")
    cells = [rows(figures) for figures in reports.values()]
    for heading in cells[0]:
        table.add_row(heading, *(column[heading] for column in cells))
    counts = [figures["files_by_folder"] for figures in reports.values()]
    for folder in sorted({folder for column in counts for folder in column}):
        folders.add_row(folder, *(str(column.get(folder, "")) for column in counts))
    console.print(table)
    console.print(folders)
    for name, figures in reports.items():
        console.print(f"way of a batch, {name}: {' - '.join(figures['batch_path']['modules'])}", soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="structure.py", description="Figures about the structure of the package.")
    parser.add_argument("--at", metavar="REV", help="commit to measure (default: the working tree)")
    parser.add_argument("--against", metavar="REV", help="commit to compare with, shown first")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (default: this one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the figures by name")
    args = parser.parse_args(arguments)
    revisions = ([args.against] if args.against else []) + [args.at]
    try:
        reports = {one or "working tree": measure(read(args.root, one)) for one in revisions}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return UserError.EXIT_CODE
    if args.json:
        print(json.dumps(reports, indent=1))
    else:
        show(reports)
    return 0


if __name__ == "__main__":
    sys.exit(main())
