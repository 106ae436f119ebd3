"""Prompts of a model and the settings of their continuation; without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightscale.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from the logits."""

    temperature: float = 0.8
    """Divides the logits; 0: always the most probable token."""
    top_k: int | None = None
    """Only the k most probable tokens are possible; none: all."""
    top_p: float | None = None
    """Only the fewest most probable tokens that together have this probability are possible; none: all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of all tokens that the document has, its first one included, and multiplies their
    negative ones (arXiv 1909.05858, in the form that transformers has); above 1 they become less probable."""
    seed: int = 0
    """Of the random choices."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature {self.temperature:g}: must be 0 (the most probable token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k {self.top_k}: must be at least 1 token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p:g}: must be above 0 and at most 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UserError(f"repetition-penalty {self.repetition_penalty:g}: must be above 0; use 1 for no penalty")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed {self.seed}: must fit into 64 bits")


def seed_of(seed: int, number: int) -> int:
    """The seed of text ``number`` of several that are asked for with one ``seed``; that of the first is ``seed``."""
    if not number:
        return seed
    # 53 bits: whatever reads JSON reads it exactly.
    return int(np.random.SeedSequence([seed % 2**64, number]).generate_state(1, np.uint64)[0] >> np.uint64(11))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text to be continued, and how."""

    ids: Sequence[int]
    """The document so far, its end-of-text token in front; see ``encode_prompt``."""
    max_tokens: int = 200
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not self.ids:
            raise UserError("the prompt has no token; a document begins with the end-of-text token")
        if self.max_tokens < 1:
            raise UserError(f"tokens {self.max_tokens}: must be at least 1")
        if not all(self.stop):
            raise UserError("stop '': a stop string must have at least one character")


def check_generates(pipeline: int, sequence: int) -> None:
    """UserError unless the ranks of one model can write text: tokens come one by one, which these axes cannot share."""
    if pipeline * sequence > 1:
        raise UserError(
            f"parallel.pipeline = {pipeline}, parallel.sequence = {sequence}: text generation uses only tensor and "
            "data ranks; use parallel.pipeline=1 and parallel.sequence=1"
        )
