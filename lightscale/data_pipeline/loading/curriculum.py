"""Where in the data a run is: jumps over stretches that a recovery left out, and stages of growing length.

    tokens consumed ─Skips─▶ place ─Curriculum─▶ stage, sample index in the stage

Both are pure functions of what the configuration and the recovery recorded, so that any place is found at once.
Everything about the data goes by the place; the learning rate goes by the steps.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from lightscale.config.schema import CurriculumStage
from lightscale.errors import UserError


@dataclass(frozen=True)
class Skips:
    """Jumps over data: when ``at_tokens`` tokens are consumed, the next ``skip_tokens`` are left out for ever.

    ``records`` holds pairs (at_tokens, skip_tokens). Jumps at the same counter add up. A run that goes back to
    before a jump comes to it again.
    """

    records: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, records: Iterable[Sequence[int]]) -> Self:
        """From pairs in any order; ``UserError`` for numbers that make no jump."""
        pairs = sorted((int(at_tokens), int(skip_tokens)) for at_tokens, skip_tokens in records)
        for at_tokens, skip_tokens in pairs:
            if at_tokens < 0 or skip_tokens <= 0:
                raise UserError(
                    f"a jump over {skip_tokens} tokens of data after {at_tokens} consumed ones is not possible; "
                    "at least 1 is skipped, after 0 or more"
                )
        return cls(tuple(pairs))

    def place(self, tokens: int) -> int:
        """The place in the data of the token that comes after ``tokens`` consumed ones."""
        return tokens + sum(skip_tokens for at_tokens, skip_tokens in self.records if at_tokens <= tokens)

    def adding(self, at_tokens: int, skip_tokens: int) -> "Skips":
        """With one more jump."""
        return Skips.of([*self.records, (at_tokens, skip_tokens)])


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of the data that is read in sequences of one length."""

    start: int
    """Its first place, in tokens."""
    stop: int | None
    """The place after its last; none: it is the last stage."""
    sequence_length: int
    global_batch_size: int
    """Sequences of a step, over all ranks."""
    micro_batch_size: int
    """Sequences that a data rank holds at once."""
    num_parts: int
    """How many of its sequences are as long as one of the last stage."""


class Curriculum:
    """The stages of a run. Tokens per step and per micro-batch are the same in all of them."""

    def __init__(
        self,
        entries: Sequence[CurriculumStage],
        *,
        sequence_length: int,
        global_batch_size: int,
        micro_batch_size: int,
    ) -> None:
        """``entries``: as ``DataConfig`` checked them; the stage of ``sequence_length`` tokens follows.

        The sizes are those of the last stage; an earlier one has as many more sequences as they are shorter. A
        stage lasts whole steps: its end is rounded up.
        """
        self.tokens_per_step = global_batch_size * sequence_length
        ends = [-(-entry.until_tokens // self.tokens_per_step) * self.tokens_per_step for entry in entries]
        lengths = [entry.sequence_length for entry in entries]
        self.stages: list[Stage] = []
        for length, start, stop in zip([*lengths, sequence_length], [0, *ends], [*ends, None], strict=True):
            num_parts, rest = divmod(sequence_length, length)
            assert rest == 0, "the configuration was not checked"
            if start == stop:
                continue  # shorter than a step
            stage = Stage(
                start=start,
                stop=stop,
                sequence_length=length,
                global_batch_size=global_batch_size * num_parts,
                micro_batch_size=micro_batch_size * num_parts,
                num_parts=num_parts,
            )
            self.stages.append(stage)
        self._starts = [stage.start for stage in self.stages]

    def number_at(self, place: int) -> int:
        """The number of the stage that ``place`` ≥ 0 lies in."""
        return bisect.bisect_right(self._starts, place) - 1

    def description(self) -> str:
        """The stages, for fingerprints and people: "2048 from 0, 8192 from 1048576"."""
        return ", ".join(f"{stage.sequence_length} from {stage.start}" for stage in self.stages)
