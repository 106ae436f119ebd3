"""The newest result of each evaluation task of a run."""

from lightscale.evaluation.results import read_result
from lightscale.runs.run_directory import RunDirectory

Scores = dict[str, dict[str, float]]
"""Values by task, then by score."""


def newest_scores(run: RunDirectory) -> Scores:
    """Result of the latest step for each task in RUN/evaluation; scores without a value are skipped."""
    found: Scores = {}
    for path in sorted(run.evaluation.glob("step-*/*.json")):
        if (result := read_result(path)) is not None:
            values = {name: score.get("value") for name, score in result["scores"].items() if isinstance(score, dict)}
            found[str(result["task"])] = {name: value for name, value in values.items() if isinstance(value, float)}
    return found
