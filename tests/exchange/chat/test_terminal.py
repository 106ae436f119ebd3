"""``lightscale chat`` as people and programs meet it: lines, commands, interruptions, and what is refused."""

import contextlib
import io
import json
import os
import pty
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.cli import main
from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.errors import UserError
from lightscale.evaluation.inference.prompts import Sampling
from lightscale.exchange.chat import command
from lightscale.exchange.chat.terminal import HELP, Talk, talk

helpers = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("conftest.py"))))


def lead(
    model: Any,
    lines: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    as_json: bool = False,
    is_terminal: bool = False,
    tokens: int = 50,
) -> Any:
    session = model.chat()
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    how = Talk(tokens=tokens, sampling=Sampling(), as_json=as_json, origin="the model", is_terminal=is_terminal)
    talk(session, how)
    return session


def test_a_pipe_has_a_message_in_each_line(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    helpers.say(scripted, "Drei 🎉<|im_end|>", "Vier<|im_end|>")
    session = lead(scripted, "How many?\n\n  \n//undo\n", monkeypatch)
    assert capsys.readouterr() == ("Drei 🎉\nVier\n", "")
    assert [one["content"] for one in session.messages] == ["How many?", "Drei 🎉", "/undo", "Vier"]


def test_json_has_all_of_an_answer(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    helpers.say(scripted, "a\nb<|im_end|>", "long")
    lead(scripted, "x\ny\n", monkeypatch, as_json=True, tokens=4)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["role"], first["content"], first["ended"], first["tokens"]) == ("assistant", "a\nb", "end_of_turn", 4)
    assert (second["content"], second["ended"], second["reads_again"]) == ("long", "tokens", False)
    assert second["tokens_read"] < first["tokens_read"] + 4


def test_what_is_saved_is_prepared_again(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    helpers.say(scripted, "Drei 字<|im_end|>", "weg<|im_end|>")
    for name in ("a.jsonl", "b.json"):
        session = scripted.chat("Kurz.")
        monkeypatch.setattr(
            sys, "stdin", io.StringIO(f"How?\nundone\n/undo\n/save {tmp_path / name}\n/quit\nnot sent\n")
        )
        how = Talk(tokens=9, sampling=Sampling(), as_json=False, origin="", is_terminal=False)
        helpers.say(scripted, *([] if name == "a.jsonl" else ["Drei 字<|im_end|>", "weg<|im_end|>"]))
        talk(session, how)
    assert f"({tmp_path / 'a.jsonl'}: 3 messages)" in capsys.readouterr().err
    chat = make_corpus(
        {"sources": {"talks": {"paths": ["x"], "format": "chat", "chat": {"template": "chatml"}}}}, origin="test"
    ).chats()["talks"]
    line, listed = (json.loads((tmp_path / name).read_text()) for name in ("a.jsonl", "b.json"))
    assert [line] == listed
    assert chat.text_of(line).text == (
        "<|im_start|>system\nKurz.<|im_end|>\n<|im_start|>user\nHow?<|im_end|>\n"
        "<|im_start|>assistant\nDrei 字<|im_end|>\n"
    )
    whole = (tmp_path / "a.jsonl").read_bytes()
    helpers.say(scripted, "ja<|im_end|>")
    with pytest.raises(UserError, match="the file exists; use another path"):
        lead(scripted, f"Now?\n/save {tmp_path / 'a.jsonl'}\n", monkeypatch)
    assert (tmp_path / "a.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("/undo", "/undo: the conversation has no turn to take back"),
        ("/sav x.jsonl", "/sav: no such command; /help shows them"),
        ("/save", "/save : FILE must be a path, not empty"),
        ("/save x.txt", "use a name that ends in .jsonl or .json"),
        ("/save x.json", "the conversation has no message yet"),
        ("a\udcff", "not valid UTF-8 at character 2"),
    ],
)
def test_mistakes_end_a_pipe_and_are_said_in_a_terminal(
    line: str, fault: str, scripted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as raised:
        lead(scripted, f"{line}\n", monkeypatch)
    assert fault in str(raised.value)
    helpers.say(scripted, "ja<|im_end|>")
    lead(scripted, f"{line}\n/help\nhello\n", monkeypatch, is_terminal=True)
    shown = capsys.readouterr()
    assert f"error: {raised.value}\n{HELP}\n" in shown.err
    assert shown.out == "> > > ja\n> \n"


def test_a_terminal_obeys_no_answer(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    from lightscale.output.streams import spell_out_on_terminals

    with monkeypatch.context() as within:
        within.setattr(sys, "stdout", sys.stdout)
        spell_out_on_terminals()
        helpers.say(scripted, "\x1b[2Jred\x1b[31m\u202e\a<|im_end|>")
        lead(scripted, "x\n", monkeypatch)
    assert capsys.readouterr().out == "\\x1b[2Jred\\x1b[31m\\u202e\\x07\n"


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    scripted: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    helpers.say(scripted, "abcdef<|im_end|>")
    whole, count = type(scripted).feed, [0]

    def feed(self: Any, ids: Any, states: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(self, ids, states)

    monkeypatch.setattr(type(scripted), "feed", feed)
    before = signal.getsignal(signal.SIGINT)
    session = scripted.chat()
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
    talk(session, Talk(tokens=50, sampling=Sampling(), as_json=False, origin="", is_terminal=False))
    assert signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr().out == "abc\n"
    assert (session.last.ended, session.messages[-1]["content"]) == ("interrupted", "abc")
    scripted.script.clear()
    helpers.say(scripted, "more<|im_end|>")
    assert session.ask("y") == "more"


def test_a_run_without_a_template_or_of_another_task_is_refused_before_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text('extends = ["masked-tiny"]\n')
    assert main(["chat", str(tmp_path)]) == 78
    assert 'its task.name = "masked": only models that predict the next token answer' in capsys.readouterr().err
    (tmp_path / "config.toml").write_text('extends = ["tnl-tiny"]\n')
    assert main(["chat", str(tmp_path)]) == 78
    assert f"{tmp_path}: no chat template" in (message := capsys.readouterr().err)
    assert "use --template chatml or a file's path" in message
    assert main(["chat", str(tmp_path), "--template", "chatmll"]) == 78
    assert "--template = chatmll: no such file; use chatml, llama3, qwen" in capsys.readouterr().err
    assert main(["chat", str(tmp_path / "nowhere")]) == 78
    assert "nowhere" in capsys.readouterr().err
    for option, fault in (("--tokens=0", "--tokens 0: must be at least 1"), ("--temperature=-1", "temperature -1")):
        assert main(["chat", str(tmp_path), option]) == 78
        assert fault in capsys.readouterr().err


SHELL = """
import runpy, sys
from lightscale.cli import main
helpers = runpy.run_path(sys.argv[1])
import torch, lightscale.exchange.library as library
from lightscale.data_pipeline.tokenizers import HuggingFaceTokenizer
from lightscale.exchange.plain.model import CausalModel, Shape
shape = Shape(vocab_size=263, hidden_size=32, mixers=("tnl",), num_attention_heads=4, intermediate_size=48)
tokenizer = HuggingFaceTokenizer(helpers["byte_level_file"](), origin="test")
chat = helpers["chat_of"]("chatml")
model = helpers["Scripted"](module=CausalModel(shape), tokenizer=tokenizer, origin="the model", chat_template=chat)
helpers["say"](model, "first\\x1b[2J<|im_end|>", "second<|im_end|>")
library.load = lambda source, device: model
sys.exit(main(["chat", "RUN", "--template", "chatml"]))
"""


@contextlib.contextmanager
def terminal(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`lightscale chat` behind a terminal: the process, and the end that people have."""
    ours, theirs = pty.openpty()
    (folder / "RUN").mkdir()
    (folder / "RUN/config.toml").write_text('extends = ["tnl-tiny"]\n')
    words = [sys.executable, "-c", SHELL, str(Path(__file__).with_name("conftest.py"))]
    with subprocess.Popen(words, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as one:
        os.close(theirs)
        try:
            yield one, ours
        finally:
            one.kill()
            os.close(ours)


def read_until(end: int, text: bytes, within_s: float = 200.0) -> bytes:
    seen, deadline_s = b"", time.monotonic() + within_s
    while text not in seen:
        assert time.monotonic() < deadline_s, seen
        try:
            seen += os.read(end, 4096)
        except OSError:  # the process has ended
            raise AssertionError(seen) from None
    return seen


@pytest.mark.timeout(400)
def test_people_talk_in_a_terminal_until_ctrl_d(tmp_path: Path, needs: Callable[..., None]) -> None:
    needs("pseudo-terminals")
    with terminal(tmp_path) as (process, end):
        read_until(end, b"> ")
        os.write(end, b"hello\n")
        assert b"first\\x1b[2J" in read_until(end, b"[2J\r\n> ")
        os.write(end, b"/undo\n")
        read_until(end, b"(the last turn is taken back)\r\n> ")
        os.write(end, b"again\n")
        read_until(end, b"second\r\n> ")
        os.write(end, b"\x04")
        assert process.wait(60) == 0


def test_the_names_of_exports_are_those_of_the_command() -> None:
    from lightscale.exchange.files import export_config

    assert export_config.NAME == command._MODEL
