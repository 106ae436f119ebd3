"""Imports inside lightscale go one way; what they are is read from the sources, nothing is imported."""

import ast
import graphlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From what is imported to what imports. A module's layer is that of its first name below `lightscale`.
LAYERS = ("errors", "config", "kernels", "parallel", "models", "training", "evaluation", "launch", "cli")
SAME_LAYER = {"config_fields": "config", "config_files": "config", "config_command": "cli", "__main__": "cli"}
# Beside the layers: needs only these, and is used only from these on.
DATA_PIPELINE_IMPORTS = {"errors", "config", "data_pipeline"}
DATA_PIPELINE_USERS = {"data_pipeline", *LAYERS[LAYERS.index("training") :]}
# Importer and imported of the imports that are inside a function on purpose.
LATE = {("lightscale.parallel.mesh", "lightscale.parallel.cpu")}  # must not even be loaded where there is a GPU

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True, kw_only=True)
class Import:
    importer: str
    imported: str
    line: int
    in_function: bool


def modules(root: Path) -> dict[str, ast.Module]:
    """Name to syntax tree of every module of the package in `root`."""
    trees = {}
    for path in sorted((root / "lightscale").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return trees


def imports(trees: dict[str, ast.Module]) -> Iterator[Import]:
    """Every import of a module of lightscale by another."""
    for importer, tree in trees.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        late = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{importer}:{node.lineno}: relative import"
                within = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in trees else str(node.module) for name in within]
            else:
                continue
            for name in dict.fromkeys(names):
                if name.partition(".")[0] == "lightscale" and name != importer:
                    yield Import(importer=importer, imported=name, line=node.lineno, in_function=id(node) in late)


def layer(module: str) -> str:
    """'lightscale.kernels.norm' -> 'kernels'. The package itself, a version and no more, is lowest."""
    name = [*module.split("."), LAYERS[0]][1]
    return SAME_LAYER.get(name, name)


def faults(root: Path) -> list[str]:
    """What breaks the rules, in words."""
    trees = modules(root)
    found = []
    graph: dict[str, set[str]] = {name: set() for name in trees}
    for item in imports(trees):
        where = f"{item.importer}:{item.line} imports {item.imported}"
        importer, imported = layer(item.importer), layer(item.imported)
        graph[item.importer].add(item.imported)
        if unknown := {importer, imported} - {*LAYERS, "data_pipeline"}:
            found.append(f"{where}: no layer is known for {unknown.pop()}")
        elif "data_pipeline" in (importer, imported):
            if importer == "data_pipeline" and imported not in DATA_PIPELINE_IMPORTS:
                found.append(f"{where}: data_pipeline needs only config")
            if importer not in DATA_PIPELINE_USERS:
                found.append(f"{where}: {importer} knows no data")
        elif LAYERS.index(importer) < LAYERS.index(imported):
            found.append(f"{where}: {importer} is below {imported}")
        if item.in_function and (item.importer, item.imported) not in LATE:
            found.append(f"{where}: inside a function")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f"imports in a circle: {' <- '.join(error.args[1])}")
    return found


@pytest.fixture(scope="module", autouse=True)
def show_long_code() -> None:
    """Warnings in pytest's summary, no failures: sometimes the longer form reads better."""
    for name, tree in modules(ROOT).items():
        lengths = [(name, max((node.end_lineno or 0 for node in tree.body), default=0), MAX_FILE_LINES)]
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                lengths.append((f"{name}.{node.name}", lines, MAX_FUNCTION_LINES))
        for what, lines, limit in lengths:
            if lines > limit:
                warnings.warn(f"{what} has {lines} lines, more than {limit}", stacklevel=1)


def test_imports_go_one_way() -> None:
    assert faults(ROOT) == []


def test_every_exception_is_still_needed() -> None:
    late = {(item.importer, item.imported) for item in imports(modules(ROOT)) if item.in_function}
    assert late >= LATE


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("config.py", "import lightscale.cli", "config is below cli"),
        ("kernels/norm.py", "from lightscale.parallel import mesh", "kernels is below parallel"),
        ("parallel/mesh.py", "from lightscale import models", "parallel is below models"),
        (
            "data_pipeline/loader.py",
            "from lightscale.parallel.mesh import Mesh",
            "data_pipeline needs only config",
        ),
        ("models/layers.py", "from lightscale.data_pipeline import loader", "models knows no data"),
        ("training/train.py", "def f():\n    from lightscale.parallel import mesh", "inside a function"),
        ("models/a.py", "import lightscale.models.b", "imports in a circle"),
        ("extras.py", "import lightscale.config", "no layer is known for extras"),
        ("training/ok.py", "from lightscale.data_pipeline import loader\nimport lightscale.models.b", None),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, path: str, source: str, fault: str | None) -> None:
    package = tmp_path / "lightscale"
    for name in ("cli", "config", "parallel/mesh", "models/__init__", "models/b", "data_pipeline/loader"):
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("import lightscale.models.a\n" if name == "models/b" else "", encoding="utf-8")
    (package / path).parent.mkdir(parents=True, exist_ok=True)
    (package / "models/a.py").write_text("", encoding="utf-8")
    (package / path).write_text(source, encoding="utf-8")
    found = faults(tmp_path)
    assert len(found) == (0 if fault is None else 1), found
    assert fault is None or fault in found[0]
