"""What the README shows works as it stands there."""

import re
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.launch.commands.checks import check_run
from lightscale.runs.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
# Those that need no run, no network and not the disk of a cluster.
COMMANDS = [
    shlex.split(line.partition("#")[0])[1:]
    for line in re.findall(r"^    (lightscale (?:config|plan|submit) .*)", README, re.MULTILINE)
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, write_store: Callable[..., None]) -> Path:
    """The shipped configurations, a corpus, and the README's `[launch]` as the site's."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "data").mkdir()
    write_store(folder / "data" / "corpus", 100_277, text=np.arange(1, 20_000))
    (folder / "site" / "lightscale").mkdir(parents=True)
    (folder / "site" / "lightscale" / "launch.toml").write_text(block("[launch]"))
    return folder


def block(first_line: str) -> str:
    """What stands indented from that line on."""
    found = re.search(rf"^    {re.escape(first_line)}\n(?:    .*\n)+", README, re.MULTILINE)
    assert found is not None
    return found[0]


def test_the_file_of_a_run(workplace: Path, monkeypatch: pytest.MonkeyPatch, write_store: Callable[..., None]) -> None:
    monkeypatch.chdir(workplace)
    Path("mine.toml").write_text(textwrap.dedent(block("# mine.toml")))
    text = np.arange(1, 20_000)
    write_store(Path("data/mine"), 100_277, **{"wiki": text, "wiki-validation": text})
    config = load("mine.toml", ["parallel.sequence=2"])
    check_run(config, 2, RunDirectory("runs/mine"))
    assert config.data.validation["wiki"].source == "wiki-validation"


@pytest.mark.parametrize("node", ["0", "1"])
def test_the_command_of_several_hosts(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], node: str
) -> None:
    monkeypatch.chdir(workplace)
    (line,) = re.findall(r"^    lightscale (train .*--nodes .*)", README, re.MULTILINE)
    values = {"CONFIG": "quickstart", "N": node, "HOST0": "no-such-host.invalid"}
    # As far as the address, which is looked at last before ranks start.
    assert main([values.get(word, word) for word in shlex.split(line)]) == 75
    assert "cannot be found at no-such-host.invalid:29500 (" in capsys.readouterr().err
    assert not (workplace / "runs").exists()


def test_the_kinds_of_commands() -> None:
    assert {words[0] for words in COMMANDS} == {"config", "plan", "submit"}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(workplace / "site"))
    if "--trace" in words:  # takes the CUDA build of PyTorch, and minutes: tests/twin
        words = words[: words.index("--trace")]
    assert main([*words, *["--dry-run"] * (words[0] == "submit")]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    if words[0] == "submit":
        assert "NCCL_SOCKET_IFNAME:-ib0" in said
    assert not (workplace / "runs").exists()
