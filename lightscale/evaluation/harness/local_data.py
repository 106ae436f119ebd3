"""Tasks of lm-eval whose questions may lie in files here, so that no network is needed. Without lm-eval."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "csr"
"""In the folder of `--data`; ``tools/texts/benchmark_data.py`` writes it."""


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """How lm-eval's definition of a task is changed to read a local file."""

    definition: str
    """The file of lm-eval that defines it, in its folder of tasks."""
    file: str
    """jsonl, one question a line, in the fields of the data set that the definition names."""
    split: str = "validation"
    """Of the questions, as the definition calls it."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Of other keys."""

    def config(self, folder: Path, tasks: Path) -> dict[str, Any]:
        """The definition of the task over the file in ``folder``; ``tasks`` is lm-eval's folder of tasks."""
        splits = {f"{split}_split": None for split in ("training", "validation", "test")}
        return {
            "include": str(tasks / self.definition),
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {self.split: str((folder / FOLDER / self.file).absolute())}},
            **splits,
            f"{self.split}_split": self.split,
            **self.changes,
        }


LOCAL_TASKS = {
    "boolq": LocalTask(definition="super_glue/boolq/default.yaml", file="boolq.jsonl"),
    "piqa": LocalTask(definition="piqa/piqa.yaml", file="piqa.jsonl"),
    "social_iqa": LocalTask(definition="siqa/siqa.yaml", file="social_iqa.jsonl"),
    "hellaswag": LocalTask(definition="hellaswag/hellaswag.yaml", file="hellaswag.jsonl"),
    "winogrande": LocalTask(definition="winogrande/default.yaml", file="winogrande.jsonl"),
    "arc_easy": LocalTask(definition="arc/arc_easy.yaml", file="arc_easy.jsonl", split="test"),
    "arc_challenge": LocalTask(definition="arc/arc_challenge.yaml", file="arc_challenge.jsonl", split="test"),
    "openbookqa": LocalTask(definition="openbookqa/openbookqa.yaml", file="openbookqa.jsonl", split="test"),
}
"""By lm-eval's name. Prompts and metrics stay lm-eval's."""


def local_file(name: str, folder: Path) -> Path | None:
    """The file with the questions of lm-eval's task ``name``, where it is in ``folder``."""
    task = LOCAL_TASKS.get(name)
    path = None if task is None else folder / FOLDER / task.file
    return path if path is not None and path.is_file() else None
