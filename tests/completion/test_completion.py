"""Completion in real shells: what a TAB makes of a command line."""

import os
import pty
import re
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightscale import cli
from lightscale.cli import COMMANDS, load_command
from lightscale.completion.command import script
from lightscale.completion.tables import Tables, make_tables
from lightscale.config.shipped import run_names

TIMEOUT_S = 60.0
# In the place of the program: shows what it was called with.
PROGRAM = "lightscale() { printf 'GOT'; printf '<%s>' \"$@\"; printf 'END\\n'; }"
START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source ./completion"),
    "zsh": (["zsh", "-f", "-i"], "autoload -U compinit; compinit -u -D; source ./completion"),
}
SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def tables() -> Tables:
    return make_tables()


@pytest.fixture
def engine(tables: Tables, root: Path) -> str:
    """What all shells run."""
    return tables.function() + (root / "lightscale/completion/complete.sh").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with two runs and a file."""
    for name in ("mine", "other"):
        (tmp_path / "runs" / name / "checkpoints" / "step-00000020").mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    (tmp_path / "my run.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=SHELLS)
def shell(
    request: pytest.FixtureRequest,
    tables: Tables,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    needs: Callable[..., None],
) -> str:
    """The name of a shell, and its script in `completion`."""
    name: str = request.param
    needs(name)
    if name != "fish":
        needs("pseudo-terminals")
    monkeypatch.setattr("lightscale.completion.command.make_tables", lambda: tables)
    (folder / "completion").write_text(script(name))
    return name


def press_tab(shell: str, *lines: str) -> list[list[str]]:
    """What the program is called with when TAB and Enter are pressed behind each of the lines, in one shell.

    In fish, where what TAB shows is what `complete` prints: the words, the last one being the only one that is offered.
    """
    if shell == "fish":
        asked = "; ".join(f"complete -C {line!r}; echo END" for line in lines)
        command = ["fish", "--no-config", "-c", f"source completion; {asked}"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout
        called = []
        for line, offered in zip(lines, shown.split("END\n"), strict=False):
            (word,) = {found.partition("\t")[0] for found in offered.splitlines()}
            called.append([*line.split()[1:-1], word])
        return called
    command, load = START[shell]
    keys = f"{load}\n{PROGRAM}\n" + "".join(f"{line}\t\n" for line in lines)
    found = re.findall(r"GOT((?:<[^>]*>)*)END", typed(command, keys, until="END\r\n", times=len(lines)))
    return [re.findall(r"<([^>]*)>", words) for words in found]


def typed(command: list[str], keys: str, *, until: str, times: int) -> str:
    """What a terminal with `command` shows when `keys` are typed, until it has shown `until` so many times."""
    environment = {
        "PATH": os.environ["PATH"],
        "TERM": "dumb",
        "PS1": "> ",
        "INPUTRC": "/dev/null",
        "HOME": str(Path.cwd()),
    }
    process, terminal = pty.fork()
    if process == 0:
        os.execvpe(command[0], command, environment)
    shown, deadline = b"", time.monotonic() + TIMEOUT_S
    try:
        os.write(terminal, keys.encode())
        while shown.count(until.encode()) < times:
            ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"nothing more within {TIMEOUT_S} s behind {shown.decode(errors='replace')!r}"
            shown += os.read(terminal, 4096)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)
    return shown.decode(errors="replace")


LINES = {
    "lightscale subm": ["submit"],
    "lightscale data sam": ["data", "samples"],
    "lightscale train hgrn2-3": ["train", "hgrn2-3b"],
    "lightscale train hgrn2-7b --proc": ["train", "hgrn2-7b", "--processes"],
    "lightscale train --processes 2 hybr": ["train", "--processes", "2", "hybrid-tiny"],
    "lightscale generate mi": ["generate", "mine"],
    "lightscale predict mine --emb": ["predict", "mine", "--embed"],
    "lightscale logs runs/o": ["logs", "runs/other"],
    "lightscale train tnl-1b --run=mi": ["train", "tnl-1b", "--run=mine"],
    "lightscale checkpoint verify mine@2": ["checkpoint", "verify", "mine@20"],
    "lightscale plan tnl-1b parallel.exch": ["plan", "tnl-1b", "parallel.exchange="],
    "lightscale plan tnl-1b parallel.exchange=g": ["plan", "tnl-1b", "parallel.exchange=gather"],
    "lightscale train x checkpoint.asynchronous=f": ["train", "x", "checkpoint.asynchronous=false"],
    "lightscale train x --allow-change optimizer.l": ["train", "x", "--allow-change", "optimizer.lr"],
    "lightscale completion f": ["completion", "fish"],
    # By the shell itself, which writes the blank as it must be written there.
    "lightscale train my": ["train", "my run.toml"],
}


def test_tab(shell: str) -> None:
    assert dict(zip(LINES, press_tab(shell, *LINES), strict=True)) == LINES


def test_what_can_stand_where(engine: str, folder: Path) -> None:
    """All candidates."""

    def candidates(*words: str) -> list[str]:
        shown = subprocess.run(["sh", "-c", engine, "lightscale", *words], capture_output=True, text=True, check=True)
        assert shown.stderr == ""
        return [line.partition("\t")[0] for line in shown.stdout.splitlines()]

    assert candidates("") == list(COMMANDS)
    assert candidates("config", "") == [*run_names(), ":files"]
    assert candidates("generate", "") == ["runs/mine", "runs/other"]
    assert candidates("monitor", "runs/mine", "o") == ["other"]
    assert candidates("generate", "ru") == ["runs/mine", "runs/other"]
    assert candidates("checkpoint", "diff", "mine@20", "other@") == ["other@20"]
    assert candidates("generate", "mine", "more") == []
    assert candidates("generate", "mine", "parallel.te") == ["parallel.tensor="]
    assert candidates("generate", "mine", "--file", "") == [":files"]
    assert candidates("predict", "mine", "--embed", "") == ["mean", "last"]
    assert candidates("train", "--run", "--json") == [":files"], "whatever it begins with, it is the option's value"
    assert candidates("plan", "x", "--hardware", "") == ["h100", "a100"]
    assert candidates("data", "inspect", "") == [":files"]
    assert candidates("train", "x", "data.v") == ["data.validation."]
    assert candidates("train", "x", "optimizer.schedule=") == [
        f"optimizer.schedule={value}"
        for value in ("constant", "linear", "cosine", "minus_sqrt", "polynomial", "inverse_sqrt", "wsd", "range_test")
    ]
    assert candidates("zebra", "") == []
    assert candidates("train", "$(touch made)", "`touch made`", "*") == []
    assert not Path("made").exists()
    for name in COMMANDS:
        parser = load_command(name)[1]
        assert set(candidates(name, "--")) == {
            option for action in parser._actions for option in action.option_strings if option.startswith("--")
        }


def test_a_tab_takes_little(engine: str, folder: Path) -> None:
    """Processor time of what runs at each, in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for words in (["train", "hgrn2-3"], ["plan", "tnl-1b", "parallel."], ["generate", ""]):
        subprocess.run(["sh", "-c", engine, "lightscale", *words], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3 * 0.3


def test_the_command_prints_the_script(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightscale.completion.command.make_tables", lambda: tables)
    assert cli.main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == script("bash")
    with pytest.raises(SystemExit):
        cli.main(["completion", "csh"])
