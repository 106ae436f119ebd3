"""CONFIG and `extends` by name: files first, then what is shipped; what a wrong name is told."""

import itertools
import os
import re
from pathlib import Path

import pytest

from lightscale import cli
from lightscale.config import shipped
from lightscale.config.files import launch_tables, load, to_toml
from lightscale.errors import UserError

MINE = """
[model]
vocab_size = 512
[data]
store = "store"
sequence_length = 64
[optimizer]
lr = 1e-3
[train]
steps = 4
global_batch_size = 4
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(config: str) -> str:
    with pytest.raises(UserError) as caught:
        load(config)
    return str(caught.value)


def test_names_are_the_files_in_configs(root: Path) -> None:
    assert root / "lightscale" / "configs" == shipped.FOLDER
    assert set(shipped.run_names()) == {path.stem for path in (root / "configs").glob("*.toml")}
    parts = shipped.part_names()
    folders = {path.name for path in (root / "configs").iterdir() if path.is_dir()} - {"corpus", "studies"}
    assert set(parts) == folders
    for folder, names in parts.items():
        assert {f"{name}.toml" for name in names} == {
            str(path.relative_to(root / "configs")) for path in (root / "configs" / folder).glob("*.toml")
        }


@pytest.mark.parametrize("name", ["hgrn2-7b", "hgrn2-7b.toml"])
def test_a_name_is_a_shipped_run(name: str, capsys: pytest.CaptureFixture[str], root: Path) -> None:
    assert cli.main(["config", name]) == 0
    assert capsys.readouterr().out == (root / "tests/config/golden/hgrn2-7b.toml").read_text()
    assert list(launch_tables(name)) == []


def test_a_file_of_that_name_comes_first() -> None:
    Path("hgrn2-7b").write_text(f'extends = ["arch/tnl", "size/tiny"]\n{MINE}')
    assert load("hgrn2-7b").model.mixer == "tnl"
    # Not without its suffix: `hgrn2-7b` then still is the shipped one.
    Path("hgrn2-7b").rename("hgrn2-7b.toml")
    assert load("hgrn2-7b.toml").model.mixer == "tnl"
    assert load("hgrn2-7b").model.mixer == "hgrn2"
    # A folder is no file.
    Path("tnl-1b").mkdir()
    assert load("tnl-1b").model.mixer == "tnl"


def test_a_name_with_a_path_is_only_a_file() -> None:
    Path("sub").mkdir()
    assert "no configuration file sub/tnl-1b; did you mean the shipped tnl-1b?" in refusal("sub/tnl-1b")


@pytest.mark.parametrize("suffix", ["", ".toml"])
def test_extends_is_relative_to_the_file_then_shipped(tmp_path: Path, suffix: str) -> None:
    mine = tmp_path / "deep" / "mine.toml"
    (mine.parent / "arch").mkdir(parents=True)
    mine.write_text(f'extends = ["arch/tnl{suffix}", "./size/tiny{suffix}", "base{suffix}"]\n{MINE}')
    (mine.parent / "base.toml").write_text("[train]\nseed = 5\n")
    config = load(mine)
    assert (config.model.mixer, config.train.seed) == ("tnl", 5)
    (mine.parent / "arch" / "tnl.toml").write_text('[model]\nmixer = "llama"\n')
    assert load(mine).model.mixer == "llama"


def test_extends_of_a_shipped_run(tmp_path: Path) -> None:
    Path("mine.toml").write_text('extends = "tnl-tiny"\n')
    assert to_toml(load("mine.toml")) == to_toml(load("tnl-tiny"))


def test_nothing_outside_of_the_folder_is_shipped() -> None:
    Path("mine.toml").write_text('extends = "../../pyproject.toml"\n')
    assert "no such file" in refusal("mine.toml")


def test_a_name_that_nearly_exists_is_suggested_with_where_was_looked() -> None:
    Path("hgrn-7b.toml").write_text("")
    message = refusal("hgrn2-7")
    assert message.startswith("no configuration file hgrn2-7; did you mean hgrn-7b.toml or the shipped hgrn2-")
    assert message.endswith(f"(searched . and {shipped.FOLDER})")
    Path("mine.toml").write_text('extends = ["arch/tln"]')
    assert refusal("mine.toml") == (
        'mine.toml: extends "arch/tln": no such file; did you mean the shipped arch/tnl? '
        f"(searched arch and {shipped.FOLDER})"
    )
    Path("mine.toml").write_text('extends = ["hgrn-7b"]')
    assert "the section [model] is missing" in refusal("mine.toml")
    # Of a clone's path, which an installed wheel has not.
    assert "did you mean the shipped tnl-1b?" in refusal("configs/tnl-1b.toml")
    assert "has hgrn-7b.toml, mine.toml; `lightscale configs` lists the shipped ones" in refusal("zebra")


def test_a_pipe_is_refused_and_nobody_waits_for_its_writer() -> None:
    os.mkfifo("pipe")
    assert "pipe: a named pipe; a configuration file is a regular file" in refusal("pipe")


def test_a_run_of_a_shipped_name_goes_to_its_name() -> None:
    from lightscale.launch.commands.train import default_directory

    for given in ("tnl-tiny", "tnl-tiny.toml", "elsewhere/tnl-tiny.toml"):
        assert default_directory(Path(given)) == Path("runs/tnl-tiny")


def test_each_shipped_learning_rate_has_its_source() -> None:
    """The line above it cites a paper or a search, or says that there was none."""
    found = 0
    for path in sorted(shipped.FOLDER.rglob("*.toml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for before, line in itertools.pairwise(lines):
            if re.match(r"lr\s*=", line):
                found += 1
                place = lines.index(before)
                comment = " ".join(one for one in lines[max(0, place - 1) : place + 1] if one.startswith("#"))
                assert re.search(r"arXiv|search", comment), f"{path.name}: {line}"
    assert found >= 20
