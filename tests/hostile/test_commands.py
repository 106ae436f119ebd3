"""Command lines with anything in them: usage, or an error that needs attention, within seconds, never a traceback."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightscale import cli

ENDLESS = "9" * 5000
LONG = "x" * 100_000
# Usage; an error that needs attention; for `runs`, `config` and others whose arguments are harmless, done.
USAGE, ATTENTION = 2, 78
MOST_CPU_S, MOST_CHARACTERS = 5.0, 30_000

REFUSED = [
    ["config", LONG],
    ["config", ""],
    ["config", "folder"],
    ["config", "pipe"],
    ["config", "/dev/zero"],
    ["config", "/dev/stdin"],
    ["config", "socket"],
    ["config", "missing.toml"],
    ["config", "pipe/inner.toml"],
    ["config", "sparse"],
    ["config", "tnl-tiny", "\udcff=1"],
    ["config", "tnl-tiny", "data.store=\udcff"],
    ["config", "tnl-tiny", f"train.steps={ENDLESS}"],
    ["config", "tnl-tiny", "model.num_heads=7", "model.hidden_size=1000000000000"],
    ["config", "tnl-tiny", "model.vocab_size=1000000000000"],
    ["config", "tnl-tiny", f"model.mixer=tnl*{ENDLESS}"],
    ["config", "tnl-tiny", "model.mixer=" + "[" * 5000],
    ["config", "tnl-tiny", "="],
    ["config", "tnl-tiny", LONG],
    ["config", "nested.toml"],
    ["config", "number.toml"],
    ["config", "nul.toml"],
    ["config", "tnl-tiny", "tnl-tiny"],
    ["plan", "tnl-tiny", "--processes", ENDLESS],
    ["plan", "tnl-tiny", "--processes", "-1"],
    ["plan", "tnl-tiny", "--processes", "1" + "0" * 400],
    ["plan", "tnl-tiny", "--nodes", ENDLESS],
    ["plan", "tnl-tiny", "--nodes", "1..999999999999999999999"],
    ["plan", "tnl-tiny", "--nodes", "1", "--layout", f"tensor={ENDLESS}"],
    ["plan", "pipe"],
    ["train", "tnl-tiny", "--run", LONG],
    ["train", "tnl-tiny", "--run", ""],
    ["train", "tnl-tiny", "--processes", "0"],
    ["train", "tnl-tiny", "--processes", "99999999999999999999"],
    ["train", "tnl-tiny", "--stop-after", ENDLESS + "d"],
    ["train", "tnl-tiny", "--scheduler", LONG],
    ["train", "/dev/zero"],
    ["submit", "tnl-tiny", "--time", ENDLESS + ":00:00"],
    ["submit", "tnl-tiny", "--nodes", ENDLESS],
    ["submit", "tnl-tiny", "--nodes", "-1", "--dry-run"],
    ["submit", "tnl-tiny", "launch.setup=" + "[" * 5000],
    ["submit", "tnl-tiny", "--chain", "99999999999999999999", "--dry-run"],
    ["checkpoint", "show", f"runs/a@{ENDLESS}"],
    ["checkpoint", "show", LONG + "@1"],
    ["checkpoint", "verify", ""],
    ["checkpoint", "list", "pipe"],
    ["checkpoint", "prune", "folder", "--keep", ENDLESS],
    ["checkpoint", "diff", "@", "@"],
    ["logs", LONG],
    ["logs", "folder", "--rank", "-" + ENDLESS],
    ["cancel", "/dev/zero"],
    ["cancel", ""],
    ["generate", "folder", "--prompt-file", "/dev/zero"],
    ["generate", f"folder@{ENDLESS}"],
    ["generate", LONG],
    ["predict", LONG, "--file", LONG],
    ["predict", "folder", "--file", "/dev/zero"],
    ["draw", LONG, "--out", "picture.png"],
    ["draw", "folder", "--out", LONG],
    ["draw", "folder", "--out", "pipe"],
    ["draw", "folder", "--out", "picture.png", "--count", ENDLESS],
    ["draw", "folder", "--out", "picture.png", "--seed", ENDLESS],
    ["draw", "folder", "--out", "picture.png", "--guidance", "nan"],
    ["monitor", LONG],
    ["monitor", "folder", "--port", "99999999"],
    ["runs", LONG],
    ["runs", "--watch", ENDLESS],
    ["data", "inspect", "/dev/zero"],
    ["data", "inspect", LONG],
    ["data", "verify", "pipe"],
    ["data", "prepare", "pipe.toml", "--out", "out"],
    ["data", "prepare", "empty-path.toml", "--out", "out"],
    ["data", "plan", "/dev/zero", "--vocab-size", ENDLESS],
    ["data", "plan", "empty-path.toml", "--name", LONG],
    ["data", "samples", "folder", "--step", ENDLESS],
    ["completion", LONG],
    ["chaos", "pipe"],
    ["doctor", "/dev/zero"],
    [LONG],
    ["\u202e"],
    [""],
    ["config", "tnl-tiny", "--json", "--json=1"],
]


@pytest.fixture(autouse=True)
def hostile_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: everything that is not what it seems."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    Path("folder").mkdir()
    os.mkfifo("pipe")
    os.mkfifo("pipe.toml")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("socket")
    Path("sparse").touch()
    os.truncate("sparse", 2**40)
    Path("nested.toml").write_text("a = " + "[" * 50_000)
    Path("number.toml").write_text(f"a = {ENDLESS}")
    Path("nul.toml").write_text('extends = "tnl-tiny"\ndata.store = "a\\u0000b"')
    Path("empty-path.toml").write_text('[sources.a]\npaths = [""]')
    return tmp_path


def named(arguments: list[str]) -> str:
    return " ".join(arguments)[:60].encode("ascii", "replace").decode()


@pytest.mark.parametrize("arguments", REFUSED, ids=map(named, REFUSED))
def test_hostile_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], hostile_folder: Path
) -> None:
    before = sorted(hostile_folder.rglob("*"))
    began = time.process_time()
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else -1
    took_s = time.process_time() - began
    output = capsys.readouterr()
    assert code in (USAGE, ATTENTION), output.err[:1000]
    assert "error: " in output.err
    assert len(output.err) + len(output.out) < MOST_CHARACTERS
    assert took_s < MOST_CPU_S
    assert sorted(hostile_folder.rglob("*")) == before, "a mistake left something behind"


def test_the_last_of_an_option_given_twice_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "tnl-tiny", "--processes", "3", "--processes", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "/dev/stdin"],
        ["config", "pipe"],
        ["config", "nested.toml"],
        ["train", "tnl-tiny", "--run", "x" * 5000],
        ["config", "tnl-tiny", b"data.store=\xff".decode(errors="surrogateescape")],
    ],
    ids=map(str, range(5)),
)
def test_real_commands_are_refused(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "lightscale", *arguments]
    ended = subprocess.run(command, stdin=subprocess.PIPE, capture_output=True, timeout=60, check=False)
    assert ended.returncode in (USAGE, ATTENTION)
    assert b"error: " in ended.stderr
    assert b"Traceback" not in ended.stderr
    assert len(ended.stderr) < MOST_CHARACTERS
