"""A picture of what a configuration plans: learning rate, sequences per step and their length over the tokens."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightscale.config.schedules.registry import learning_rate, schedule_of
from lightscale.config.schema import RunConfig
from lightscale.output.plot import DOTS_PER_INCH, check_plot_path, new_figure

_MOST_POINTS = 1000


def planned_rates(config: RunConfig) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(k,) steps from 1 to the last one, (k,) their learning rates.

    A long run has some of its steps, among them those where a phase ends.
    """
    optimizer, total = config.optimizer, config.total_steps
    fixed = schedule_of(optimizer).fixed_until(optimizer, total)
    marks = (1, optimizer.warmup_steps, optimizer.warmup_steps + 1, fixed, fixed + 1, total)
    even = np.linspace(1, total, min(total, _MOST_POINTS)).round().astype(np.int64)
    steps = np.unique([*even, *(step for step in marks if 1 <= step <= total)])
    return steps, np.array([learning_rate(optimizer, int(step), total) for step in steps])


def planned_shapes(config: RunConfig) -> list[tuple[int, int, int]]:
    """(first step, sequence length in tokens, sequences per step) of all steps of one shape, in order."""
    found: list[tuple[int, int, int]] = []
    total, first, tokens = config.total_steps, 1, 0
    # Stages end with whole steps.
    stages = [
        (stage.sequence_length, config.step_tokens.steps_to(stage.until_tokens)) for stage in config.data.curriculum
    ]
    for length, last in [*stages, (config.data.sequence_length, total)]:
        for steps, size in config.step_tokens.equal_steps(max(0, min(last, total) - first + 1), tokens):
            found.append((first, length, size // length))
            first, tokens = first + steps, tokens + steps * size
    return found


def draw(config: RunConfig, path: Path) -> None:
    """Write the picture to ``path``.

    Raises UserError for a suffix or a folder that cannot be, and where matplotlib is not installed.
    """
    check_plot_path(path)
    figure = new_figure(7.5, 6.5)
    rate, batch, length = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    steps, rates = planned_rates(config)
    tokens_after = config.step_tokens.after
    rate.plot([tokens_after(int(step)) for step in steps], rates, color="#1f77b4")
    rate.set_title(f"optimizer.schedule = {config.optimizer.schedule}, {config.total_steps:,} steps", fontsize=10)
    shapes = planned_shapes(config)
    edges = [*(tokens_after(first - 1) for first, *_ in shapes), config.total_tokens]
    batch.stairs([sequences for _, _, sequences in shapes], edges, color="#d62728", baseline=None, linewidth=1.6)
    length.stairs([tokens for _, tokens, _ in shapes], edges, color="#2ca02c", baseline=None, linewidth=1.6)
    for axes, label in ((rate, "learning rate"), (batch, "sequences per step"), (length, "tokens per sequence")):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0, top=1.1 * axes.dataLim.y1)
        axes.grid(alpha=0.3)
        if config.train.branch_from is not None:
            label = f"branch of {config.train.branch_from}"
            axes.axvline(tokens_after(config.parent_steps), color="black", linestyle="--", linewidth=1, label=label)
    if config.train.branch_from is not None:
        rate.legend(fontsize=8)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    length.set_xlabel(f"tokens, {'up to ' * bool(config.train.rampup_batch_size)}{config.tokens_per_step:,} per step")
    figure.savefig(path, dpi=DOTS_PER_INCH)
