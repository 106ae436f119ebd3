"""The format of the table [search] of STUDY.toml.

[search]
method = "successive_halving"       # or "grid", "random"
trials = 16
reduction_factor = 4                # of 16 trials 4 go on, then 1
min_steps = 50                      # rungs at 50 and 200 steps

[search.parameters]
"optimizer.lr" = { min = 1e-4, max = 1e-2, log = true }
"""

import itertools
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from lightscale.config.fields import shown_value
from lightscale.config.section import Section, Seed, Steps

TRAINING = "training"
VALIDATION = "validation."
"""Beginning of the metric of a validation set; its name follows."""
MOST_TRIALS = 1000
_REDUCTION_FACTOR = 3
"""Hyperband (arXiv 1603.06560, section 3.6) uses 3 or 4."""

Number = Annotated[int | float, Field(ge=-1e15, le=1e15)]
Value = bool | int | float | str
# Each trial would differ in more than its parameters, or not at all.
_NOT_SEARCHED = {
    "train.seed": 'make it an axis, "train.seed" = [0, 1]: the score of a trial is the mean of its seeds',
    "train.stop_step": "the search sets it",
}


class ParameterSection(Section):
    """[search.parameters]: one key, its values or its range."""

    values: list[Value] | None = Field(default=None, min_length=2, max_length=MOST_TRIALS)
    """Values to try."""
    min: Number | None = None
    """Least value of a range; whole numbers if both ends are."""
    max: Number | None = None
    """Largest value of a range."""
    log: bool = False
    """Whether the logarithm of the value is uniform; else the value is."""

    @property
    def is_range(self) -> bool:
        """Whether values are drawn between two ends."""
        return self.values is None


class SearchSection(Section):
    """[search]: trials of hyperparameters, for each combination of the axes."""

    method: Literal["grid", "random", "successive_halving"]
    """grid: all combinations of the values; random: drawn trials; successive_halving: also stops losers at rungs."""
    parameters: Annotated[dict[str, ParameterSection], Field(min_length=1, max_length=20)]
    """Keys of the configuration, each in quotes, with values or a range."""
    trials: Annotated[int, Field(ge=2, le=MOST_TRIALS)] | None = None
    """Number of drawn trials; none: all combinations of the values."""
    seed: Seed = 0
    """Seed of the drawn values."""
    metric: str = TRAINING
    """Loss that decides: training (smoothed), or validation.NAME of a set of data.validation."""
    reduction_factor: Annotated[int, Field(ge=2, le=MOST_TRIALS)] | None = None
    """Of the trials at a rung one in this many goes on; none: 3."""
    min_steps: Steps | None = None
    """First rung, in steps; each next one is reduction_factor times as far."""
    rungs: list[Steps] | None = Field(default=None, min_length=1, max_length=20)
    """All rungs, in steps, in place of min_steps."""

    @property
    def factor(self) -> int:
        """``reduction_factor``, or its default."""
        return self.reduction_factor or _REDUCTION_FACTOR

    @property
    def is_grid(self) -> bool:
        """Whether the trials are all combinations of values."""
        return self.trials is None

    @property
    def validation(self) -> str | None:
        """Name of the validation set that decides; None: the training loss decides."""
        return None if self.metric == TRAINING else self.metric.removeprefix(VALIDATION)

    def rungs_before(self, total_steps: int) -> list[int]:
        """Steps at which trials of `total_steps` are compared and most of them stop."""
        if self.method != "successive_halving":
            return []
        if self.rungs is not None:
            return list(self.rungs)
        assert self.min_steps is not None
        growing = (self.min_steps * self.factor**power for power in itertools.count())
        return list(itertools.takewhile(lambda step: step < total_steps, growing))

    def rules(self) -> dict[str, object]:
        """Keys that decide the scores and what goes on: another value makes it another search."""
        return {
            "method": self.method,
            "metric": self.metric,
            "reduction_factor": self.factor if self.method == "successive_halving" else None,
            "min_steps": self.min_steps,
            "rungs": self.rungs,
        }


def search_faults(search: SearchSection) -> Iterator[str]:
    """A line for each mistake that needs no configuration: key, value, remedy."""
    for key, parameter in search.parameters.items():
        yield from _parameter_faults(f"search.parameters.{key}", parameter)
        if (reason := _NOT_SEARCHED.get(key)) is not None:
            yield f"search.parameters.{key}: no parameter of a search: {reason}"
    if search.metric != TRAINING and not search.metric.startswith(VALIDATION):
        yield f'search.metric = {shown_value(search.metric)}: use "training", or "validation.NAME" of data.validation'
    ranges = [key for key, parameter in search.parameters.items() if parameter.is_range]
    if search.is_grid and ranges:
        if search.method == "grid":
            yield f'search.method = "grid" needs values of search.parameters.{ranges[0]}; or use method = "random"'
        else:
            yield f"search.trials is missing: set the number of draws from the range of {ranges[0]}"
    if search.method == "grid" and search.trials is not None:
        yield f"search.trials = {search.trials}: a grid tries all combinations; remove it"
    if search.method == "random" and not ranges:
        yield 'search.method = "random" needs a range, min and max, of a parameter; or use method = "grid"'
    yield from _halving_faults(search)


def _parameter_faults(where: str, parameter: ParameterSection) -> Iterator[str]:
    low, high = parameter.min, parameter.max
    if parameter.values is not None:
        if low is not None or high is not None or parameter.log:
            yield f"{where}: values excludes min, max and log; remove either"
        if len(set(parameter.values)) < len(parameter.values):
            yield f"{where}.values = {shown_value(parameter.values)}: must be different values"
        return
    if low is None or high is None:
        yield f"{where}: must have values = [...], or both min and max"
    elif low >= high:
        yield f"{where}.min = {low:g}: must be less than max = {high:g}"
    elif parameter.log and low <= 0:
        yield f"{where}.min = {low:g}: a logarithm needs a value above 0; use one, or log = false"


def _halving_faults(search: SearchSection) -> Iterator[str]:
    if search.method != "successive_halving":
        for key in ("reduction_factor", "min_steps", "rungs"):
            if (value := getattr(search, key)) is not None:
                yield f'search.{key} = {shown_value(value)}: only for method = "successive_halving"; remove it'
        return
    if (search.min_steps is None) == (search.rungs is None):
        yield "search: successive_halving needs either min_steps, the first rung, or rungs, all of them"
    if search.rungs is not None and sorted(set(search.rungs)) != search.rungs:
        yield f"search.rungs = {shown_value(search.rungs)}: must be different steps in ascending order"
    if search.is_grid:
        number = 1
        for parameter in search.parameters.values():
            number *= len(parameter.values or ())
        what = f"search.parameters: {number} combinations"
    else:
        number, what = search.trials or 0, f"search.trials = {search.trials}"
    if 0 < number < search.factor:
        yield f"{what}: fewer than search.reduction_factor = {search.factor}: no trial could stop early; use more"
