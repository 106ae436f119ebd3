"""RUN in every command: one name, the same forms, one error."""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightscale.cli import COMMANDS
from lightscale.config.arguments import CONFIG, OVERRIDE, RUN, require_run, run_argument, run_path
from lightscale.errors import UserError


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()


def test_a_name_is_a_run_in_runs_unless_it_is_a_path() -> None:
    assert run_path("mine") == Path("runs/mine")
    assert run_path("runs/mine") == Path("runs/mine")
    assert run_path("new") == Path("new")
    assert run_path(".") == Path()
    assert run_path("..") == Path("..")
    assert run_path("x" * 1000) == Path("x" * 1000)
    Path("mine").mkdir()
    assert run_path("mine") == Path("mine")


def test_what_is_no_run_is_refused_with_what_may_be_meant() -> None:
    require_run(run_path("mine"))
    Path("mine").mkdir()
    for given, message in (
        ("mine", "mine is not a run directory: it has no config.toml; did you mean runs/mine?"),
        ("ohter", "no run ohter: neither ohter nor runs/ohter exists; did you mean runs/other?"),
        ("runs/zebra", "no run runs/zebra: no such directory; `lightscale runs` lists runs"),
    ):
        with pytest.raises(UserError) as caught:
            require_run(run_path(given))
        assert str(caught.value) == message


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Of all commands, and of theirs."""
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=name)
        importlib.import_module(command.module).add_arguments(parser)
        yield parser
        if parser._subparsers is not None:
            for action in parser._subparsers._group_actions:
                assert isinstance(action.choices, dict)
                yield from action.choices.values()


def test_every_command_calls_a_run_run() -> None:
    runs = set()
    for parser in parsers():
        for action in parser._actions:
            where = f"{parser.prog} {action.dest} {action.metavar}"
            if action.dest in ("run", "runs", "run_dir", "run_directory"):
                assert str(action.metavar).startswith(RUN), where
                # RUN@STEP is taken apart first.
                assert action.metavar != RUN or action.type is run_argument, where
                runs.add(parser.prog)
            if "--run" in action.option_strings:
                assert action.option_strings == ["--run", "--run-dir"], where
            assert (action.dest == "config") == (action.metavar == CONFIG), where
            assert (action.dest == "overrides") == (action.metavar == OVERRIDE), where
    expected = {"train", "submit", "doctor", "chaos", "generate", "monitor", "logs", "cancel"}
    assert expected <= runs
