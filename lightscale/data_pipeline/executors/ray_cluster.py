"""Executor on a Ray cluster with one file system: nodes may join and leave, and Ray repeats the tasks of lost nodes."""

import logging
import os
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

from lightscale.data_pipeline.executors.interface import MOST_LOSSES, HandsOut, MakeContext, Task
from lightscale.data_pipeline.executors.worker import run_task
from lightscale.errors import UserError


class RayCluster(HandsOut[Any]):
    """Runs tasks on the cluster Ray finds (RAY_ADDRESS, or one with a node on this machine), or on a new one."""

    def __init__(self, make_context: MakeContext) -> None:
        # Set before Ray is imported: nothing is sent to its makers. A cluster that is there has its own setting.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray  # noqa: PLC0415 - an optional package
        except ImportError as error:
            raise UserError(
                f"--executor ray needs Ray ({error}); pip install 'lightscale[ray]', on all nodes"
            ) from error
        self._ray, self._make_context, self._id = ray, make_context, uuid.uuid4().hex
        self._is_own = False

    def __enter__(self) -> Self:
        if not self._ray.is_initialized():
            try:
                self._ray.init(log_to_driver=False, logging_level=logging.WARNING)
            except (ConnectionError, RuntimeError, ValueError) as error:
                address = os.environ.get("RAY_ADDRESS", "none")
                raise UserError(f"--executor ray: no cluster responds (RAY_ADDRESS: {address}; {error})") from error
            self._is_own = True
        # A task is repeated where its worker or node dies; an error that it raises is its result.
        self._remote = self._ray.remote(num_cpus=1, max_retries=MOST_LOSSES, retry_exceptions=False)(_run_in)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_own:
            self._ray.shutdown()

    def _submit(self, task: Task, item: Any) -> Any:
        name = getattr(task, "__name__", "task")
        return self._remote.options(name=name).remote(str(Path.cwd()), self._id, self._make_context, task, item)

    def _wait(self, handles: Collection[Any], timeout_s: float) -> Collection[Any]:
        # All that end within the time, or all there are: one call for each would be slow with thousands in hand.
        ended, _ = self._ray.wait(list(handles), num_returns=len(handles), timeout=timeout_s, fetch_local=False)
        return list(ended)

    def _raise_error(self, handle: Any) -> None:
        exceptions = self._ray.exceptions
        try:
            self._ray.get(handle)
        except exceptions.RayTaskError as error:
            # What the task raised, with the traceback of its worker as what led to it.
            raise error.cause from error
        except (exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError) as error:
            raise UserError(
                f"a worker of the Ray cluster died for the {MOST_LOSSES + 1}th time with the same task ({error}); "
                f"finished work is kept: run the same command again, with more memory per task if memory ran out"
            ) from error

    def _cancel(self, handle: Any) -> None:
        self._ray.cancel(handle, force=False)


def _run_in(directory: str, executor_id: str, make_context: MakeContext, task: Task, item: Any) -> None:
    """In a worker, in the directory of the driver, from which paths are given."""
    os.chdir(directory)
    run_task(executor_id, make_context, task, item)
