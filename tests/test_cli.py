"""The command line frame: what is imported, exit codes, and the `config` command."""

import errno
import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

import pytest

from lightscale import __version__, cli
from lightscale.cli import COMMANDS, Command, main
from lightscale.config.fields import describe_fields
from lightscale.config.files import load, to_toml
from lightscale.errors import UserError, remedy_of_limit, summary


def run_python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=60)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command `probe`; tests set its `run`."""
    module = ModuleType("probe_command")
    module.add_arguments = lambda parser: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(COMMANDS, "probe", Command(module=module.__name__, help="probe"))
    return module


def test_help_lists_every_command_and_imports_none(tmp_path: Path) -> None:
    code = (
        "import sys; from lightscale.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print(sorted({'torch', 'pydantic', 'rich', 'numpy'} & set(sys.modules)))"
    )
    result = run_python("-c", code, cwd=tmp_path)
    assert result.stdout.rstrip().endswith("[]")
    for name, command in COMMANDS.items():
        assert f"\n    {name}" in result.stdout
        # On narrow terminals it goes on in a line of its own.
        assert command.help in " ".join(result.stdout.split())


def test_configuration_does_not_import_torch(tmp_path: Path) -> None:
    code = "import sys, lightscale.config.commands.config; print('torch' in sys.modules)"
    assert run_python("-c", code, cwd=tmp_path).stdout == "False\n"


def test_module_and_console_script_are_the_same_command(tmp_path: Path) -> None:
    module = run_python("-m", "lightscale", "--version", cwd=tmp_path)
    script = subprocess.run(
        [Path(sys.executable).with_name("lightscale"), "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert module.stdout == script.stdout == f"lightscale {__version__}\n"


@pytest.mark.parametrize("arguments", [["trian"], ["--zebra"], ["--", "train"], ["config", "--zebra"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 0
    assert "commands:" in capsys.readouterr().out


def test_exit_code_is_the_commands(command: ModuleType) -> None:
    command.run = lambda args: 75
    assert main(["probe"]) == 75


def test_a_persons_mistake_is_one_message_and_78(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: Namespace) -> int:
        raise UserError("first\nsecond")

    command.run = run
    assert main(["probe"]) == 78
    assert capsys.readouterr().err == "error: first\n       second\n"


def test_other_errors_keep_their_traceback(command: ModuleType) -> None:
    def run(args: Namespace) -> int:
        raise ValueError("a bug")

    command.run = run
    with pytest.raises(ValueError, match="a bug"):
        main(["probe"])


def test_names_cannot_command_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Colours, a title, and letters from right to left; letters of all languages stay."""
    name = tmp_path / "a\x1b[31mred\x1b]0;title\x07\u202egpj\x9b2Jé中.toml"
    assert main(["config", str(name)]) == 78
    error = capsys.readouterr().err
    assert r"a\x1b[31mred\x1b]0;title\x07\u202egpj\x9b2Jé中.toml" in error
    assert all(one.isprintable() or one == "\n" for one in error)


def test_interrupt_is_130(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: Namespace) -> int:
        raise KeyboardInterrupt

    command.run = run
    assert main(["probe"]) == 130
    assert "Traceback" not in capsys.readouterr().err


# `plan` prints tables by rich, which has an exit code of its own for a closed pipe.
@pytest.mark.parametrize("name", ["config", "plan"])
def test_a_closed_pipe_is_quiet(tmp_path: Path, tiny_run: Path, name: str) -> None:
    """`lightscale config … | true`, with more output than a pipe holds."""
    with tiny_run.open("a", encoding="utf-8") as file:
        file.write("".join(f"[data.validation.v{number}]\nsource = 's'\n" for number in range(4000)))
    code = "import sys; from lightscale.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, name, str(tiny_run)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (cli.EXIT_BROKEN_PIPE, "")


def test_overrides_may_stand_on_both_sides_of_options(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def add_arguments(parser: ArgumentParser) -> None:
        parser.add_argument("config")
        parser.add_argument("overrides", nargs="*")
        parser.add_argument("--run")

    command.add_arguments = add_arguments
    command.run = lambda args: print(args.config, args.overrides, args.run) or 0  # type: ignore[func-returns-value]
    assert main(["probe", "a.toml", "x.y=1", "--run", "r", "x.z=2"]) == 0
    assert capsys.readouterr().out == "a.toml ['x.y=1', 'x.z=2'] r\n"


def test_commands_may_have_subcommands(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def add_arguments(parser: ArgumentParser) -> None:
        inner = parser.add_subparsers(dest="action", required=True)
        inner.add_parser("prepare").add_argument("store")

    command.add_arguments = add_arguments
    command.run = lambda args: print(args.action, args.store) or 0  # type: ignore[func-returns-value]
    assert main(["probe", "prepare", "here"]) == 0
    assert capsys.readouterr().out == "prepare here\n"


def test_config_prints_the_resolved_form(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(tiny_run), "train.steps=9"]) == 0
    assert capsys.readouterr().out == to_toml(load(tiny_run, ["train.steps=9"]))
    assert main(["config", str(tiny_run), "--json", "train.steps=9"]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["steps"] == 9


def test_piped_every_field_is_one_whole_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--describe"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["field", "type", "default", "meaning"]
    fields = describe_fields()
    assert len(lines) == len(fields)
    for line, field in zip(lines, fields, strict=True):
        assert line.split("  ")[0] == field.key
        assert line.endswith(f"  {field.description}")
        assert f"  {field.type} " in line
        assert f"  {field.default} " in line


@pytest.mark.parametrize("name", ["train", "submit", "chaos"])
def test_usage_asks_for_what_is_missing_and_no_more(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name])
    assert capsys.readouterr().err.endswith(f"lightscale {name}: error: the following arguments are required: CONFIG\n")


def test_config_describes_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--describe"]) == 0
    table = capsys.readouterr().out
    assert "data.validation.NAME.sequences" in table
    assert main(["config", "--describe", "--json"]) == 0
    fields = {field["key"]: field for field in json.loads(capsys.readouterr().out)}
    assert fields["metrics.position_buckets"]["default"] == "8"
    assert all(key in table for key in fields)


def test_config_without_a_file_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 78
    assert "no CONFIG given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "runs/x"), "free some space of the quota"),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), "size of files (`ulimit -f`)"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "data/x"), "open files (`ulimit -n`)"),
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), "fs.file-max"),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "`ulimit -u`"),
        (MemoryError(), "`ulimit -v`"),
        # As torch, the C++ library, Python's threads, and libraries written in Rust report them.
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            "`ulimit -v`",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB."), "smaller batches"),
        (RuntimeError("Resource temporarily unavailable"), "`ulimit -u`"),
        (RuntimeError("can't start new thread"), "OMP_NUM_THREADS=1"),
        (Exception("Too many open files (os error 24)"), "`ulimit -n`"),
        (Exception("Too many open files in system (os error 23)"), "fs.file-max"),
        # Not limits.
        (RuntimeError("[gloo] recv: Resource temporarily unavailable from 10.0.0.1"), None),
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT)), None),
        (KeyError("memory"), None),
        (UserError("not enough space; File too large"), None),
    ],
)
def test_limits_of_the_system_have_remedies(error: Exception, remedy: str | None) -> None:
    for one in (error, caused(error)):
        found = remedy_of_limit(one)
        assert found is None if remedy is None else found is not None and remedy in found
        assert summary(one).endswith("" if found is None else f"; {found}")


def caused(cause: Exception) -> Exception:
    """An error of a library around the system's."""
    try:
        raise ImportError("a library") from cause
    except ImportError as error:
        return error


def test_an_error_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def use_much(arguments: list[str]) -> int:
        raise MemoryError

    monkeypatch.setattr(cli, "_dispatch", use_much)
    assert cli.main(["generate"]) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: MemoryError; free memory, ")


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 78), (errno.EROFS, 78), (errno.ENOENT, None)])
def test_a_full_or_read_only_disk_is_one_line(
    number: int, code: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(arguments: list[str]) -> int:
        raise OSError(number, os.strerror(number), "runs/x/metrics.jsonl")

    monkeypatch.setattr(cli, "_dispatch", write)
    if code is None:
        with pytest.raises(OSError, match="No such file"):
            cli.main(["train"])
        return
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err.startswith(f"error: [Errno {number}] {os.strerror(number)}: 'runs/x/metrics.jsonl'")
