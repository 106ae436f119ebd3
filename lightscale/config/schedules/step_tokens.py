"""Tokens of every step of a run, the only place that turns steps into tokens and tokens into steps.

The batch of a step is a function of the tokens consumed before it, which grows in a ramp-up. Neither the layout nor
skipped data enters it, so a run that resumes or rolls back has the same steps.
"""

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """Tokens of steps, over all ranks: a step function of the tokens consumed before."""

    full: int
    """Tokens of a step behind the ramp-up."""
    ramp: tuple[tuple[int, int], ...] = ()
    """(end, tokens of a step), by end: of the steps that begin before ``end`` consumed tokens."""

    @classmethod
    def of(cls, sequence_length: int, global_batch_size: int, ramp: Iterable[tuple[int, int]] = ()) -> Self:
        """From batches in sequences of ``sequence_length`` tokens; ``ramp``: (end in tokens, sequences per step)."""
        parts = tuple((end, sequences * sequence_length) for end, sequences in ramp)
        return cls(full=global_batch_size * sequence_length, ramp=parts)

    def of_next(self, tokens: int) -> int:
        """Tokens of the step that follows ``tokens`` consumed ones."""
        return self._part(tokens)[1]

    def equal_steps(self, steps: int, tokens: int = 0) -> Iterator[tuple[int, int]]:
        """(number of steps, tokens of each) of ``steps`` steps that follow ``tokens`` consumed ones, in order."""
        while steps:
            end, size = self._part(tokens)
            alike = steps if end is None else min(steps, -(-(end - tokens) // size))
            yield alike, size
            steps, tokens = steps - alike, tokens + alike * size

    def after(self, steps: int, tokens: int = 0) -> int:
        """Tokens consumed when ``steps`` more steps follow ``tokens`` consumed ones."""
        return tokens + sum(alike * size for alike, size in self.equal_steps(steps, tokens))

    def steps_to(self, tokens: int) -> int:
        """The fewest steps from the start of the run that consume ``tokens``."""
        steps = consumed = 0
        while consumed < tokens:
            end, size = self._part(consumed)
            alike = -(-(min(tokens, end or tokens) - consumed) // size)
            steps, consumed = steps + alike, consumed + alike * size
        return steps

    def begins_step(self, tokens: int) -> bool:
        """Whether a number of whole steps from the start of the run consumes ``tokens``."""
        return tokens == self.after(self.steps_to(tokens))

    def _part(self, tokens: int) -> tuple[int | None, int]:
        number = bisect.bisect_right(self.ramp, tokens, key=lambda part: part[0])
        return self.ramp[number] if number < len(self.ramp) else (None, self.full)
