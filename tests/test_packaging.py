"""One import package, whose links on top are decoration; no folder of some machine in any file."""

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import lightscale

ROOT = Path(__file__).resolve().parents[1]
LINKS = ("configs", "kernels", "parallel", "data_pipeline", "launch")
DATA = {".sh", ".fish", ".toml"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

FIND_ORIGIN = "import importlib.util, sys; spec = importlib.util.find_spec(sys.argv[1]); print(spec and spec.origin)"


def find_origin(name: str, folder: Path) -> str:
    """The file that `import NAME` would load for a script in `folder`, "None" where there is none."""
    command = [sys.executable, "-c", FIND_ORIGIN, name]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.fixture(scope="module")
def repository_files(needs: Callable[..., None]) -> list[Path]:
    """What git tracks or would track."""
    needs("git")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    except subprocess.CalledProcessError:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize("name", LINKS)
def test_installed_package_exposes_no_bare_name(name: str, tmp_path: Path) -> None:
    assert not find_origin(name, tmp_path).startswith(str(ROOT))


def test_bare_kernels_has_no_origin_even_in_the_root() -> None:
    """Libraries probe for PyPI's package of this name, and a script in the root has the root on its path."""
    assert not find_origin("kernels", ROOT).startswith(str(ROOT))


def test_kernels_is_neither_a_package_of_its_own_nor_has_it_a_version() -> None:
    folder = ROOT / "lightscale" / "kernels"
    assert not (folder / "__init__.py").exists()
    for path in folder.rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Name)}
        assert "__version__" not in names, path


@pytest.mark.parametrize("name", LINKS)
def test_links_on_top_are_relative_and_lead_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("lightscale", name)
    assert link.resolve() == ROOT / "lightscale" / name
    assert link.is_dir()


def test_pytest_puts_nothing_on_the_path() -> None:
    options = PROJECT["tool"]["pytest"]["ini_options"]
    assert "pythonpath" not in options
    assert "--import-mode=importlib" in options["addopts"]
    # But the package that a test installs elsewhere.
    assert {path.parent.name for path in (ROOT / "tests").rglob("__init__.py")} == {"toy_mixer"}


def test_one_range_of_transformers() -> None:
    """5.0 to 5.12 take our kernels for the package of that name; caches of 5.13 and 5.14 take no tokens back."""
    requirements = [line for extra in PROJECT["project"]["optional-dependencies"].values() for line in extra]
    requirements += PROJECT["project"]["dependencies"]
    assert {line for line in requirements if line.startswith("transformers")} == {"transformers>=5.15"}


def test_every_import_is_a_declared_dependency() -> None:
    project = PROJECT["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    declared = {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower().replace("_", "-") for line in lines}
    distributions = importlib.metadata.packages_distributions()
    # What a copied file of an export takes where it is installed.
    of_exports = {"diffusers"}
    undeclared = []
    for path in (ROOT / "lightscale").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in {name.partition(".")[0] for name in names} - {"lightscale", *sys.stdlib_module_names}:
                if name in of_exports and path.parent.name == "plain":
                    continue
                owners = {owner.lower().replace("_", "-") for owner in distributions.get(name, [name])}
                if not owners & declared:
                    undeclared.append(f"{path.relative_to(ROOT)}:{node.lineno} imports {name}")
    assert undeclared == []


def test_no_file_names_a_folder_of_some_machine(repository_files: list[Path]) -> None:
    somewhere = re.compile(rb"(?<![\w.}$>/-])/(home|root|Users|work|workspace)/\w|" + re.escape(os.fsencode(ROOT)))
    guilty = [str(path) for path in repository_files if somewhere.search(path.read_bytes())]
    assert guilty == []


def test_style_is_checked_in_every_folder() -> None:
    """The links on top have the names of packages: leaving those out by name leaves the packages out too."""
    shown = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    checked = {Path(line).relative_to(ROOT) for line in shown}
    folders = [ROOT / name for name in ("lightscale", "tests", "tools")]
    assert {path.relative_to(ROOT) for folder in folders for path in folder.rglob("*.py")} <= checked


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, repository_files: list[Path]) -> Path:
    """Built from a copy of what git has."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    for path in repository_files:
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for name in LINKS:
        (copy / name).symlink_to(f"lightscale/{name}")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=100)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_whole_package_and_nothing_else(wheel: Path, repository_files: list[Path]) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    package = ROOT / "lightscale"
    files = [path for path in repository_files if path.is_relative_to(package)]
    expected = {path.relative_to(ROOT).as_posix() for path in files if path.suffix in {".py", *DATA}}
    assert {name for name in names if Path(name).suffix in {".py", *DATA}} == expected
    assert {"lightscale/kernels/lightning/__init__.py", "lightscale/launch/slurm/job.sh"} <= expected
    version = PROJECT["project"]["version"]
    assert {name.partition("/")[0] for name in names} == {"lightscale", f"lightscale-{version}.dist-info"}


@pytest.mark.long
def test_an_installed_wheel_has_the_shipped_configurations(wheel: Path, tmp_path: Path) -> None:
    """In a folder where there is nothing else."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()

    def run(*words: str) -> str:
        code = (
            "import sys; from lightscale import __file__, cli; print(__file__, file=sys.stderr); sys.exit(cli.main())"
        )
        shown = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert shown.stderr.splitlines()[0] == str(site / "lightscale/__init__.py")
        return shown.stdout

    listed = json.loads(run("configs", "--json"))
    assert {one["name"] for one in listed["configs"]} == {path.stem for path in (ROOT / "configs").glob("*.toml")}
    assert run("config", "hgrn2-7b") == (ROOT / "tests/config/golden/hgrn2-7b.toml").read_text()
    (empty / "mine.toml").write_text('extends = ["arch/tnl", "size/tiny", "recipe/stdlib"]\n')
    assert run("config", "mine.toml") == run("config", "tnl-tiny")


def test_versions_agree() -> None:
    assert lightscale.__version__ == PROJECT["project"]["version"]
