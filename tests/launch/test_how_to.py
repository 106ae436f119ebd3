"""What the how-to pages show works as it stands there."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.launch.commands.checks import check_run
from lightscale.runs.run_directory import RunDirectory

documents = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "documents.py")))
ROOT = documents.ROOT
HOW_TO = ROOT / "docs" / "how-to"
NEEDS_NO_RUN = ("config", "plan", "submit")
# Those that need no run, no network and not the disk of a cluster.
COMMANDS = list(
    dict.fromkeys(
        tuple(words)
        for page in sorted(HOW_TO.glob("*.md"))
        for words in (documents.words(found.text) for found in documents.commands(page))
        if words and words[0] in NEEDS_NO_RUN
    )
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, write_store: Callable[..., None]) -> Path:
    """The shipped configurations, a run's file, stores, and the page's `[launch]` as the site's."""
    folder = tmp_path_factory.mktemp("how-to")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "data").mkdir()
    write_store(folder / "data" / "corpus", 100_277, text=np.arange(1, 20_000))
    text = np.arange(1, 20_000)
    write_store(folder / "data" / "mine", 100_277, **{"wiki": text, "wiki-validation": text})
    (folder / "mine.toml").write_text(block("configure-a-run.md", "# mine.toml"))
    (folder / "site" / "lightscale").mkdir(parents=True)
    (folder / "site" / "lightscale" / "launch.toml").write_text(block("slurm.md", "[launch]"))
    return folder


def block(page: str, first_line: str) -> str:
    """The block of a page that begins with that line."""
    (found,) = (one.text for _, one in documents.blocks(HOW_TO / page) if one.text.startswith(f"{first_line}\n"))
    return str(found)


def test_the_file_of_a_run(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    config = load("mine.toml", ["parallel.sequence=2"])
    check_run(config, 2, RunDirectory("runs/mine"))
    assert config.data.validation["wiki"].source == "wiki-validation"


@pytest.mark.parametrize("node", ["0", "1"])
def test_the_command_of_several_hosts(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], node: str
) -> None:
    monkeypatch.chdir(workplace)
    (shown,) = (one.text for one in documents.commands(HOW_TO / "several-hosts.md") if "--nodes" in one.text)
    # As far as the address, which is looked at last before ranks start.
    assert main(documents.words(shown.replace(" N ", f" {node} ").replace("HOST0", "no-such-host.invalid"))) == 75
    assert "cannot be found at no-such-host.invalid:29500 (" in capsys.readouterr().err
    assert not (workplace / "runs").exists()


def test_the_kinds_of_commands() -> None:
    assert {words[0] for words in COMMANDS} == set(NEEDS_NO_RUN)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(workplace / "site"))
    given = list(words)
    if "--trace" in given:  # takes the CUDA build of PyTorch, and minutes: tests/twin
        given = given[: given.index("--trace")]
    # Of what takes minutes a part: tests/planning has ranges of lengths and all simulations.
    given = [word.partition("..")[0] for word in given]
    if "--failures" in given:
        given += ["--simulations", "4"]
    if given[0] == "submit" and "--dry-run" not in given:
        given.append("--dry-run")
    assert main(given) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    if given[0] == "submit":
        assert "NCCL_SOCKET_IFNAME:-ib0" in said
    assert not (workplace / "runs").exists()
