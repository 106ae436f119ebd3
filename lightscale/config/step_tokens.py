"""Tokens of every step of a run, the only place that turns steps into tokens and tokens into steps."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """Tokens of steps, over all ranks: a function of the tokens consumed before, whatever the layout."""

    full: int
    """Tokens of every step."""

    def of_next(self, tokens: int) -> int:
        """Tokens of the step that follows ``tokens`` consumed ones."""
        return self.full

    def after(self, steps: int, tokens: int = 0) -> int:
        """Tokens consumed when ``steps`` more steps follow ``tokens`` consumed ones."""
        return tokens + steps * self.full

    def steps_to(self, tokens: int) -> int:
        """The fewest steps from the start of the run that consume ``tokens``."""
        return -(-tokens // self.full)

    def begins_step(self, tokens: int) -> bool:
        """Whether a number of whole steps from the start of the run consumes ``tokens``."""
        return tokens == self.after(self.steps_to(tokens))
