"""Results of evaluations in a run: RUN/evaluation/step-00000100/TASK.json, and interim answers. Without torch.

A result is written whole or not at all. Until it is, the answers so far are in TASK.IDENTITY.partial.jsonl: its first
line says what they are answers to, and every other has a block of them. A last line that was cut short does not count.
"""

import base64
import contextlib
import csv
import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from lightscale.errors import UserError
from lightscale.evaluation.inference.requests import Answer, Generation, Likelihood, TokenLikelihoods
from lightscale.files import read_regular
from lightscale.runs.run_directory import RunDirectory, write_atomically

FORMAT = 1
_MOST_BYTES = 2**28
_MOST_PARTIAL_BYTES = 2**34

Result = dict[str, Any]
"""The content of a result file: see ``evaluate.py`` for its keys."""


def result_path(run: RunDirectory, step: int, task: str) -> Path:
    """RUN/evaluation/step-00000100/TASK.json"""
    return run.evaluation / f"step-{step:08d}" / f"{task}.json"


def identity(**of: Any) -> str:
    """sha256 of plain values: the inputs of a result."""
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()


def read_result(path: Path) -> Result | None:
    """The result in ``path``; None: unreadable, the next evaluation replaces it."""
    try:
        found = json.loads(read_regular(path, what="a result", most_bytes=_MOST_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _is_result(found) else None


def _is_result(found: Result) -> bool:
    """Whether ``found`` has what tables show."""
    kinds = {"run": str, "task": str, "step": int, "requests": int, "identity": str, "scores": dict}
    return all(isinstance(found.get(key), kind) for key, kind in kinds.items()) and all(
        isinstance(score, dict)
        and all(isinstance(score.get(key, ""), float | int | None) for key in ("value", "standard_error"))
        for score in found["scores"].values()
    )


def newest_results(run: RunDirectory) -> list[Result]:
    """The newest result of each task, the newest first; unreadable files are passed over."""
    newest: dict[str, Result] = {}
    for folder in sorted(run.evaluation.glob("step-[0-9]*"), reverse=True):
        for path in sorted(folder.glob("*.json")):
            if path.stem in newest:
                continue
            with contextlib.suppress(UserError, OSError):
                if (found := read_result(path)) is not None:
                    newest[path.stem] = found
    return list(newest.values())


def write_result(path: Path, result: Result) -> None:
    """As ``path``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result, indent=2, ensure_ascii=False) + "\n")


class PartialAnswers:
    """The answers that an evaluation has so far, beside the result to be."""

    def __init__(self, result: Path, identity: str) -> None:
        # In the name: a run in training and another job may evaluate one step, and not the same weights.
        self.path, self._identity = result.with_suffix(f".{identity[:8]}.partial.jsonl"), identity

    def read(self) -> dict[int, Answer]:
        """By the number of the request; none where they are answers to something else."""
        answers: dict[int, Answer] = {}
        try:
            data = read_regular(self.path, what="a record of answers", most_bytes=_MOST_PARTIAL_BYTES)
        except FileNotFoundError:
            return answers
        lines = data.split(b"\n")[:-1]
        try:
            if not lines or json.loads(lines[0]) != {"identity": self._identity}:
                self.path.unlink()
                return answers
            for line in lines[1:]:
                answers |= {int(number): _answer(value) for number, value in json.loads(line).items()}
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
            # What is behind damage is asked again, and so the file begins again.
            self.path.unlink()
            self.append(answers)
        return answers

    def append(self, answers: Mapping[int, Answer]) -> None:
        """More of them; on disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists()
        with self.path.open("ab") as file:
            if is_new:
                file.write(_line({"identity": self._identity}))
            else:
                # A line that was cut short would swallow this one.
                file.truncate(_whole_bytes(self.path))
            file.write(_line({str(number): _plain(answer) for number, answer in answers.items()}))
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Remove the interim answers once there is a result, also those of results that it replaces."""
        stem = self.path.name.removesuffix(f".{self._identity[:8]}.partial.jsonl")
        for path in self.path.parent.glob(f"{stem}.????????.partial.jsonl"):
            path.unlink(missing_ok=True)


def _line(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode()


def _whole_bytes(path: Path) -> int:
    """Up to the end of the last whole line."""
    size = path.stat().st_size
    with path.open("rb") as file:
        end = size
        while end:
            start = max(0, end - 2**16)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def _plain(answer: Answer) -> list[Any]:
    match answer:
        case Likelihood(log_probability=log_probability, is_greedy=is_greedy):
            return ["likelihood", log_probability, is_greedy]
        case TokenLikelihoods(log_probability=values):
            return ["tokens", base64.b85encode(values.astype("<f8").tobytes()).decode()]
        case Generation(text=text, num_tokens=num_tokens):
            return ["generation", text, num_tokens]


def _answer(plain: Sequence[Any]) -> Answer:
    kind, *values = plain
    if kind == "likelihood":
        return Likelihood(log_probability=float(values[0]), is_greedy=bool(values[1]))
    if kind == "tokens":
        return TokenLikelihoods(log_probability=np.frombuffer(base64.b85decode(values[0]), dtype="<f8"))
    return Generation(text=str(values[0]), num_tokens=int(values[1]))


@dataclass(frozen=True, kw_only=True)
class _Row:
    run: str
    step: int
    task: str
    score: str
    value: float | None
    error: float | None
    requests: int


def _rows(results: Sequence[Result]) -> list[_Row]:
    return [
        _Row(
            run=result["run"],
            step=result["step"],
            task=result["task"],
            score=name,
            value=score["value"],
            error=score["standard_error"],
            requests=result["requests"],
        )
        for result in results
        for name, score in result["scores"].items()
    ]


def as_csv(results: Sequence[Result]) -> str:
    """A line for each score."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "step", "task", "score", "value", "standard_error", "requests"])
    for row in _rows(results):
        blank = "" if row.value is None else repr(row.value), "" if row.error is None else repr(row.error)
        writer.writerow([row.run, row.step, row.task, row.score, *blank, row.requests])
    return text.getvalue()


def as_table(results: Sequence[Result]) -> Table:
    """For people: a line for each score, a column for each run where there are several."""
    columns = list(dict.fromkeys(f"{row.run}@{row.step}" for row in _rows(results)))
    table = Table(box=box.SIMPLE)
    for heading in ("task", "score"):
        table.add_column(heading)
    for heading in columns:
        table.add_column(heading, justify="right")
    values: dict[tuple[str, str], dict[str, str]] = {}
    for row in _rows(results):
        values.setdefault((row.task, row.score), {})[f"{row.run}@{row.step}"] = _shown(row)
    last = None
    for (task, score), of in values.items():
        table.add_row(task if task != last else "", score, *(of.get(column, "-") for column in columns))
        last = task
    return table


def _shown(row: _Row) -> str:
    if row.value is None:
        return "-"
    return f"{row.value:.4g}" if row.error is None else f"{row.value:.4g} ± {row.error:.2g}"


def check_writable(run: RunDirectory) -> None:
    """UserError where no result could be written."""
    path = run.evaluation if run.evaluation.exists() else run.path
    if not path.is_dir():
        raise UserError(f"{path}: not a directory; use a directory for results")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(
            f"{path}: user {os.geteuid()} cannot write results to it; change its permissions or use another directory"
        )
