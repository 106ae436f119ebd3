"""Executors of the tasks of a preparation. ``mpi`` and ``ray_cluster`` are imported on demand."""

from lightscale.data_pipeline.executors.interface import (
    Advance,
    Executor,
    ExecutorFactory,
    Progress,
    ProgressMeter,
    Task,
)
from lightscale.data_pipeline.executors.processes import InProcess, ProcessPool

__all__ = [
    "Advance",
    "Executor",
    "ExecutorFactory",
    "InProcess",
    "ProcessPool",
    "Progress",
    "ProgressMeter",
    "Task",
]
