"""lm-eval's tasks, loaded and asked without a model: its own code builds the prompts and judges the answers.

``Tasks.asked`` lists what lm-eval would ask; when that is answered, ``Tasks.judged`` runs lm-eval's evaluation with a
model that repeats the answers. So every metric, filter, group and standard error is lm-eval's.
"""

import contextlib
import json
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lightscale.errors import UserError, shortened
from lightscale.evaluation.harness.local_data import LOCAL_TASKS, local_file
from lightscale.evaluation.harness.translation import HarnessRequest
from lightscale.evaluation.harness_names import require_lm_eval

RANDOM_SEED, OTHER_SEED = 0, 1234
"""lm-eval's own, for tasks that draw examples or orders."""


class Tasks:
    """Some of lm-eval's tasks with their data.

    Args:
        names: of tasks, groups and tags.
        data: folder whose files are asked in place of data sets; see ``local_data``.
        num_fewshot: examples before each question; None: the number of the task's definition. Local files have none.

    Raises:
        UserError: lm-eval is not installed, or data cannot be loaded.
    """

    def __init__(self, names: Sequence[str], data: Path, *, num_fewshot: int | None = None) -> None:
        folder = require_lm_eval()
        from lm_eval.tasks import TaskManager  # noqa: PLC0415

        local = [name for name in names if not num_fewshot and local_file(name, data) is not None]
        with tempfile.TemporaryDirectory(prefix="lightscale-lm-eval-") as definitions, seeds(), _quiet():
            for name in local:
                config = {**LOCAL_TASKS[name].config(data, folder), "task": name}
                # JSON is YAML.
                Path(definitions, f"{name}.yaml").write_text(json.dumps(config), encoding="utf-8")
            # Reading all definitions takes seconds.
            manager = TaskManager(include_path=definitions, include_defaults=len(local) < len(names))
            self._loaded: dict[str, Any] = {}
            for name in names:
                for kind, found in _load(manager, name).items():
                    self._loaded.setdefault(kind, {}).update(found)
        for task in self._loaded["tasks"].values():
            if num_fewshot is not None and task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=num_fewshot)
            elif task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)

    def asked(self, limit: int | None) -> list[HarnessRequest]:
        """All that lm-eval asks about the first ``limit`` questions of each task."""
        found: list[HarnessRequest] = []
        self._hashes: dict[str, str] = {}
        with self._as_first():
            for name, task in self._loaded["tasks"].items():
                task.build_all_requests(limit=limit, rank=0, world_size=1)
                digest = xxhash.xxh3_128()
                for instance in task.instances:
                    digest.update(json.dumps(instance.doc, sort_keys=True, default=str).encode())
                    found += [HarnessRequest(instance.request_type, tuple(instance.args))] * instance.repeats
                self._hashes[name] = f"xxh3-128:{digest.hexdigest()}"
        return found

    def hashes(self) -> dict[str, str]:
        """Of the questions of each task; known when they were asked."""
        return dict(self._hashes)

    def judged(self, answers: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
        """Result of lm-eval's evaluation with the given answer of the model to each request, by its key."""
        from lm_eval.evaluator import evaluate  # noqa: PLC0415

        from lightscale.evaluation.harness.answering import AnsweringLM  # noqa: PLC0415

        # Of metrics without a formula for it, lm-eval finds the standard error by drawing, on processes of its own.
        with self._as_first(), _environment(DISABLE_MULTIPROC="1"):
            found: dict[str, Any] = evaluate(
                lm=AnsweringLM(answers),
                task_dict=self._loaded,
                limit=limit,
                log_samples=False,
                bootstrap_iters=1000,
            )
        return found

    @contextlib.contextmanager
    def _as_first(self) -> Iterator[None]:
        """Draw what would be drawn the first time."""
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=OTHER_SEED)
        with seeds(), _quiet():
            yield


def _load(manager: Any, name: str) -> dict[str, dict[str, Any]]:
    try:
        found: dict[str, dict[str, Any]] = manager.load([name])
    # Definitions are code, and data comes from anywhere.
    except Exception as error:
        why = shortened(" ".join(str(error).split()) or type(error).__name__, 300)
        raise UserError(
            f"lm-eval could not load its task {name}: {why}\nThe package `datasets` loads its data from its cache or "
            "the network; HF_DATASETS_OFFLINE=1 uses only the cache"
        ) from error
    return found


@contextlib.contextmanager
def seeds() -> Iterator[None]:
    """Set lm-eval's seeds; afterwards the generators are restored, so that training is unaffected."""
    state, numbers = random.getstate(), np.random.get_state()
    random.seed(RANDOM_SEED)
    np.random.seed(OTHER_SEED)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval prints how it goes, also to where results are printed."""
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def scores_of(results: Mapping[str, Any]) -> Iterable[tuple[str, str, float, float | None]]:
    """(task or group, metric, value, standard error) of all numbers that lm-eval found, groups first."""
    of_tasks = results.get("results", {})
    for name, metrics in {**results.get("groups", {}), **of_tasks}.items():
        for key, value in metrics.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or isinstance(value, (str, bool)):
                continue
            error = metrics.get(f"{metric}_stderr,{chosen}")
            shown = metric if chosen == "none" else f"{metric} ({chosen})"
            yield name, shown, float(value), float(error) if isinstance(error, (int, float)) else None
