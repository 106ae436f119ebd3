"""``tools/structure.py`` on a repository of a few small files, whose figures are known."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def git(needs: Callable[..., None]) -> None:
    """The tool reads commits."""
    needs("git")


RUN = "\n".join(f"    x{number} = {number} + a" for number in range(8))
BEFORE = {
    "store.py": '"""Text."""\n\n\nclass TokenStore:\n    pass\n\n\nclass Twice:\n    pass\n',
    "load.py": "from lightscale.store import TokenStore\n\n\nclass TokenLoader:\n    pass\n\nclass Twice:\n    pass\n",
    "train.py": "from lightscale.load import TokenLoader\nimport lightscale.build\n\n\ndef train():\n    pass\n",
    "build.py": "from lightscale import parallel\n\n\ndef build():\n    import json\n\n    return json\n",
    "parallel/__init__.py": "# Why.\nclass Engine:\n    x = 1  # noqa: E501\n\n",
    "save.py": f"from lightscale.parallel import Engine\n\n\nclass Saver:\n    a = 1\n{RUN}\n",
    "copy.py": f'a = 0\nif a:\n    """No code."""\n{RUN.replace("= 7", "= 8")}\n',
}
# Folders that import each other, a way that is longer by one module, and nothing twice.
AFTER = {
    **{name: text for name, text in BEFORE.items() if name not in ("copy.py", "train.py", "load.py")},
    "training/train.py": "import lightscale.loading.prefetch\nimport lightscale.build\n\ndef train():\n    pass\n",
    "loading/prefetch.py": "from lightscale.loading.load import TokenLoader\nimport lightscale.training.names\n",
    "loading/load.py": "from lightscale.store import TokenStore\n\n\nclass TokenLoader:\n    pass\n",
    "training/names.py": "",
}


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    path = Path(__file__).resolve().parents[2] / "tools" / "structure.py"
    spec = importlib.util.spec_from_file_location("lightscale_tools_structure", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for the names in annotations.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """`BEFORE` is committed, `AFTER` is the working tree."""

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / "lightscale" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    git("init", "--quiet")
    write(BEFORE)
    git("add", ".")
    git("commit", "--quiet", "--message", "before")
    for name in BEFORE.keys() - AFTER.keys():
        (tmp_path / "lightscale" / name).unlink()
    write(AFTER)
    return tmp_path


@pytest.fixture
def figures(
    tool: ModuleType, repository: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, dict[str, Any]]]:
    def run(*arguments: str) -> dict[str, dict[str, Any]]:
        assert tool.main(["--root", str(repository), "--json", *arguments]) == 0
        found: dict[str, dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found

    return run


def test_two_revisions_side_by_side(figures: Callable[..., dict[str, dict[str, Any]]]) -> None:
    before, after = figures("--against", "HEAD").values()
    assert before["files_by_folder"] == {"lightscale": 6, "lightscale/parallel": 1}
    assert after["files_by_folder"] == {
        "lightscale": 3, "lightscale/loading": 2, "lightscale/parallel": 1, "lightscale/training": 2,
    }  # fmt: skip
    assert before["batch_path"] == {
        "hops": 5,
        "modules": [f"lightscale.{name}" for name in ("store", "load", "train", "build", "parallel", "save")],
        "missing": [],
    }
    assert after["batch_path"]["hops"] == 6
    assert after["batch_path"]["modules"][1:3] == ["lightscale.loading.load", "lightscale.loading.prefetch"]
    assert list(before["classes_of_one_name"]) == ["Twice"]
    assert before["classes_of_one_name"]["Twice"] == ["lightscale/load.py:7", "lightscale/store.py:8"]
    assert after["classes_of_one_name"] == {}
    assert before["folder_cycles"] == []
    assert after["folder_cycles"] == [["lightscale/loading", "lightscale/training"]]


def test_lines_comments_duplicates_and_imports_in_functions(
    figures: Callable[..., dict[str, dict[str, Any]]],
) -> None:
    (found,) = figures("--at", "HEAD").values()
    assert found["file_lines"] == {"median": 8, "longest": 13, "where": "lightscale/save.py"}
    assert found["function_lines"] == {"median": 3, "longest": 4, "where": "lightscale/build.py:build"}
    # One of the three lines in parallel; the directive is none.
    assert found["comment_share"]["parallel"] == pytest.approx(1 / 3)
    assert found["comment_share"]["all"] == pytest.approx(1 / (5 + 5 + 4 + 4 + 3 + 11 + 11))
    # The last of the eight lines differs.
    assert found["duplicates"] == {
        "count": 1,
        "lines": 7,
        "runs": [{"at": "lightscale/save.py:6", "also_at": "lightscale/copy.py:4", "lines": 7}],
    }
    assert found["imports_in_functions"] == ["lightscale/build.py:5"]


def test_people_see_both_and_a_class_that_is_not_there_is_named(
    tool: ModuleType, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "lightscale" / "store.py").write_text("")
    assert tool.main(["--root", str(repository), "--against", "HEAD"]) == 0
    shown = capsys.readouterr().out
    assert "not found: TokenStore" in shown
    assert "way of a batch, HEAD: lightscale.store - lightscale.load - lightscale.train" in shown


def test_mistakes_are_named(tool: ModuleType, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--root", str(repository), "--at", "nothing"]) == 78
    assert "error: nothing: " in capsys.readouterr().err
