"""`lightscale generate`: files of prompts, lines of stdin, a terminal, ranks; and what is refused."""

import contextlib
import io
import json
import os
import pty
import runpy
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.cli import main
from lightscale.config.files import load
from lightscale.data_pipeline.tokenizers import train_sentencepiece
from lightscale.errors import UserError
from lightscale.launch.commands.model_ranks import check_ranks
from lightscale.runs.run_directory import RunDirectory

TESTS = Path(__file__).parents[2]
tnl = SimpleNamespace(**runpy.run_path(str(TESTS / "evaluation" / "generation" / "test_generate.py")))
ranks = SimpleNamespace(**runpy.run_path(str(TESTS / "helpers" / "rank_commands.py")))
pytestmark = pytest.mark.timeout(600)
RunRanks = Callable[..., list[Any]]
Outcome = tuple[int, str, str]

PROMPTS: list[dict[str, Any]] = [
    {"prompt": "the start of", "id": "first"},
    {"prompt": "", "tokens": 3},
    {
        "prompt": "the end of the text, the start of the next: 字 \u2028" * 3,
        "temperature": 0,
        "repetition_penalty": 1.5,
    },
    {"prompt": "the", "tokens": 25, "top_k": 50, "top_p": 0.9},
    {"prompt": "the", "seed": 5},
]
LINES = [prompt["prompt"] for prompt in PROMPTS if "\u2028" not in prompt["prompt"]]
OPTIONS = ["--tokens", "12", "--temperature", "1", "--seed", "3"]


def test_ranks_fit_whatever_a_step_of_training_measures(tiny_config: Callable[..., Any]) -> None:
    """A run with measurements of the gradient noise can be used: by one rank, and by stages."""
    words = ["metrics.gradient_noise_every=2", "train.global_batch_size=8", "train.micro_batch_size=2"]
    check_ranks(tiny_config(*words), 1)
    check_ranks(tiny_config(*words, "parallel.pipeline=2"), 2)
    with pytest.raises(UserError, match="1 processes cannot be divided"):
        check_ranks(tiny_config(*words, "parallel.pipeline=2"), 1)


def called(*words: str, stdin: str = "") -> Outcome:
    """Exit code, stdout and stderr of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.stdin = sys.stdin, io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["generate", *words])
    finally:
        sys.stdin = before
    return code, out.getvalue(), err.getvalue()


def records(outcome: Outcome) -> list[dict[str, Any]]:
    code, out, err = outcome
    assert code == 0, err
    return [json.loads(line) for line in out.split("\n")[:-1]]


def on_one(rank: int, world_size: int, init_method: str, folder: Path) -> dict[str, Any]:
    """All that needs a model, in one process."""
    for name in ("tnl", "llama"):
        tnl.save(folder / name, 0, 1, f"{init_method}-{name}")
    run, file = str(folder / "tnl"), ["--file", str(folder / "prompts.jsonl")]
    found: dict[str, Any] = {"json": called(run, *file, *OPTIONS, "--json", "--batch", "2")}
    found["plain"] = called(run, *file, *OPTIONS)
    found["alone"] = []
    for record, prompt in zip(records(found["json"]), PROMPTS, strict=True):
        words = {
            "tokens": 12,
            "temperature": 1.0,
            **{key: prompt[key] for key in prompt if key not in ("prompt", "id")},
        }
        words["seed"] = record["seed"]
        options = [f"--{key.replace('_', '-')}={value}" for key, value in words.items()]
        text = [f"--prompt={prompt['prompt']}"] if prompt["prompt"] else []
        found["alone"] += records(called(run, *text, *options, "--json"))
    text = found["alone"][3]["text"]
    found["stop"] = text[4:7]
    stopped = ["--prompt", "the", "--tokens", "25", "--top-k", "50", "--top-p", "0.9", "--temperature", "1"]
    stopped += [f"--seed={found['alone'][3]['seed']}", f"--stop={found['stop']}", "--stop=nowhere to be found"]
    found["stopped"] = called(run, *stopped, "--json")
    found["shown"] = called(run, *stopped)
    found["lines"] = called(run, "--interactive", *OPTIONS, "--json", stdin="".join(f"{line}\n" for line in LINES))
    llama = str(folder / "llama")
    long = ["--prompt", "the start of the next " * 20]
    found["too long"] = called(llama, *long)
    found["fed all the same"] = called(llama, *long, "--context", "1000", "--tokens", "2", "--json")
    found["beyond"] = called(llama, "--prompt", "the start", "--tokens", "70", "--temperature", "0")
    found["too long in a file"] = called(llama, "--file", str(folder / "long.jsonl"))
    found["a line that is too long"] = called(llama, "--interactive", "--tokens", "1", stdin=f"a\n{long[1]}\n")
    return found


def on_two(rank: int, world_size: int, init_method: str, folder: Path) -> list[Outcome]:
    """As ranks that torchrun started: a model on two, and two models."""
    outcomes = []
    for number, layout in enumerate((["parallel.tensor=2"], [])):
        words = ["generate", str(folder / "tnl"), *layout, "--file", str(folder / "prompts.jsonl"), *OPTIONS, "--json"]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            ((code, err),) = ranks.commands(rank, world_size, f"{init_method}-{number}", str(folder), [words])
        outcomes.append((code, out.getvalue(), err))
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    tnl.write_store(folder / "store", train_sentencepiece([tnl.TEXT] * 20, vocab_size=420))
    (folder / "run.toml").write_text(tnl.CONFIG.format(root=tnl.ROOT, store=folder / "store"), encoding="utf-8")
    for name in ("tnl", "llama"):
        RunDirectory(folder / name).create_or_open(load(folder / "run.toml", [f"model.mixer={name}"]))
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    long = json.dumps({"prompt": "the start of the next " * 20})
    (folder / "long.jsonl").write_text(f'{{"prompt": "the"}}\n{long}\n', encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def found(folder: Path, run_ranks: RunRanks) -> dict[str, Any]:
    (found,) = run_ranks(on_one, 1, folder, timeout_s=400)
    return dict(found)


def test_a_file_of_prompts(found: dict[str, Any], folder: Path) -> None:
    written = records(found["json"])
    assert [(one["prompt"], one.get("id")) for one in written] == [(one["prompt"], one.get("id")) for one in PROMPTS]
    assert {one["checkpoint"] for one in written} == {str(folder / "tnl/checkpoints/step-00000002")}
    for one, prompt in zip(written, PROMPTS, strict=True):
        assert one["end_of_text"] == (len(one["tokens"]) < prompt.get("tokens", 12))
        assert one["stop"] is None
    total = sum(len(one["tokens"]) for one in written)
    assert f"5 texts, {total} tokens in " in found["json"][2]


def test_each_text_of_a_file_can_be_written_alone(found: dict[str, Any]) -> None:
    written = records(found["json"])
    assert [(one["text"], one["tokens"]) for one in written] == [(one["text"], one["tokens"]) for one in found["alone"]]
    # The same prompt with other random numbers.
    assert len({one["seed"] for one in written}) == 5
    assert written[3]["text"][:8] != written[4]["text"][:8]


def test_texts_of_a_file_for_people(found: dict[str, Any]) -> None:
    expected = [
        f"--- {number} of 5 ---\n{one['prompt']}{one['text']}\n"
        for number, one in enumerate(records(found["json"]), start=1)
    ]
    assert found["plain"][:2] == (0, "".join(expected))


def test_stop_strings(found: dict[str, Any]) -> None:
    (one,) = records(found["stopped"])
    whole = found["alone"][3]
    assert (one["text"], one["stop"]) == (whole["text"][: whole["text"].index(found["stop"])], found["stop"])
    assert one["tokens"] == whole["tokens"][: len(one["tokens"])] != whole["tokens"]
    assert not one["end_of_text"]
    assert found["shown"][1] == f"the{one['text']}\n"


def test_lines_of_stdin(found: dict[str, Any]) -> None:
    written = records(found["lines"])
    assert [one["prompt"] for one in written] == LINES
    first = records(found["json"])[0]
    assert (written[0]["seed"], written[0]["tokens"]) == (3, first["tokens"])
    assert len({one["seed"] for one in written}) == len(LINES)


def test_prompts_beyond_the_context(found: dict[str, Any]) -> None:
    code, out, err = found["too long"]
    assert (code, out) == (2, "")
    assert "--prompt: " in err
    assert " tokens exceed the context of " in err and ", 64 tokens; use" in err
    (one,) = records(found["fed all the same"])
    assert len(one["tokens"]) == 2
    code, out, err = found["beyond"]
    assert code == 0
    assert "longer than 64 tokens" in err
    code, out, err = found["too long in a file"]
    assert (code, out) == (2, "")
    assert "long.jsonl:2: " in err
    code, out, err = found["a line that is too long"]
    assert code == 2
    assert out.startswith("a")
    assert "line 2: " in err


def test_two_ranks_write_what_one_writes(found: dict[str, Any], folder: Path, run_ranks: RunRanks) -> None:
    main_rank, other = run_ranks(on_two, 2, folder, timeout_s=300)
    for first, second in zip(main_rank, other, strict=True):
        assert records(first) == records(found["json"])
        assert second == (0, "", "")


ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1", "PYTHONUTF8": "1"}


# The terminal becomes that of the session, so that Ctrl-C, as a character, becomes a signal.
IN_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from lightscale.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._main, side = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, "generate", *words],
            stdin=side,
            stdout=side,
            stderr=subprocess.DEVNULL,
            env={**ENVIRONMENT, "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(side)
        self.seen = ""

    def wait_for(self, is_there: Callable[[str], bool]) -> str:
        """What was shown since the last time, up to when ``is_there`` says so."""
        begun, self.seen = time.monotonic(), ""
        while not is_there(self.seen):
            assert time.monotonic() - begun < 200, self.seen
            if select.select([self._main], [], [], 1.0)[0]:
                self.seen += os.read(self._main, 65536).decode(errors="replace")
        return self.seen

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        os.close(self._main)


@pytest.mark.long
def test_a_terminal(found: dict[str, Any], folder: Path, needs: Callable[..., None]) -> None:
    """Text comes as it is written; Ctrl-C ends it and asks for the next line, Ctrl-D leaves."""
    needs("pseudo-terminals")
    # With such a penalty nothing is ended by the model.
    endless = ["--tokens", "1000000", "--temperature", "0", "--repetition-penalty", "1.0001"]
    terminal = Terminal(str(folder / "tnl"), "--interactive", *endless)
    try:
        terminal.wait_for(lambda text: text.endswith("> "))
        terminal.type("the start\n")
        terminal.wait_for(lambda text: len(text) > 200)
        assert terminal.seen.replace("\r", "").startswith("the start\nthe start")
        terminal.type("\x03")
        terminal.wait_for(lambda text: text.endswith("\n> "))
        # Python's readline shows its prompt a moment before signals end its waiting: one in between waits for a key.
        time.sleep(1)
        terminal.type("\x03")
        terminal.wait_for(lambda text: text.endswith("\n> "))
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()


@pytest.mark.long
def test_processes_are_started(found: dict[str, Any], folder: Path) -> None:
    words = [str(folder / "tnl"), "parallel.tensor=2", "--file", str(folder / "prompts.jsonl"), *OPTIONS, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "lightscale", "generate", *words],
        env=ENVIRONMENT,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert records((done.returncode, done.stdout, done.stderr)) == records(found["json"])
    assert "starting 2 ranks" in done.stderr


BAD = {
    "none --prompt a": "no run",
    "tnl --file none.jsonl": "none.jsonl: No such file",
    "tnl --file empty.jsonl": "empty.jsonl: the file is empty",
    "tnl --file damaged.jsonl": "damaged.jsonl:2: not a JSON object",
    "tnl --file prompts.jsonl --prompt a": "--prompt and --file both",
    "tnl --interactive --file prompts.jsonl": "--file and --interactive both",
    "tnl --stop=": "--stop '': must have at least",
    "tnl --batch 0": "--batch 0: must be at least 1",
    "tnl --context 0": "--context 0: must be at least 1",
    "tnl --top-p 0": "top-p 0: must be above 0",
    "tnl --repetition-penalty 0": "repetition-penalty 0: must be above 0",
    "tnl model.num_layers=3": "model.num_layers=3: not allowed for a trained model",
    "tnl llama": "llama: neither a layout key",
    "tnl parallel.pipeline=2": "parallel.pipeline = 2, parallel.sequence = 1: text generation uses only",
    "tnl parallel.tensor=3": "parallel.tensor = 3",
    "tnl --processes 3 parallel.tensor=2": "3",
    "tnl --processes 2 --interactive": "--interactive: needs one process",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_arguments(
    found: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    monkeypatch.chdir(folder)
    Path("empty.jsonl").write_text("")
    Path("damaged.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b\n')
    assert main(["generate", *words.split()]) == 2
    said = capsys.readouterr()
    assert BAD[words] in said.err
    assert said.out == ""
    assert "Traceback" not in said.err
