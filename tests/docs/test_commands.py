"""Every command and configuration that the documents show is one that lightscale takes."""

import re
import runpy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.cli import COMMANDS, load_command
from lightscale.config.files import load
from lightscale.config.shipped import run_names, study_names
from lightscale.data_pipeline.preparation.corpus import load_corpus
from lightscale.data_pipeline.tokenizers.ascii_characters import AsciiTokenizer
from lightscale.errors import UserError
from lightscale.evaluation.inference.requests import Encoder, Likelihood
from lightscale.evaluation.registry import find_tasks
from lightscale.launch.settings import LaunchSettings
from lightscale.study.definition import read_definition

documents = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "documents.py")))
ROOT = documents.ROOT
# The code on tutorials is run as a whole (test_tutorials.py).
PAGES = [page for page in documents.PAGES if "tutorials" not in page.parts]
blocks, commands, words = documents.blocks, documents.commands, documents.words

OVERRIDE = re.compile(r"[a-z_]+(?:\.[A-Za-z0-9_-]+)+=.*", re.DOTALL)


def fault_of(command: str, capsys: pytest.CaptureFixture[str]) -> str | None:
    """What is wrong with a command: its name, an option, an override, a configuration; None if nothing is."""
    given = words(command)
    if not given or given[0] in ("--help", "--version"):
        return None
    if given[0] not in COMMANDS:
        return f"no command {given[0]}"
    _, parser = load_command(given[0])
    try:
        parse = parser.parse_intermixed_args if parser._subparsers is None else parser.parse_args
        args = parse(given[1:])
    except SystemExit as end:
        return None if end.code == 0 else capsys.readouterr().err.strip().splitlines()[-1]
    try:
        overrides = [word for word in given[1:] if OVERRIDE.fullmatch(word)]
        launch = [word for word in overrides if word.startswith("launch.")]
        LaunchSettings.model_validate(table_of(launch))
        config = str(getattr(args, "config", None) or "quickstart")
        name = config.removesuffix(".toml")
        if "/" not in config and not config.endswith(".toml") and name not in run_names():
            return f"no shipped configuration {config}"
        rest = [word for word in overrides if word not in launch]
        # What a study's or a run's own file says is not known here.
        load(config if name in run_names() else "quickstart", rest)
    except (UserError, ValueError) as error:
        return str(error)
    # Of `lightscale plan` it is a flag.
    study = getattr(args, "study", None)
    if isinstance(study, str | Path) and not str(study).endswith(".toml") and str(study) not in study_names():
        return f"no shipped study {study}"
    return None


def table_of(overrides: list[str]) -> dict[str, Any]:
    """The table that overrides `launch.key=value` make."""
    table: dict[str, Any] = {}
    for override in overrides:
        key, _, value = override.removeprefix("launch.").partition("=")
        try:
            table[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            table[key] = value
    return table


def toml_fault(text: str, folder: Path) -> str | None:
    """What is wrong with a block of TOML, read as what its keys say it is; None if nothing is."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return f"no TOML: {error}"
    file = folder / "shown.toml"
    file.write_text(text, encoding="utf-8")
    try:
        check_table(table, file)
    except (UserError, ValueError) as error:
        return str(error)
    return None


def check_table(table: Mapping[str, Any], file: Path) -> None:
    """Load `file` as a study, a corpus, a task of evaluation, or a run's configuration or a part of one."""
    if "axes" in table or "base" in table:
        read_definition(file)
    elif "kind" in table:
        find_tasks([str(file)], file.parent)
    elif "duplicates" in table or any("paths" in source for source in table.get("sources", {}).values()):
        load_corpus(file)
    elif set(table) == {"filters"}:
        source = '[sources.shown]\npaths = ["shown.txt"]\n'
        file.write_text(f'{source}language = "en"\n{file.read_text(encoding="utf-8")}', encoding="utf-8")
        load_corpus(file)
    else:
        LaunchSettings.model_validate(table.get("launch", {}))
        if "extends" not in table:
            # A part of a run's file: the rest is the quickstart's.
            file.write_text(f'extends = ["quickstart"]\n{file.read_text(encoding="utf-8")}', encoding="utf-8")
        replaced = ["data.store=none"] if "stores" in table.get("data", {}) else []
        load(file, replaced)


PAGE_IDS = [str(path.relative_to(ROOT)) for path in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_commands_parse(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = [(found, fault_of(found.text, capsys)) for found in commands(page)]
    assert [f"{found.place}: {found.text}: {fault}" for found, fault in faults if fault] == []


@pytest.mark.parametrize("page", PAGES, ids=PAGE_IDS)
def test_configurations_load(page: Path, tmp_path: Path) -> None:
    faults = [(found, toml_fault(found.text, tmp_path)) for language, found in blocks(page) if language == "toml"]
    assert [f"{found.place}: {fault}" for found, fault in faults if fault] == []


def test_the_how_to_pages_show_commands() -> None:
    pages = {found.page for page in PAGES for found in commands(page)}
    without = sorted(path.name for path in (ROOT / "docs/how-to").glob("*.md") if path not in pages)
    assert without == ["index.md"]


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("lightscale trane tnl-tiny", "no command trane"),
        ("lightscale train tnl-tiny --speed 3", "--speed"),
        ("lightscale train tnl-tinyy", "no shipped configuration tnl-tinyy"),
        ("lightscale train tnl-tiny parallel.sequences=2", "parallel.sequence"),
        ("lightscale submit tnl-1b launch.partitions=gpu", "partitions"),
        ("lightscale checkpoint remove runs/mine", "remove"),
        ("lightscale study plan three-cores", "no shipped study three-cores"),
        ("lightscale export runs/mine --to x --dtype fp8", "fp8"),
    ],
)
def test_mistakes_are_found(command: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n```\nlightscale configs | head\n$ {command}   # why\n```\n")
    found = list(commands(page))
    assert [one.line for one in found] == [4, 5]
    assert fault_of(found[0].text, capsys) is None
    assert fault in (fault_of(found[1].text, capsys) or "")


def test_continued_lines_and_what_starts_ranks_are_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\nmpiexec -n 64 lightscale data prepare a.toml \\\n    --out data/a --executor mpi\n```\n")
    (found,) = commands(page)
    assert words(found.text) == ["data", "prepare", "a.toml", "--out", "data/a", "--executor", "mpi"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[train\n", "no TOML"),
        ("[train]\nstep = 3\n", "train.step"),
        ('[sources.a]\npaths = ["a"]\nweights = 1\n', "weights"),
        ('kind = "perplexity"\npaths = ["a"]\nwindows = 3\n', "windows"),
        ("[launch]\npartitions = 1\n", "partitions"),
        ('filters = ["gofer"]\n', "gofer"),
    ],
)
def test_wrong_configurations_are_found(tmp_path: Path, text: str, fault: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n```toml\n{text}```\n")
    ((_, found),) = blocks(page)
    assert fault in (toml_fault(found.text, tmp_path) or "")


def test_the_task_of_evaluation_that_is_shown_scores_pairs(tmp_path: Path) -> None:
    (code,) = (
        block.text for language, block in blocks(ROOT / "docs/how-to/own-evaluation-task.md") if language == "python"
    )
    namespace: dict[str, Any] = {"__name__": "shown"}
    exec(compile(code, "own-evaluation-task.md", "exec"), namespace)
    (tmp_path / "pairs.jsonl").write_text('{"right": "a b", "wrong": "b a"}\n{"right": "c", "wrong": "d e"}\n')
    task = namespace["Pairs"](namespace["PairsSettings"](name="pairs", path="pairs.jsonl"), tmp_path)
    tokenizer = AsciiTokenizer()
    task.check(tokenizer)
    requests = task.requests(Encoder(tokenizer))
    assert [len(request.continuation) for request in requests] == [3, 3, 1, 3]
    assert list(task.data_hashes()) == ["pairs.jsonl"]
    answers = [Likelihood(log_probability=value, is_greedy=False) for value in (-1.0, -2.0, -4.0, -3.0)]
    assert task.score(answers).scores["accuracy"].value == 0.5
