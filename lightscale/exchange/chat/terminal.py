"""A conversation on stdin and stdout: lines of a terminal, or of a pipe, with commands that begin with ``/``."""

import contextlib
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightscale.config.text import path_fault
from lightscale.data_pipeline.whole_files import whole_file
from lightscale.errors import UserError, shortened
from lightscale.evaluation.inference.prompts import Sampling
from lightscale.output.stdin_lines import stdin_lines

if TYPE_CHECKING:
    from lightscale.exchange.chat.session import Answer, ChatSession

HELP = """\
/undo        take back the last message and its answer
/save FILE   write the conversation to a new .jsonl or .json file, for `lightscale data prepare`
/quit        end; so does Ctrl-D
/help        show the commands
//text       send /text
Ctrl-C       end an answer; the conversation goes on behind it"""
_NOTES = {
    "tokens": "the answer has --tokens tokens; ask the model to go on, or use a larger --tokens",
    "context": "the conversation has filled the context; /undo the last turn, or begin another conversation",
}


@dataclass(frozen=True, kw_only=True)
class Talk:
    """How a conversation is led and shown."""

    tokens: int
    """Most tokens of an answer."""
    sampling: Sampling
    as_json: bool
    origin: str
    """The checkpoint or export, for people."""
    is_terminal: bool
    """Whether somebody types: mistakes are then reported, and do not end the conversation."""


def talk(session: "ChatSession", how: Talk) -> None:
    """Answer the messages of stdin until it ends, or ``/quit``. Raises ``UserError`` where nobody types."""
    if how.is_terminal:
        _note(f"{how.origin}; /help shows the commands")
    for line in stdin_lines(is_terminal=how.is_terminal):
        try:
            if line.startswith("/") and not line.startswith("//"):
                if line.strip() == "/quit":
                    return
                _obey(session, line.strip(), how)
            elif line.strip():
                _answer(session, line.removeprefix("/") if line.startswith("//") else line, how)
        except UserError as error:
            if not how.is_terminal:
                raise
            _note(f"error: {error}")
        except KeyboardInterrupt:
            if not how.is_terminal:
                raise
            _note("\ninterrupted; the message is not part of the conversation")


def _answer(session: "ChatSession", text: str, how: Talk) -> None:
    """Show an answer as it comes, or as JSON when it is complete."""
    # As arguments do, a terminal passes bytes that are not UTF-8 as surrogates.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the message is not valid UTF-8 at character {error.start + 1}; correct it") from error
    with contextlib.closing(_Stop()) as stop:
        parts = session.stream(text, tokens=how.tokens, sampling=how.sampling)
        for part in parts:
            if part and not how.as_json:
                _show(part)
            if stop.is_asked:
                parts.close()  # type: ignore[attr-defined] # of a generator
                break
    answer = session.last
    assert answer is not None
    if how.as_json:
        _show(json.dumps(_record(answer)) + "\n")
        return
    _show("\n")
    if note := _NOTES.get(answer.ended):
        _note(f"({note})")
    if answer.reads_again and how.is_terminal:
        _note(
            f"(the chat template has changed earlier messages: all {answer.num_read:,} tokens of the conversation were "
            "read again)"
        )


def _record(answer: "Answer") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": answer.text,
        "ended": answer.ended,
        "tokens": answer.num_written,
        "tokens_read": answer.num_read,
        "reads_again": answer.reads_again,
    }


def _obey(session: "ChatSession", line: str, how: Talk) -> None:
    command, _, argument = line.partition(" ")
    match command:
        case "/help":
            _note(HELP)
        case "/undo":
            if not session.undo():
                raise UserError("/undo: the conversation has no turn to take back")
            if how.is_terminal:
                _note("(the last turn is taken back)")
        case "/save":
            num_messages = _save(session, argument.strip())
            _note(f"({argument.strip()}: {num_messages} messages)")
        case _:
            raise UserError(f"{shortened(command)}: no such command; /help shows them, and //text sends /text")


def _save(session: "ChatSession", name: str) -> int:
    """Write the conversation; the number of its messages."""
    path = Path(name)
    if fault := path_fault(name):
        raise UserError(f"/save {shortened(name)}: FILE {fault}")
    if path.suffix not in (".jsonl", ".json"):
        raise UserError(f"/save {shortened(name)}: use a name that ends in .jsonl or .json")
    if not session.messages:
        raise UserError("/save: the conversation has no message yet; send one first")
    if path.exists():
        raise UserError(f"/save {name}: the file exists; use another path")
    record = {"messages": session.messages}
    text = json.dumps([record] if path.suffix == ".json" else record, ensure_ascii=False)
    try:
        with whole_file(path) as draft:
            draft.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"/save {name}: {error.strerror}; use another path") from error
    return len(session.messages)


class _Stop:
    """Ctrl-C during an answer asks for its end; a second one interrupts as usual. Only in the main thread."""

    def __init__(self) -> None:
        self.is_asked = False
        self._before: Any = None
        with contextlib.suppress(ValueError):
            self._before = signal.signal(signal.SIGINT, self._ask)

    def close(self) -> None:
        """Ctrl-C interrupts again."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
