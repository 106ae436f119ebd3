"""Needle in a haystack: a value in a long text is found by its key, over lengths and depths."""

import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.inference.requests import (
    Answer,
    Encoder,
    GenerateUntil,
    Generation,
    Ids,
    Likelihood,
    LogLikelihood,
    Request,
)
from lightscale.evaluation.task import Score, Scores, Task, TaskSettings
from lightscale.evaluation.tasks import needle_scores
from lightscale.evaluation.tasks.needle_picture import draw
from lightscale.evaluation.tasks.needle_scores import Heatmap
from lightscale.evaluation.tasks.needle_text import (
    KEYS,
    WORDS,
    Mode,
    Needle,
    Wording,
    haystack,
    make_needle,
    prompt,
)
from lightscale.evaluation.texts import find_files, read_file

_Count = Annotated[int, Field(ge=1, le=10_000)]
_Length = Annotated[int, Field(ge=1, le=2**31)]
_Ratio = Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)]
_GRADES = ("word_recall", "exact", "first")


class NeedlesSettings(TaskSettings):
    """A task file with `kind = "needles"`; its `limit` is of the depths."""

    paths: list[str] = Field(min_length=1)
    """The haystack: text, jsonl and parquet files, relative to the task file; begun again where it is too short."""
    text_field: str = "text"
    """Text field of jsonl objects, text column of parquet files."""
    mode: Mode = "easy"
    """Text in the haystack: easy, question and answer; standard, only the answer."""
    lengths: list[_Length] = Field(default=[int(length) for length in np.linspace(1000, 16000, 35)], min_length=1)
    """Tokens of a prompt including room for an answer twice as long as the right one."""
    depths: _Count = 35
    """Number of needle positions at each length, evenly spaced from the start to the end of the haystack."""
    placement: Literal["relative", "absolute"] = "relative"
    """relative: depths are shares of each length; absolute: of the longest, so that needles stand where they stand at
    every length, and what is behind them is run once for all lengths. Short prompts have fewer depths then."""
    samples: _Count = 1
    """Needles for each length and depth."""
    seed: int = 0
    """Random seed of keys, values and distractors."""
    question: str = "\n\nQuestion: What are the secret words of {key}?\nAnswer:"
    """Asked at the end of a prompt, and before the needle in easy mode."""
    answer: str = " The secret words of {key} are {value}."
    """The needle; a prompt ends with the text before {value}."""
    keys: list[str] = Field(default=list(KEYS), min_length=1)
    """Keys of the values; one per needle."""
    words: list[str] = Field(default=list(WORDS), min_length=2)
    """Words that values are composed of."""
    answer_words: _Count = 3
    """Number of words in a value."""
    distractors: _Count = 9
    """Other values, whose log-likelihoods are compared with that of the right one."""
    generate: bool = False
    """Whether text is generated and searched for the value; else exact and word_recall are in greedy decoding, known
    from log-likelihoods. Slower: generations share no tokens."""
    grade: Literal["word_recall", "exact", "first"] = "word_recall"
    """Score in each cell of the paper's scores and of the picture."""
    depth_ratio: _Ratio = 1.01
    """αd of the paper: weight ratio of consecutive depths."""
    length_ratio: _Ratio = 1.01
    """αc of the paper: weight ratio of consecutive lengths."""
    success: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Minimum grade of a successful cell, for the NIAH score."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sorted(set(self.lengths)) != self.lengths:
            raise ValueError(f"lengths = {self.lengths}: use ascending lengths")
        if self.answer.count("{value}") != 1 or "{key}" not in self.answer.partition("{value}")[0]:
            raise ValueError(f"answer = {self.answer!r}: must contain {{key}} and then {{value}}, once each")
        if not self.wording.asked().strip():
            raise ValueError("question and answer: no text before {value}")
        for name in ("keys", "words"):
            given = getattr(self, name)
            if len(set(given)) != len(given) or any(len(one.split()) != 1 for one in given):
                raise ValueError(f"{name}: use single words, each once")
        if len(self.words) < self.answer_words + self.distractors:
            raise ValueError(
                f"words: {len(self.words)} words are too few for answer_words = {self.answer_words} and "
                f"distractors = {self.distractors}; use at least their sum"
            )
        return self

    @property
    def wording(self) -> Wording:
        """Of needles and questions."""
        return Wording(mode=self.mode, question=self.question, answer=self.answer)

    @property
    def num_depths(self) -> int:
        """Within the limit."""
        return self.depths if self.limit is None else min(self.depths, self.limit)


class Question(NamedTuple):
    """One prompt."""

    depth: int
    length: int
    sample: int
    """Indices."""
    position: int
    """Tokens of the haystack before the needle, at most."""
    needle: Needle


class Needles(Task):
    """See ``NeedlesSettings``; the scores of arXiv 2406.16690, A.4 and B.1."""

    Settings = NeedlesSettings
    settings: NeedlesSettings

    def __init__(self, settings: NeedlesSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self._hashes: dict[str, str] = {}
        self._cells: list[Question] = []
        self._details: dict[str, Any] = {}

    def check(self, tokenizer: Tokenizer) -> None:
        """The files are there."""
        find_files(self.settings.paths, self.folder)

    def data_hashes(self) -> dict[str, str]:
        """Of each file that the haystack begins with."""
        return dict(self._hashes)

    def requests(self, encoder: Encoder) -> Sequence[Request]:
        """For each prompt: each word of the value behind the previous ones, the distractors, the generated text."""

        @functools.cache
        def encode(text: str) -> Ids:
            return np.array(encoder.tokenizer.encode(text), dtype=np.int32)

        settings = self.settings
        hay = haystack(self._texts, encode, settings.lengths[-1])
        needles = {number: self._needle(encode, number) for number in self._numbers()}
        longest_answer = max(sum(map(len, needle.answer)) for needle in needles.values())
        # Of the beginning of the document, the needle, the question and the answer: the same for all, so that
        # prompts of a length have the same haystack.
        reserve = 1 + longest_answer + max(needle.num_tokens for needle in needles.values())
        if settings.lengths[0] <= reserve:
            raise UserError(
                f"{self.name}: lengths has {settings.lengths[0]}, but needle, question and answer alone take "
                f"{reserve} tokens; use longer lengths"
            )
        rooms = [length - reserve for length in settings.lengths]
        requests: list[Request] = []
        self._cells, num_tokens = [], 0
        for cell in self._prompts(needles, rooms):
            ids = prompt(
                hay,
                cell.needle,
                begin=encoder.tokenizer.eot_id,
                position=cell.position,
                room=rooms[cell.length],
            )
            self._cells.append(cell)
            requests += _asked(ids, cell.needle, 2 * longest_answer if settings.generate else None)
            num_tokens += len(ids)
        self._details = {
            "prompts": len(self._cells),
            "prompt_tokens": num_tokens,
            "haystack": {"tokens": len(hay.ids), "begun": hay.repeats},
            "example": {"needle": self._cells[0].needle.text, "value": " ".join(self._cells[0].needle.words)},
        }
        return requests

    def _texts(self) -> Iterator[str]:
        for path in find_files(self.settings.paths, self.folder):
            file = read_file(path, columns=[self.settings.text_field])
            self._hashes[path.name] = f"xxh3-128:{file.xxh3_128}"
            column = self.settings.text_field if path.name.endswith((".jsonl", ".jsonl.gz", ".parquet")) else "text"
            yield from (record[column] for record in file.documents if record[column].strip())

    def _numbers(self) -> Iterator[tuple[int, int, int]]:
        """(length, depth, sample) of each needle: prompts of all lengths share those at absolute places."""
        settings = self.settings
        for length in range(len(settings.lengths) if settings.placement == "relative" else 1):
            for depth in range(settings.num_depths):
                for sample in range(settings.samples):
                    yield length, depth, sample

    def _needle(self, encode: Any, number: tuple[int, int, int]) -> Needle:
        settings = self.settings
        return make_needle(
            settings.wording,
            encode,
            keys=settings.keys,
            words=settings.words,
            answer_words=settings.answer_words,
            distractors=settings.distractors,
            seed=f"{settings.seed} {number}",
        )

    def _prompts(self, needles: dict[tuple[int, int, int], Needle], rooms: Sequence[int]) -> Iterator[Question]:
        shares = np.linspace(0, 1, self.settings.num_depths)
        for length, room in enumerate(rooms):
            is_relative = self.settings.placement == "relative"
            for depth, share in enumerate(shares):
                position = int(share * (room if is_relative else rooms[-1]))
                if position > room:
                    continue
                for sample in range(self.settings.samples):
                    yield Question(
                        depth, length, sample, position, needles[length if is_relative else 0, depth, sample]
                    )

    def score(self, answers: Sequence[Answer]) -> Scores:
        """Over the prompts, and by length and depth in the details."""
        settings, left = self.settings, iter(answers)
        shape = (settings.num_depths, len(settings.lengths))
        found = {name: np.full((*shape, settings.samples), np.nan) for name in (*_GRADES, "rank")}
        for cell in self._cells:
            for name, value in _measured(cell.needle, left, is_generated=settings.generate).items():
                found[name][cell.depth, cell.length, cell.sample] = value
        # All samples of a cell are there, or none.
        means: dict[str, Heatmap] = {name: values.mean(axis=-1) for name, values in found.items()}
        grades = means[settings.grade]
        weight = needle_scores.weights(*shape, depth_ratio=settings.depth_ratio, length_ratio=settings.length_ratio)
        niah = needle_scores.niah_score(grades, weight, success=settings.success)
        scores = {
            "accuracy": _score(grades),
            "weighted_accuracy": Score(value=needle_scores.weighted_accuracy(grades, weight)),
            "niah_score": Score(value=niah),
            **{name: _score(found[name]) for name in (*_GRADES, "rank")},
        }
        return Scores(scores=scores, details={**self._details, **self._by_length(means), "heatmap": self._plain(means)})

    def _by_length(self, means: dict[str, Heatmap]) -> dict[str, Any]:
        grades = means[self.settings.grade]
        columns = {
            "accuracy": needle_scores.accuracy_at(grades),
            "accuracy_up_to": needle_scores.accuracy_up_to(grades),
            **{name: needle_scores.accuracy_at(means[name]) for name in (*_GRADES, "rank")},
        }
        return {
            "by_length": [
                {"length": length, **{name: float(column[index]) for name, column in columns.items()}}
                for index, length in enumerate(self.settings.lengths)
            ]
        }

    def _plain(self, means: dict[str, Heatmap]) -> dict[str, Any]:
        """Rows of depths; None where no prompt is so long."""
        shares = np.linspace(0, 1, self.settings.num_depths).tolist()
        plain = {
            name: [[None if math.isnan(x) else x for x in row] for row in of.tolist()] for name, of in means.items()
        }
        return {"lengths": self.settings.lengths, "depths": shares, **plain}

    def plot(self, scores: Scores, path: Path) -> bool:
        """Heatmaps of the grade and of the rank."""
        of = "length" if self.settings.placement == "relative" else "longest length"
        title = f"{self.name}: needle in a haystack, {self.settings.mode} mode"
        worst = self.settings.distractors + 1
        return draw(
            path, scores.details["heatmap"], grade=self.settings.grade, worst_rank=worst, title=title, depth_of=of
        )

    def definitions(self) -> dict[str, str]:
        """Of the scores."""
        settings = self.settings
        by = "in the generated text" if settings.generate else "in greedy decoding"
        order = "in any order" if settings.generate else "each after the right words before it"
        return {
            "accuracy": f"mean of {settings.grade} over lengths and depths",
            "weighted_accuracy": "Σ w·grade / Σ w with w = depth_ratio^i · length_ratio^j",
            "niah_score": "Σ w·p·grade / Σ w; p of a length: 0 where no depth succeeds, 1 where all do, else "
            "2^((1 - n)/2) with n runs of successes and failures",
            "exact": f"share of prompts with the whole value, {by}",
            "word_recall": f"share of the words of the value, {by}, {order}",
            "first": f"share of prompts whose value is more probable than all {settings.distractors} distractors",
            "rank": f"mean rank of the value among itself and {settings.distractors} distractors by log-likelihood: 1 "
            f"is best, {(settings.distractors + 2) / 2} is chance level",
        }


def _asked(ids: Ids, needle: Needle, most_tokens: int | None) -> Iterator[Request]:
    """What is asked of one prompt."""
    for number, word in enumerate(needle.answer):
        yield LogLikelihood(context=np.concatenate([ids, *needle.answer[:number]]), continuation=word)
    for other in needle.distractors:
        yield LogLikelihood(context=ids, continuation=other)
    if most_tokens is not None:
        yield GenerateUntil(context=ids, until=("\n",), max_tokens=most_tokens)


def _measured(needle: Needle, answers: Iterator[Answer], *, is_generated: bool) -> dict[str, float]:
    """The next ``answers``, those to one prompt, by the names of scores."""

    def likelihood() -> Likelihood:
        answer = next(answers)
        assert isinstance(answer, Likelihood)
        return answer

    words = [likelihood() for _ in needle.answer]
    others = [likelihood().log_probability for _ in needle.distractors]
    rank = needle_scores.rank(sum(word.log_probability for word in words), others)
    exact = all(word.is_greedy for word in words)
    recall = sum(word.is_greedy for word in words) / len(words)
    if is_generated:
        written = next(answers)
        assert isinstance(written, Generation)
        exact = " ".join(needle.words) in written.text
        recall = needle_scores.word_recall(needle.words, written.text)
    return {"word_recall": recall, "exact": float(exact), "first": float(rank == 1), "rank": float(rank)}


def _score(values: NDArray[np.float64]) -> Score:
    """The mean, and its standard error over the prompts as a sample; NaN where there is no prompt."""
    values = values[~np.isnan(values)]
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return Score(value=float(values.mean()), standard_error=error)
