"""Position of a run in its data: ranges that a recovery skipped, and curriculum stages of growing sequence length.

    tokens consumed ─SkippedRanges─▶ position in the data ─Curriculum─▶ curriculum stage, sample index in it

A position in the data is a number of tokens: consumed plus skipped ones. Both steps are pure functions of the records
of configuration and recovery, so that any position is computed directly, without replaying the run. The data depend on
the position; the learning rate depends on the number of steps.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.config.schema import CurriculumStage
from lightscale.errors import UserError


@dataclass(frozen=True)
class SkippedRanges:
    """Data that is never trained on: when ``at_tokens`` tokens are consumed, the next ``skip_tokens`` are skipped.

    ``records`` holds pairs (at_tokens, skip_tokens); pairs with the same ``at_tokens`` add up. They refer to consumed
    tokens, not to positions, so that a run that rolls back to an earlier checkpoint skips the same data again.
    """

    records: tuple[tuple[int, int], ...] = ()
    ends: tuple[tuple[int, int], ...] = ()
    """Such pairs for the ends of curriculum stages that no whole step fits into; `Curriculum.fit` finds them."""

    @classmethod
    def of(cls, records: Iterable[Sequence[int]]) -> Self:
        """From pairs in any order; ``UserError`` for numbers that are not possible."""
        pairs = sorted((int(at_tokens), int(skip_tokens)) for at_tokens, skip_tokens in records)
        for at_tokens, skip_tokens in pairs:
            if at_tokens < 0 or skip_tokens <= 0:
                raise UserError(
                    f"cannot skip {skip_tokens} tokens of data after {at_tokens} consumed tokens; skip at least 1, "
                    f"after 0 or more"
                )
        return cls(tuple(pairs))

    def position(self, tokens: int) -> int:
        """The position in the data, in tokens, of the token that comes after ``tokens`` consumed ones."""
        # Equality included: a range that is skipped now lies before the token that comes next.
        skipped = (skip_tokens for at_tokens, skip_tokens in (*self.records, *self.ends) if at_tokens <= tokens)
        return tokens + sum(skipped)

    def length_back_to(self, at_tokens: int, tokens: int, end_tokens: int) -> int:
        """Tokens of data to skip at ``at_tokens`` consumed ones, where a run of ``end_tokens`` returns from ``tokens``.

        All data in between, and all that the records skip behind ``at_tokens``: those of a parent, or of a rollback
        whose checkpoint is lost. The records move with the new skip, so that their data would otherwise come back.
        """
        reached = max([tokens, *(start for start, _ in self.records if start < end_tokens)])
        # With the new skip, no end of a curriculum stage is left out there that was before.
        left_out = sum(skip_tokens for start, skip_tokens in self.ends if start == at_tokens)
        return self.position(reached) - self.position(at_tokens) + left_out

    def adding(self, at_tokens: int, skip_tokens: int) -> "SkippedRanges":
        """With one more range."""
        return SkippedRanges.of([*self.records, (at_tokens, skip_tokens)])


@dataclass(frozen=True, kw_only=True)
class LengthStage:
    """A curriculum stage: the part of the data that is read in sequences of one length."""

    start: int
    """Position of its first token."""
    stop: int | None
    """The position after its last token; none: it is the last curriculum stage."""
    sequence_length: int
    micro_batch_size: int
    """Sequences that a data rank holds at once."""
    num_parts: int
    """Number of its sequences that together are as long as one of the last curriculum stage."""


class Curriculum:
    """The curriculum stages of a run. Tokens per micro-batch are the same in all of them."""

    def __init__(
        self,
        entries: Sequence[CurriculumStage],
        *,
        sequence_length: int,
        step_tokens: StepTokens,
        micro_batch_size: int,
    ) -> None:
        """``entries``: as ``DataConfig`` checked them; the curriculum stage of ``sequence_length`` tokens follows.

        ``micro_batch_size`` is that of the last curriculum stage; an earlier one has as many more sequences as they are
        shorter.
        """
        self._step_tokens = step_tokens
        # Rounded up to whole steps: a step has one shape, so it must not reach from one curriculum stage into the next.
        ends = [step_tokens.after(step_tokens.steps_to(entry.until_tokens)) for entry in entries]
        lengths = [entry.sequence_length for entry in entries]
        self.stages: list[LengthStage] = []
        for length, start, stop in zip([*lengths, sequence_length], [0, *ends], [*ends, None], strict=True):
            # As many more sequences as they are shorter: tokens per step, and so the learning rate's schedule and the
            # memory of a micro-batch, stay as they are.
            num_parts, rest = divmod(sequence_length, length)
            assert rest == 0, "the configuration was not checked"
            if start == stop:
                continue  # rounding left nothing of it
            stage = LengthStage(
                start=start,
                stop=stop,
                sequence_length=length,
                micro_batch_size=micro_batch_size * num_parts,
                num_parts=num_parts,
            )
            self.stages.append(stage)
        self._starts = [stage.start for stage in self.stages]

    def number_at(self, position: int) -> int:
        """Index in ``stages`` of the stage that holds ``position`` ≥ 0."""
        return bisect.bisect_right(self._starts, position) - 1

    def fit(self, skips: SkippedRanges) -> SkippedRanges:
        """``skips`` with their ``ends``: where a step would reach from one curriculum stage into the next.

        Stages end with whole steps, but behind skipped data the steps of a ramp-up may begin elsewhere. The sequences
        of the stage that are then too few for a step are skipped too. ``skips`` begin where steps do.
        """
        steps_to, after = self._step_tokens.steps_to, self._step_tokens.after
        found = replace(skips, ends=())
        for stage in self.stages[:-1]:
            assert stage.stop is not None
            reached = range(steps_to(stage.stop) + 1)
            first_behind = bisect.bisect_left(reached, stage.stop, key=lambda steps: found.position(after(steps)))
            if first_behind == 0:
                continue  # skipped whole
            tokens = after(first_behind - 1)
            left = stage.stop - found.position(tokens)
            if left < self._step_tokens.of_next(tokens):
                found = replace(found, ends=(*found.ends, (tokens, left)))
        return found

    def description(self) -> str:
        """The curriculum stages, for fingerprints and messages: "2048 from 0, 8192 from 1048576"."""
        return ", ".join(f"{stage.sequence_length} from {stage.start}" for stage in self.stages)
