"""Code of a worker, a process of any engine."""

from typing import Any

from lightscale.data_pipeline.executors.interface import Advance, MakeContext, Task

# A worker may outlive a preparation, as Ray's do: the context is that of the executor that asked last.
_contexts: dict[str, Any] = {}


def run_task(
    executor_id: str, make_context: MakeContext, task: Task, item: Any, advance: Advance | None = None
) -> None:
    """Run ``task`` on ``item`` with the context of this worker for the executor ``executor_id``, made at the first."""
    if executor_id not in _contexts:
        _contexts.clear()
        _contexts[executor_id] = make_context()
    task(_contexts[executor_id], item, advance or _ignore)


def _ignore(num_bytes: int) -> None:
    """Where the engine has no way for numbers: progress is shown by whole tasks."""
