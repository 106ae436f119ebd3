"""The evaluation of a run in training, between two steps, on the ranks that train it.

    DuringTraining.__init__     before the first step: the requests of each task; refuses what the layout cannot do
    DuringTraining.evaluate     the tasks one after the other, in blocks of seconds, between which a run can be stopped

Training is unaffected: weights are only read, random generators are restored, and no error is raised. A task
that fails is reported. If the ranks ended twice in a task, it is not tried a third time.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import xxhash

from lightscale.config.schema import EvaluationConfig
from lightscale.data_pipeline.tokenizers import load_tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun
from lightscale.evaluation.evaluate import (
    EvaluationSettings,
    Interrupted,
    RunEvaluation,
    requests_of,
)
from lightscale.evaluation.inference.prompts import check_generates
from lightscale.evaluation.inference.requests import GenerateUntil, Request
from lightscale.evaluation.inference.scoring import ScoringSettings
from lightscale.evaluation.model import LoadedModel
from lightscale.evaluation.registry import find_tasks
from lightscale.evaluation.task import Task
from lightscale.models.language_model import LanguageModel
from lightscale.parallel.agreement import Agreement
from lightscale.parallel.engine import Engine
from lightscale.parallel.mesh import Mesh
from lightscale.runs.run_directory import read_lines
from lightscale.training.checkpoints.directories import directory_name
from lightscale.training.checkpoints.random_states import random_states, set_random_states
from lightscale.training.evaluation import Evaluated, InTraining

BLOCK_S = 5.0
"""Seconds between two points where the run can be stopped: less than the time that clusters give a job to save."""
MOST_TRIES = 2
"""Evaluations of a step in which the ranks ended; fewer than the starts without progress that end a run."""
BEGUN, ENDED, FAILED = "evaluation_begun", "evaluation", "evaluation_failed"
"""Events."""
_LEAST_ROW_TOKENS, _MOST_ROW_TOKENS = 1024, 8192


def tasks_of(config: EvaluationConfig) -> list[Task]:
    """The tasks of a run's configuration. Raises UserError for an unknown task, missing data or wrong settings."""
    return find_tasks(config.tasks, config.data, limit=config.limit)


class DuringTraining:
    """Evaluates a run in training; see ``lightscale.training.evaluation.Evaluation``."""

    def __init__(self, run: InTraining) -> None:
        self._run, self._mesh = run, run.engine.mesh
        self._ranks = Agreement(self._mesh.control)
        self._tokenizer = load_tokenizer(run.store.path)
        self._tasks: list[Task] = []
        # On rank 0 only, which asks.
        self._requests: dict[str, list[Request]] = {}
        with _unchanged_generators():
            self._prepare()

    def _prepare(self) -> None:
        tasks: list[Task] = []
        try:
            self._ranks.on_all(lambda: tasks.extend(tasks_of(self._run.config.evaluation)))
        except Exception as error:  # noqa: BLE001 - were checked when the run was started, and have changed since
            self._report(error, what="evaluation is skipped")
            return
        for task in tasks:
            try:
                self._ranks.on_first(partial(self._ask, task))
                self._tasks.append(task)
            except Exception as error:  # noqa: BLE001 - a task is another's code, and no evaluation is worth the run
                self._report(error, what=f"the evaluation of {task.name} is skipped", task=task.name)

    def _ask(self, task: Task) -> None:
        requests = requests_of(task, self._chosen(step=0))
        check_layout(requests, self._mesh)
        self._requests[task.name] = requests

    def evaluate(self, step: int) -> Evaluated:
        """See ``Evaluation``. Tasks with a result for these weights are skipped."""
        began_s = time.monotonic()
        scores: dict[str, dict[str, float | None]] = {}
        is_complete = True
        if self._tasks and self._may_try(step):
            self._run.journal.note(BEGUN, step=step, tasks=[task.name for task in self._tasks])
            model = self._run.engine.module
            was_training = model.training
            with _unchanged_generators():
                try:
                    is_complete = self._evaluate(step, scores)
                except Exception as error:  # noqa: BLE001 - as above
                    self._report(error, what=f"the evaluation after step {step} failed", step=step)
            model.train(was_training)
            seconds = time.monotonic() - began_s
            self._run.journal.note(ENDED, step=step, seconds=seconds, tasks=list(scores), is_complete=is_complete)
        return Evaluated(scores=scores, seconds=time.monotonic() - began_s, is_complete=is_complete)

    def _evaluate(self, step: int, scores: dict[str, dict[str, float | None]]) -> bool:
        """Add the ``scores`` of each task; False where the run is to end before all are done."""
        self._run.engine.gather_weights()
        evaluation = RunEvaluation(
            self._chosen(step), self._loaded(step), self._mesh, self._settings(), self._run.heartbeat, is_shown=False
        )
        for task in self._tasks:
            try:
                result = evaluation.of_task(task, self._requests.get(task.name))
                scores[task.name] = {name: score["value"] for name, score in result["scores"].items()}
            except Interrupted:
                return False
            except Exception as error:  # noqa: BLE001 - as above; of all ranks the same
                what = f"the evaluation of {task.name} after step {step} failed"
                self._report(error, what=what, step=step, task=task.name)
        return True

    def _may_try(self, step: int) -> bool:
        """Whether the ranks survived the evaluations of ``step`` before, or most of them."""

        def ended_in_it() -> int:
            events = read_lines(self._run.directory.events)
            kinds = Counter(event["event"] for event in events if event.get("step") == step)
            return kinds[BEGUN] - kinds[ENDED]

        if self._ranks.on_first(ended_in_it) < MOST_TRIES:
            return True
        reason = f"the ranks failed {MOST_TRIES} times during it; their output has the reason"
        self._report(UserError(reason), what=f"the evaluation after step {step} is skipped", step=step)
        self._run.journal.note(ENDED, step=step, seconds=0.0, tasks=[], is_complete=False)
        return False

    def _chosen(self, step: int) -> ChosenRun:
        run = self._run
        return ChosenRun(
            directory=run.directory,
            config=run.config,
            step=step,
            tokenizer=self._tokenizer,
            tokenizer_origin=run.store.path,
        )

    def _loaded(self, step: int) -> LoadedModel:
        model = self._run.engine.module
        assert isinstance(model, LanguageModel)
        return LoadedModel(
            model=model,
            tokenizer=self._tokenizer,
            config=self._run.config,
            step=step,
            checkpoint=self._run.directory.checkpoints / directory_name(step),
            refused=(),
            weights_hash=weights_hash(self._run.engine, self._ranks),
            is_in_training=True,
        )

    def _settings(self) -> EvaluationSettings:
        config = self._run.config
        # No more than a step's, which the device has memory for; what is kept for its backward pass is free now.
        of_step = config.train.micro_batch_size * config.data.sequence_length
        row_tokens = min(_MOST_ROW_TOKENS, max(_LEAST_ROW_TOKENS, of_step))
        return EvaluationSettings(
            scoring=ScoringSettings(row_tokens=row_tokens), block_s=BLOCK_S, should_stop=self._run.should_stop
        )

    def _report(self, error: Exception, *, what: str, **of: int | str) -> None:
        reason = str(error) if isinstance(error, (UserError, OSError)) else f"{type(error).__name__}: {error}"
        self._run.journal.note(FAILED, **of, reason=reason)
        self._run.journal.say(f"WARNING: {what}: {reason}; training continues")


@contextlib.contextmanager
def _unchanged_generators() -> Iterator[None]:
    """Draw what you want: training goes on with the random numbers that it would have had."""
    states = random_states()
    yield
    set_random_states(states)


def check_layout(requests: Sequence[Request], mesh: Mesh) -> None:
    """Raises UserError for requests that these ranks cannot answer."""
    if any(isinstance(request, GenerateUntil) for request in requests):
        try:
            check_generates(mesh.pipeline, mesh.sequence)
        except UserError as error:
            raise UserError(f"{error}, in another job: lightscale evaluate RUN --follow") from None


def weights_hash(engine: Engine, ranks: Agreement) -> str:
    """xxh3-128 of all weights as the ranks hold them: the same again for the same weights on the same layout."""

    def own() -> str | None:
        # The others have copies.
        if engine.mesh.groups.dp_cp.rank():
            return None
        found = xxhash.xxh3_128()
        for chunk in engine.chunks:
            for name, weight in chunk.named_parameters():
                found.update(name.encode())
                found.update(weight.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    return xxhash.xxh3_128("".join(part for part in ranks.on_all(own) if part).encode()).hexdigest()
