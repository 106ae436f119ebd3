"""Imports inside lightscale go one way; what they are is read from the sources, nothing is imported."""

import ast
import functools
import graphlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightscale.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]

# Every package of lightscale, and what its modules may import besides their own package.
BASE = {"errors", "output", "files", "records", "config"}
MODEL = {*BASE, "kernels", "parallel", "models"}
TRAINING = {*MODEL, "data_pipeline", "tasks", "runs", "training"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "output": {"errors"},
    "files": {"errors"},
    "records": {"errors", "files"},
    "config": {"errors", "files", "output"},
    "kernels": {"errors"},
    "parallel": {*BASE, "kernels"},
    "models": MODEL,
    "data_pipeline": BASE,
    # What is predicted, of what the store has.
    "tasks": {*BASE, "data_pipeline"},
    "runs": BASE,
    # Its optimizers' numbers are all that planning needs of training: these have an entry of their own.
    "planning": {*MODEL, "runs", "training.optimizer"},
    "training": {*TRAINING, "training.optimizer"},
    "training.optimizer": {*BASE, "parallel", "models"},
    "evaluation": TRAINING,
    # What evaluation finds and chooses, runs and tokens, is what a model outside of it is made from.
    "exchange": {*TRAINING, "evaluation"},
    "layers": {"exchange"},
    # A rank is told what planning expects it to hold, which training does not know; and errors of divisibility name the
    # layout that planning chooses. Ranks that evaluate are started as those that train. Groups are checked before
    # there is a run.
    "launch": {*TRAINING, "training.optimizer", "planning", "evaluation"},
    # Many runs as one: it plans them, starts them, and reads what they and their evaluations leave.
    "study": {*BASE, "models", "runs", "training.optimizer", "planning", "evaluation", "launch"},
    "cli": BASE,
    # It reads the arguments of all commands, whose modules `cli` imports by name.
    "completion": {*BASE, "cli"},
}
ALIASES = {"__main__": "cli"}
# Folders of a package that share nothing but what both may import: here, the token store on disk.
APART = [("lightscale.data_pipeline.preparation", "lightscale.data_pipeline.loading")]
# Importer and imported of the imports that are inside a function on purpose.
LATE = {
    ("lightscale.parallel.mesh", "lightscale.parallel.cpu"),  # must not even be loaded where there is a GPU
    # Pillow is optional.
    ("lightscale.launch.commands.predict", "lightscale.evaluation.prediction.image_files"),
    ("lightscale.data_pipeline.augmentation.augment", "lightscale.data_pipeline.augmentation.pillow"),
    ("lightscale.data_pipeline.augmentation.augment", "lightscale.data_pipeline.augmentation.rand_augment"),
    ("lightscale.data_pipeline.commands.images", "lightscale.data_pipeline.images.decode"),
    ("lightscale.evaluation.drawing.pictures", "lightscale.data_pipeline.augmentation.pillow"),
    ("lightscale.exchange.loaded_images", "lightscale.data_pipeline.images.decode"),
    # Behind the checks of arguments and runs: they import torch.
    # Only where lm-eval is installed.
    ("lightscale.evaluation.harness.__main__", "lightscale.evaluation.harness.model"),
    ("lightscale.evaluation.harness.tasks", "lightscale.evaluation.harness.answering"),
    ("lightscale.exchange.export_command", "lightscale.exchange.export"),
    ("lightscale.exchange.import_command", "lightscale.exchange.imported"),
    ("lightscale.exchange.average_command", "lightscale.exchange.average"),
    ("lightscale.launch.doctor.command", "lightscale.launch.doctor.examine"),
    ("lightscale.launch.doctor.command", "lightscale.launch.doctor.warm"),
    # Triton is optional.
    ("lightscale.launch.doctor.warm", "lightscale.kernels.common.triton.tracing"),
    ("lightscale.launch.commands.model_ranks", "lightscale.launch.launcher.torchrun"),
    ("lightscale.launch.commands.resolutions", "lightscale.evaluation.resolutions.measure"),
    ("lightscale.launch.commands.resolutions", "lightscale.evaluation.resolutions.picture"),
    ("lightscale.launch.commands.train", "lightscale.launch.launcher.by_hand"),
    ("lightscale.launch.commands.train", "lightscale.launch.launcher.restart"),
    ("lightscale.launch.commands.train", "lightscale.launch.launcher.torchrun"),
}

# What is read without torch, besides all modules of commands: see tests/test_imports.py for what they take together.
TORCH_FREE = (
    "lightscale.models.specs",
    "lightscale.models.registry",
    "lightscale.models.accounting",
    "lightscale.models.conversion",
    "lightscale.tasks",
)
HEAVY = {"torch", "megatron", "triton"}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_FOLDER_MODULES = 18


@dataclass(frozen=True, kw_only=True)
class Import:
    importer: str
    imported: str
    line: int
    in_function: bool


@functools.cache
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


def package(module: str) -> str:
    """'lightscale.kernels.norm' -> 'kernels', the longest entry of MAY_IMPORT that is a prefix.

    The package itself, a version and no more, is lowest.
    """
    _, *parts = [*module.split("."), "errors"] if module == "lightscale" else module.split(".")
    for length in range(len(parts), 1, -1):
        if (name := ".".join(parts[:length])) in MAY_IMPORT:
            return name
    return ALIASES.get(parts[0], parts[0])


def folder(module: str, packages: set[str]) -> str:
    """The folder that holds `module`'s file: the package itself for an ``__init__.py``."""
    return module if module in packages else module.rpartition(".")[0]


def are_apart(first: str, second: str) -> bool:
    """Whether one module is in one folder of a pair in `APART`, and the other in the other."""
    return any(
        f"{first}.".startswith(f"{one}.") and f"{second}.".startswith(f"{other}.")
        for pair in APART
        for one, other in (pair, pair[::-1])
    )


def loaded(tree: ast.Module) -> Iterator[str]:
    """The names that a module imports whenever it is imported, of lightscale and of others."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if is_typing or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            skipped |= {id(inner) for inner in ast.walk(node)}
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def way_to_torch(trees: dict[str, ast.Module], first: str) -> list[str] | None:
    """The modules by which importing `first` imports torch, Megatron or Triton; None where it does not."""
    ways = {first: [first]}
    for module in (waiting := [first]):
        for name in loaded(trees[module]):
            if name.partition(".")[0] in HEAVY:
                return [*ways[module], name]
            # A package's own module comes before those in it.
            parts = name.split(".")
            for whole in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
                if whole in trees and whole not in ways:
                    ways[whole] = [*ways[module], whole]
                    waiting.append(whole)
    return None


def circle(graph: dict[str, set[str]]) -> str | None:
    """One circle of `graph`, in words."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return " <- ".join(error.args[1])
    return None


def crowded(root: Path) -> dict[str, int]:
    """Folders below `root` with more than `MAX_FOLDER_MODULES` modules; an ``__init__.py`` does not count."""
    files = [path for path in root.rglob("*.py") if path.name != "__init__.py"]
    counts = Counter(str(path.parent.relative_to(root)) for path in files)
    return {folder: count for folder, count in counts.items() if count > MAX_FOLDER_MODULES}


def faults(root: Path) -> list[str]:
    """What breaks the rules, in words."""
    trees = modules(root)
    packages = {name for name in trees if any(other.startswith(f"{name}.") for other in trees)}
    found = []
    files: dict[str, set[str]] = {name: set() for name in trees}
    folders: dict[str, set[str]] = {}
    for item in imports(trees):
        where = f"{item.importer}:{item.line} imports {item.imported}"
        importer, imported = package(item.importer), package(item.imported)
        files[item.importer].add(item.imported)
        source, target = folder(item.importer, packages), folder(item.imported, packages)
        if "lightscale" not in (source, target) and source != target:
            folders.setdefault(source, set()).add(target)
        if unknown := {importer, imported} - set(MAY_IMPORT):
            found.append(f"{where}: MAY_IMPORT has no entry for {unknown.pop()}")
        elif imported not in MAY_IMPORT[importer] | {importer}:
            found.append(f"{where}: {importer} may not import {imported}")
        if are_apart(item.importer, item.imported):
            found.append(f"{where}: only what is on disk passes between the two folders")
        if item.in_function and (item.importer, item.imported) not in LATE:
            found.append(f"{where}: inside a function")
    if words := circle(files):
        found.append(f"imports in a circle: {words}")
    elif words := circle(folders):
        found.append(f"folders that import each other: {words}")
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


@pytest.mark.parametrize("name", ["lightscale", "tools"])
def test_no_folder_is_crowded(name: str) -> None:
    assert crowded(ROOT / name) == {}


def test_a_crowded_folder_is_found(tmp_path: Path) -> None:
    for folder, count in (("full", MAX_FOLDER_MODULES), ("crowded", MAX_FOLDER_MODULES + 1)):
        (tmp_path / folder).mkdir()
        for name in ("__init__", *(f"m{number}" for number in range(count))):
            (tmp_path / folder / f"{name}.py").touch()
    assert crowded(tmp_path) == {"crowded": MAX_FOLDER_MODULES + 1}


@pytest.mark.parametrize("root", [*TORCH_FREE, *(command.module for command in COMMANDS.values())])
def test_what_commands_begin_with_imports_no_torch(root: str) -> None:
    trees = modules(ROOT)
    starts = [name for name in trees if f"{name}.".startswith(f"{root}.")]
    assert starts
    assert [way for name in starts if (way := way_to_torch(trees, name)) is not None] == []


def test_a_way_to_torch_is_found() -> None:
    sources = {
        "a": "from b import c\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
        "b": "def f():\n    import torch\n",
        "b.c": "import b.d.e\n",
        "b.d": "from torch import nn\n",
        "b.d.e": "",
    }
    trees = {name: ast.parse(text) for name, text in sources.items()}
    assert way_to_torch(trees, "a") == ["a", "b.c", "b.d", "torch"]
    assert way_to_torch(trees, "b") is None


def test_every_exception_is_still_needed() -> None:
    late = {(item.importer, item.imported) for item in imports(modules(ROOT)) if item.in_function}
    assert late >= LATE
    assert {folder for pair in APART for folder in pair} <= set(modules(ROOT))


def test_private_methods_of_megatron_are_called_in_one_file() -> None:
    """Names with an underscore, of other objects than the class's own, where Megatron is used."""
    found = set()
    for name, tree in modules(ROOT).items():
        sources = [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        if package(name) not in ("parallel", "models") and not any(s.startswith("megatron") for s in sources):
            continue
        for node in ast.walk(tree):
            # Methods of named tuples begin so too.
            private = isinstance(node, ast.Attribute) and re.match(r"_(?!_|asdict$|replace$)", node.attr)
            if private and ast.unparse(node.value) not in ("self", "cls", "super()"):
                found.add(name)
    assert found == {"lightscale.parallel.megatron_optimizer"}


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("config/schema.py", "import lightscale.cli", "config may not import cli"),
        ("kernels/norm.py", "from lightscale.parallel import mesh", "kernels may not import parallel"),
        ("parallel/mesh.py", "from lightscale import models", "parallel may not import models"),
        ("planning/plan.py", "from lightscale.training import train", "planning may not import training"),
        ("training/train.py", "from lightscale.planning import plan", "training may not import planning"),
        (
            "training/optimizer/adam.py",
            "from lightscale.training import train",
            "training.optimizer may not import training",
        ),
        ("planning/memory.py", "from lightscale.training.optimizer import registry", None),
        ("runs/metrics.py", "from lightscale.training import train", "runs may not import training"),
        (
            "data_pipeline/loader.py",
            "from lightscale.parallel.mesh import Mesh",
            "data_pipeline may not import parallel",
        ),
        (
            "data_pipeline/preparation/units.py",
            "from lightscale.data_pipeline.loading import order",
            "only what is on disk passes",
        ),
        (
            "data_pipeline/loading/samples.py",
            "import lightscale.data_pipeline.preparation.dedup.records",
            "only what is on disk passes",
        ),
        ("data_pipeline/loading/packing.py", "from lightscale.data_pipeline.loading import order", None),
        ("models/layers.py", "from lightscale.data_pipeline import loader", "models may not import data_pipeline"),
        ("training/train.py", "def f():\n    from lightscale.parallel import mesh", "inside a function"),
        ("models/a.py", "import lightscale.models.b", "imports in a circle"),
        ("models/layers/a.py", "import lightscale.models.c", "folders that import each other"),
        ("extras.py", "import lightscale.config", "no entry for extras"),
        ("training/ok.py", "from lightscale.data_pipeline import loader\nimport lightscale.models.b", None),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, path: str, source: str, fault: str | None) -> None:
    package = tmp_path / "lightscale"
    sources = {
        "models/b": "import lightscale.models.a\n",
        "models/d": "import lightscale.models.layers.a\n",
        **dict.fromkeys(
            (
                "cli",
                "config/__init__",
                "parallel/__init__",
                "parallel/mesh",
                "planning/plan",
                "training/train",
                "training/optimizer/registry",
                "models/__init__",
                "models/a",
                "models/c",
                "models/layers/__init__",
                "models/layers/a",
                "data_pipeline/loader",
                "data_pipeline/loading/order",
                "data_pipeline/preparation/dedup/records",
            ),
            "",
        ),
    }
    for name, text in sources.items():
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    (package / path).parent.mkdir(parents=True, exist_ok=True)
    (package / path).write_text(source, encoding="utf-8")
    found = faults(tmp_path)
    assert len(found) == (0 if fault is None else 1), found
    assert fault is None or fault in found[0]
