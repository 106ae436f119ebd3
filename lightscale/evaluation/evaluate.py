"""The evaluation of runs, from top to bottom: ranks, model, requests, answers, scores, results.

    evaluate                  the mesh, then for each run: its model, and
    _Evaluation.of_task       requests by rank 0, blocks of answers by all ranks, scores by rank 0

A result is a function of the task, its data, the tokenizer and the checkpoint; where there is one already, nothing is
done. Answers are kept block by block, so that an interrupted evaluation continues with the remaining ones.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightscale import __version__
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun, longest_context
from lightscale.evaluation.inference.packing import blocks
from lightscale.evaluation.inference.requests import (
    Answer,
    Encoder,
    GenerateUntil,
    LogLikelihood,
    Request,
    digest,
    num_tokens,
)
from lightscale.evaluation.inference.scoring import Scorer, ScoringSettings
from lightscale.evaluation.model import LoadedModel, mesh_of, restore
from lightscale.evaluation.progress import EvaluationProgress
from lightscale.evaluation.results import (
    FORMAT,
    PartialAnswers,
    Result,
    check_writable,
    identity,
    read_result,
    result_path,
    write_result,
)
from lightscale.evaluation.task import Task
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.mesh import Mesh
from lightscale.runs.run_directory import timestamp
from lightscale.training.health.heartbeat import STARTING, Heartbeat

BLOCK_TOKENS = 2**18
"""Of a data rank, at most, between two times at which answers are kept."""
_GROWTH = 4
"""Of a block over the one before, where blocks are to take a time."""


class Interrupted(Exception):
    """All ranks were asked to stop; the answers so far are kept."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Settings of an evaluation that do not change its results."""

    scoring: ScoringSettings = field(default_factory=ScoringSettings)
    again: bool = False
    """Whether tasks with a result are evaluated again."""
    context: int | None = None
    """Longest prompt in tokens; None: see ``longest_context``."""
    block_s: float | None = None
    """Seconds after which answers are kept, about, and ``should_stop`` is asked; None: after ``BLOCK_TOKENS``."""
    should_stop: Callable[[], bool] = lambda: False
    """Whether to interrupt, the same on every rank; asked by all of them together."""


def evaluate(runs: Sequence[ChosenRun], tasks: Sequence[Task], settings: EvaluationSettings) -> list[Result]:
    """The results of all ``tasks`` on all ``runs``, whose layouts are the same; on every rank.

    Called by every rank with torchrun's variables in the environment, or without them by one process.
    """
    with mesh_of(runs[0].config) as mesh:
        heartbeat = Heartbeat(runs[0].config.restart.hang_timeout_s)
        heartbeat.beat(STARTING, step=0)
        results = []
        for run in runs:
            evaluation = RunEvaluation(run, restore(run, mesh), mesh, settings, heartbeat)
            results += [evaluation.of_task(task) for task in tasks]
        return results


def requests_of(task: Task, run: ChosenRun, context: int | None = None) -> list[Request]:
    """All that ``task`` asks of ``run``; by rank 0.

    UserError for missing or empty data, and prompts longer than ``context``, or ``longest_context``.
    """
    task.check(run.tokenizer)
    requests = list(task.requests(Encoder(run.tokenizer)))
    if not requests:
        raise UserError(f"{task.name}: the data of the task is empty")
    check_lengths(task.name, requests, run, context)
    return requests


def check_lengths(name: str, requests: Sequence[Request], run: ChosenRun, context: int | None) -> None:
    """UserError if a prompt of the task ``name`` is longer than ``context``; None: than ``longest_context``."""
    most = context or longest_context(run.config)
    if most is None:
        return
    prompts = [request for request in requests if isinstance(request, (LogLikelihood, GenerateUntil))]
    too_long = [length for request in prompts if (length := num_tokens(request)) > most]
    if too_long:
        raise UserError(
            f"{name}: {len(too_long):,} of {len(prompts):,} prompts are longer than the {most:,} tokens of "
            f"the context of {run.directory.path}, the longest {max(too_long):,}; use a run trained on "
            f"longer sequences, shorter prompts, or --context {max(too_long)} to evaluate them anyway"
        )


class RunEvaluation:
    """Evaluates one checkpoint; collective over the ranks of ``mesh``.

    ``is_shown``: whether people see how far it is.
    """

    def __init__(
        self,
        run: ChosenRun,
        loaded: LoadedModel,
        mesh: Mesh,
        settings: EvaluationSettings,
        heartbeat: Heartbeat | None = None,
        *,
        is_shown: bool = True,
    ) -> None:
        self.run, self.loaded, self.mesh, self.settings = run, loaded, mesh, settings
        self.progress = EvaluationProgress(f"{run.directory.path}@{loaded.step}", enabled=is_shown and mesh.rank == 0)
        # Where blocks are to take a time, nobody knows yet how many tokens that is.
        least = settings.scoring.row_tokens if settings.block_s is not None else BLOCK_TOKENS
        self._block_tokens = least * mesh.data
        self._ranks, self._heartbeat = Agreement(mesh.control), heartbeat
        self._scorer = Scorer(
            loaded.model, mesh, tokenizer=loaded.tokenizer, settings=settings.scoring, advance=self._advance
        )
        for reason in loaded.refused:
            self.progress.say(f"skipped a damaged checkpoint: {reason}")

    def of_task(self, task: Task, requests: Sequence[Request] | None = None) -> Result:
        """The result of ``task``, written to the run where it was not there.

        ``requests``: an earlier result of ``requests_of`` for this task, on rank 0. Raises ``Interrupted``.
        """
        found: Result | None
        asked: list[Request]
        answers: dict[int, Answer]
        found, asked, answers = self._ranks.on_first(lambda: self._prepare(task, requests))
        if found is not None:
            return found
        path, kept = self._path(task), PartialAnswers(self._path(task), self._identity(task, asked))
        started_s, begun = time.monotonic(), dict(self._scorer.work.__dict__)
        left = [number for number in range(len(asked)) if number not in answers]
        total = sum(num_tokens(asked[number]) for number in left)
        self.progress.begin(task.name, total, resumed=len(answers), requests=len(asked))
        for block in blocks([asked[number] for number in left], lambda: self._block_tokens):
            if self.settings.should_stop():
                raise Interrupted
            numbers, block_began_s = [left[index] for index in block], time.monotonic()
            tokens = sum(num_tokens(asked[number]) for number in numbers)
            self.progress.begin_block(tokens)
            new = dict(zip(numbers, self._scorer.answer([asked[number] for number in numbers]), strict=True))
            answers |= new
            # The last block becomes part of the result at once.
            if len(answers) < len(asked):
                self._block_tokens = self._ranks.on_first(partial(self._keep, kept, new, tokens, block_began_s))
        took = {
            "seconds": time.monotonic() - started_s,
            **{name: value - begun[name] for name, value in self._scorer.work.__dict__.items()},
        }
        ordered = [answers[number] for number in range(len(asked))]

        def finish() -> Result:
            result = self._result(task, asked, ordered, took)
            write_result(path, result)
            kept.remove()
            return result

        result: Result = self._ranks.on_first(finish)
        self.progress.end()
        return result

    def _keep(self, kept: PartialAnswers, new: dict[int, Answer], tokens: int, began_s: float) -> int:
        """Keep the ``new`` answers; returns the tokens of the next block, the same on all ranks; by rank 0."""
        kept.append(new)
        if self.settings.block_s is None:
            return self._block_tokens
        wanted = tokens * self.settings.block_s / max(1e-6, time.monotonic() - began_s)
        most = min(_GROWTH * self._block_tokens, BLOCK_TOKENS * self.mesh.data)
        return max(1, min(round(wanted), most))

    def _prepare(
        self, task: Task, requests: Sequence[Request] | None
    ) -> tuple[Result | None, list[Request], dict[int, Answer]]:
        """What was found before, or what is to be asked and which answers there are already; by rank 0."""
        check_writable(self.run.directory)
        if requests is None:
            requests = requests_of(task, self.run, self.settings.context)
        path, key = self._path(task), self._identity(task, requests)
        found = read_result(path)
        if found is not None and found["identity"] == key and not self.settings.again:
            self.progress.say(f"{task.name}: already evaluated, {path}")
            return found, [], {}
        kept = PartialAnswers(path, key)
        if self.settings.again:
            kept.remove()
        return None, list(requests), kept.read()

    def _path(self, task: Task) -> Path:
        return result_path(self.run.directory, self.loaded.step, task.name)

    def _identity(self, task: Task, requests: Sequence[Request]) -> str:
        # Known on rank 0 only, where the requests were made; the others never use theirs.
        if self.mesh.rank:
            return ""
        return identity(
            format=FORMAT,
            task=f"{type(task).__module__}:{type(task).__qualname__}",
            name=task.name,
            version=task.version,
            settings=task.settings.model_dump(mode="json"),
            requests=digest(requests),
            tokenizer=self.loaded.tokenizer.sha256,
            checkpoint=self.loaded.weights_hash,
            precision=str(self.loaded.model.config.params_dtype),
        )

    def _result(self, task: Task, requests: Sequence[Request], answers: Sequence[Answer], took: Any) -> Result:
        scores = task.score(answers)
        path = self._path(task)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture, draft = path.with_suffix(".png"), path.with_suffix(".png.tmp")
        is_drawn = task.plot(scores, draft)
        if is_drawn:
            draft.replace(picture)
        return {
            "format": FORMAT,
            "task": task.name,
            "kind": f"{type(task).__module__}:{type(task).__qualname__}",
            "version": task.version,
            "run": str(self.run.directory.path),
            "step": self.loaded.step,
            "checkpoint": None if self.loaded.is_in_training else self.loaded.checkpoint.name,
            "requests": len(requests),
            "scores": {name: asdict(score) for name, score in scores.scores.items()},
            "definitions": task.definitions(),
            "settings": task.settings.model_dump(mode="json"),
            "data": task.data_hashes(),
            "details": dict(scores.details),
            "picture": picture.name if is_drawn else None,
            "tokenizer": self.loaded.tokenizer.sha256,
            "precision": str(self.loaded.model.config.params_dtype).removeprefix("torch."),
            "layout": self.mesh.axes,
            "took": took,
            "lightscale": __version__,
            "time": timestamp(),
            "identity": self._identity(task, requests),
        }

    def _advance(self, share: float) -> None:
        self.progress.advance(share)
        if self._heartbeat is not None:
            # An activity that may take long: nobody knows how long rows of other lengths take.
            self._heartbeat.beat("evaluation", step=self.loaded.step)
