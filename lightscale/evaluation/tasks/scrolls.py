"""SCROLLS (Shaham et al., 2022): summaries of, and questions about, texts of thousands of words.

Seven data sets as they are published, each a folder with ``validation.jsonl`` whose lines have ``id``, ``input`` and
``output``; lines of one id are one question with several right answers. Answers are written greedily. The mean is that
of arXiv 2406.16690, tables 4 to 6: over 13 numbers, three of each summary and one of each other set.
"""

import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, PositiveInt, field_validator

from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.inference.requests import Answer, Encoder, GenerateUntil, Generation, Request
from lightscale.evaluation.task import Score, Scores, Task, TaskSettings
from lightscale.evaluation.tasks.answer_metrics import ROUGE, exact_match, f1, rouge
from lightscale.evaluation.texts import find_files, read_file

FILE = "validation.jsonl"
MEAN = "mean"
_LINE = ("\n",)
_LETTER = re.compile(r"^\s*\([A-D]\)\s*")
Metric = Callable[[str, Sequence[str]], Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One of the seven."""

    max_tokens: int
    """Of an answer; more than nearly all right ones have."""
    metric: Metric
    names: tuple[str, ...]
    """Of the metric's scores."""
    ask: str = ""
    """Question about each text; "": the input begins with a question, which an empty line ends."""
    until: tuple[str, ...] = _LINE


def _summary(max_tokens: int, ask: str) -> DataSet:
    return DataSet(max_tokens=max_tokens, metric=rouge, names=ROUGE, ask=ask, until=())


def _f1(answer: str, references: Sequence[str]) -> dict[str, float]:
    return {"f1": f1(answer, references)}


def _exact_match(answer: str, references: Sequence[str]) -> dict[str, float]:
    return {"exact_match": exact_match(answer, references)}


def _choice_match(answer: str, references: Sequence[str]) -> dict[str, float]:
    """Of one of several answers, which the model may write with its letter."""
    return {"exact_match": exact_match(_LETTER.sub("", answer), references)}


DATA_SETS: dict[str, DataSet] = {
    "gov_report": _summary(1024, "Summarize the report above."),
    "summ_screen_fd": _summary(512, "Summarize the episode above."),
    "qmsum": DataSet(max_tokens=512, metric=rouge, names=ROUGE, until=()),
    "qasper": DataSet(max_tokens=128, metric=_f1, names=("f1",)),
    "narrative_qa": DataSet(max_tokens=64, metric=_f1, names=("f1",)),
    "quality": DataSet(max_tokens=64, metric=_choice_match, names=("exact_match",)),
    "contract_nli": DataSet(max_tokens=8, metric=_exact_match, names=("exact_match",)),
}
_LAST_CHOICE = "(D)"
_FORM = {"quality": "a question with answers (A) to (D)"}
NLI = "Answer with Entailment, Contradiction or Not mentioned."
"""Added to the hypotheses of contract_nli."""


class ScrollsSettings(TaskSettings):
    """Folder of the data sets, and the maximum length of each text."""

    path: str = "scrolls"
    """Folder with a folder for each data set, relative to the task file."""
    data_sets: list[str] = Field(default=list(DATA_SETS), min_length=1)
    """Data sets to evaluate."""
    context: PositiveInt = 8192
    """Tokens of a question and its answer; longer texts are truncated at the end."""

    @field_validator("data_sets")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in DATA_SETS:
                raise ValueError(f"data_sets: {name!r} is not one of {', '.join(DATA_SETS)}")
        if len(set(names)) < len(names):
            raise ValueError(f"data_sets = {names} lists a data set twice")
        return names


@dataclass(frozen=True, kw_only=True)
class LongQuestion:
    """One text, its question, and the right answers."""

    data_set: str
    text: str
    ask: str
    references: Sequence[str]


class Scrolls(Task):
    """See above."""

    Settings = ScrollsSettings
    settings: ScrollsSettings

    def __init__(self, settings: ScrollsSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self._questions: list[LongQuestion] = []
        self._hashes: dict[str, str] = {}
        self._cut = 0

    def check(self, tokenizer: Tokenizer) -> None:
        """Check the files, the package that scores summaries, and that each question leaves room for its answer."""
        for name in self.settings.data_sets:
            if (longest := DATA_SETS[name].max_tokens) >= self.settings.context:
                raise UserError(
                    f"{self.name}: context = {self.settings.context}: an answer of {name} alone can have {longest} "
                    "tokens; use a longer context, or remove it from data_sets"
                )
            if DATA_SETS[name].metric is rouge and importlib.util.find_spec("rouge_score") is None:
                raise UserError(
                    f"{self.name}: {name} needs the package rouge-score, which is not installed; pip install "
                    "'lightscale[eval]', or remove it from data_sets"
                )
            try:
                find_files([self._file(name)], self.folder)
            except UserError as error:
                raise UserError(
                    f"{error}; lightscale downloads nothing: unpack {name}.zip of the data set `tau/scrolls` there"
                ) from None

    def requests(self, encoder: Encoder) -> Sequence[Request]:
        """One for each question."""
        requests: list[Request] = []
        self._questions = []
        for name in self.settings.data_sets:
            (path,) = find_files([self._file(name)], self.folder)
            file = read_file(path, columns=["input", "output", "id"])
            self._hashes[f"{name}/{FILE}"] = f"xxh3-128:{file.xxh3_128}"
            questions = _questions(name, path, file.documents)[: self.settings.limit]
            requests += [self._asked(encoder, question) for question in questions]
            self._questions += questions
        return requests

    def _file(self, name: str) -> str:
        return f"{self.settings.path}/{name}/{FILE}"

    def _asked(self, encoder: Encoder, question: LongQuestion) -> Request:
        of = DATA_SETS[question.data_set]
        ids = encoder.tokenizer.encode(question.text)
        ask = encoder.tokenizer.encode(f"\n\nQuestion: {question.ask}\nAnswer:")
        room = self.settings.context - 1 - len(ask) - of.max_tokens
        self._cut += len(ids) > room
        context = encoder.begin([*ids[: max(0, room)], *ask])
        return GenerateUntil(context=context, until=of.until, max_tokens=of.max_tokens)

    def data_hashes(self) -> dict[str, str]:
        """Of each file."""
        return dict(self._hashes)

    def score(self, answers: Sequence[Answer]) -> Scores:
        """Of each data set, and their mean."""
        found: dict[str, list[float]] = {name: [] for name in self._names()}
        for question, answer in zip(self._questions, answers, strict=True):
            assert isinstance(answer, Generation)
            values = DATA_SETS[question.data_set].metric(answer.text.strip(), question.references)
            for name, value in values.items():
                found[f"{question.data_set}_{name}"].append(value)
        scores = {name: _score(values) for name, values in found.items()}
        mean = Score(value=float(np.mean([score.value for score in scores.values()])))
        details: dict[str, Any] = {"questions": len(self._questions), "cut": self._cut}
        return Scores(scores={MEAN: mean, **scores}, details=details)

    def _names(self) -> list[str]:
        return [f"{one}_{name}" for one in self.settings.data_sets for name in DATA_SETS[one].names]

    def definitions(self) -> dict[str, str]:
        """Of the mean."""
        return {MEAN: f"plain mean of {len(self._names())} numbers: {', '.join(self._names())}"}


def _questions(name: str, path: Path, records: Sequence[Mapping[str, str]]) -> list[LongQuestion]:
    """Those of a file, each with the answers of all its lines."""
    found: dict[str, LongQuestion] = {}
    for record in records:
        before = found.get(record["id"])
        references = [*(before.references if before else ()), record["output"]]
        ask, text = DATA_SETS[name].ask or _question(name, record["input"]), record["input"]
        if not DATA_SETS[name].ask:
            text = text[len(ask) :]
        if not ask.strip() or not text.strip():
            raise UserError(
                f"{path}: the input of {record['id']!r} must be {_FORM.get(name, 'a question')}, an empty "
                "line, and a text"
            )
        more = f" {NLI}" if name == "contract_nli" else ""
        found[record["id"]] = LongQuestion(
            data_set=name, text=text.strip(), ask=f"{ask.strip()}{more}", references=references
        )
    return list(found.values())


def _question(name: str, text: str) -> str:
    """What ``text`` begins with: up to the first empty line, or behind the last of the answers to choose from."""
    start = text.find(_LAST_CHOICE) if name == "quality" else 0
    return text[: max(0, text.find("\n\n", start))] if start >= 0 else ""


def _score(values: Sequence[float]) -> Score:
    error = float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return Score(value=float(np.mean(values)), standard_error=error)
