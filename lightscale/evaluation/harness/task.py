"""Tasks of lm-eval as tasks of `lightscale evaluate`. Without torch; lm-eval is imported when its data is needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.harness.tasks import Tasks, scores_of
from lightscale.evaluation.harness.translation import answered, request_of
from lightscale.evaluation.harness_names import installed_version, nearest, require_lm_eval, task_names
from lightscale.evaluation.inference.requests import Answer, Encoder, Request
from lightscale.evaluation.task import Score, Scores, Task, TaskSettings


class LocalSettings(TaskSettings):
    """Common part of all tasks that lm-eval defines."""

    data: Path = Field(default=Path(), strict=False)
    """Folder of local files, relative to the task file; `python tools/texts/benchmark_data.py` makes it."""
    lm_eval: str = Field(default_factory=installed_version)
    """Required version of lm-eval; default: the installed version."""


class HarnessSettings(LocalSettings):
    """A task file with `kind = "lm-eval"`."""

    tasks: list[str] = Field(min_length=1)
    """lm-eval tasks, groups and tags."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples before each question; none: the number in lm-eval's task definition. Local files have no examples."""
    window: int | None = Field(default=None, ge=1)
    """Tokens fed at once where every token of a text is scored, as in perplexity; none: texts of any length."""


class HarnessTask(Task):
    """Some of lm-eval's tasks: its prompts and metrics, our answers."""

    Settings: ClassVar[type[LocalSettings]] = HarnessSettings
    settings: LocalSettings

    def __init__(self, settings: LocalSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self._tasks: Tasks | None = None
        self._keys: list[str] = []

    def _wanted(self) -> HarnessSettings:
        assert isinstance(self.settings, HarnessSettings)
        return self.settings

    def check(self, tokenizer: Tokenizer) -> None:
        """lm-eval is installed and has the tasks."""
        known, version = task_names(require_lm_eval()), installed_version()
        if self.settings.lm_eval != version:
            raise UserError(f"{self.name}: lm_eval = {self.settings.lm_eval!r}, but {version} is installed")
        for task in self._wanted().tasks:
            if task not in known:
                raise UserError(f"{self.name}: lm-eval {version} has no task {task!r}{nearest(task, known)}")

    def requests(self, encoder: Encoder) -> Sequence[Request]:
        """Requests as lm-eval builds them; repeated requests are answered once."""
        wanted = self._wanted()
        if self._tasks is None:
            self._tasks = Tasks(wanted.tasks, self.folder / wanted.data, num_fewshot=wanted.num_fewshot)
        asked = {one.key: one for one in self._tasks.asked(wanted.limit)}
        self._keys = list(asked)
        return [request_of(one.kind, one.arguments, encoder, window=wanted.window) for one in asked.values()]

    def data_hashes(self) -> dict[str, str]:
        """Of the questions of each task."""
        return {} if self._tasks is None else self._tasks.hashes()

    def score(self, answers: Sequence[Answer]) -> Scores:
        """lm-eval's own numbers."""
        results = self._judged(answers)
        return Scores(scores=self._scores(results), details=_details(results))

    def _judged(self, answers: Sequence[Answer]) -> dict[str, Any]:
        assert self._tasks is not None, "requests come first"
        given = dict(zip(self._keys, map(answered, answers), strict=True))
        return self._tasks.judged(given, self.settings.limit)

    def _scores(self, results: dict[str, Any]) -> dict[str, Score]:
        """Names have the task's in front where there are several."""
        several = len(results["results"]) + len(results.get("groups", {})) > 1
        return {
            f"{task} {metric}" if several else metric: Score(value=value, standard_error=error)
            for task, metric, value, error in scores_of(results)
        }

    def definitions(self) -> dict[str, str]:
        """Of the scores."""
        return {self.name: f"as lm-eval {self.settings.lm_eval} defines it"}


def _details(results: dict[str, Any]) -> dict[str, Any]:
    return {
        "versions": dict(results["versions"]),
        "num_fewshot": dict(results["n-shot"]),
        "questions": {name: dict(count) for name, count in results["n-samples"].items()},
    }
