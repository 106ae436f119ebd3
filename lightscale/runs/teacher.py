"""The model that a run learns from (``task.teacher``), by the configuration of the teacher's run; without torch."""

import functools

from lightscale.config.files import load
from lightscale.config.model import ModelConfig
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.runs.run_directory import RunDirectory


def teacher_run(config: RunConfig) -> tuple[RunDirectory, int]:
    """The directory and the step of ``task.teacher``, which must be set."""
    assert config.teacher is not None
    name, _, step = config.teacher.rpartition("@")
    return RunDirectory(name), int(step)


def teacher_config(config: RunConfig) -> RunConfig | None:
    """Configuration of the run that trained the teacher of ``config``; None: no teacher.

    Raises UserError if the teacher's run has no valid configuration.
    """
    if config.teacher is None:
        return None
    directory, _ = teacher_run(config)
    if not directory.config.exists():
        raise UserError(
            f'task.teacher = "{config.teacher}": {directory.config} is missing; use a run, or import an export with '
            "lightscale import"
        )
    return _load(str(directory.config), directory.config.stat().st_mtime_ns)


# The planner asks for every layout.
@functools.lru_cache(maxsize=4)
def _load(path: str, modified_ns: int) -> RunConfig:
    return load(path)


def computed_models(config: RunConfig) -> list[ModelConfig]:
    """Shapes of all models that a run of ``config`` computes: its own, and the teacher's where it has one."""
    teacher = teacher_model(config)
    return [config.model] if teacher is None else [config.model, teacher]


def asked_model(config: RunConfig) -> ModelConfig | None:
    """Shape of the frozen model that a step of ``config`` asks, a teacher or a reference; None: it asks none."""
    return config.model if config.has_reference else teacher_model(config)


def teacher_model(config: RunConfig) -> ModelConfig | None:
    """Shape of the teacher of ``config``; None: no teacher. Raises as ``teacher_config``."""
    found = teacher_config(config)
    return None if found is None else found.model
