"""Requests of a task to a model, and their answers, in token ids.

A document begins with the end-of-text token, as in training; ``Encoder`` makes requests out of text.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError, shortened

Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class LogLikelihood:
    """How probable is ``continuation`` behind ``context``? Answered by a ``Likelihood``."""

    context: Ids
    """(c,) with at least the end-of-text token that begins the document."""
    continuation: Ids
    """(m,) at least one."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class RollingLogLikelihood:
    """How probable is each token of a text? Answered by ``TokenLikelihoods``.

    Without a window every token sees all before it, at a memory that does not grow with the text (where the model's
    states do not).
    """

    ids: Ids
    """(n + 1,) the end-of-text token, then the text."""
    window: int | None = None
    """Tokens of a window; each window is a separate document."""
    stride: int | None = None
    """Tokens by which windows follow one another, and which each but the first scores; none: the window."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class GenerateUntil:
    """Generate behind ``context``, always the most probable token. Answered by a ``Generation``."""

    context: Ids
    until: tuple[str, ...] = ()
    """Texts at which it stops; they are not part of the answer. The end of the document always stops it."""
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Likelihood:
    """Of a continuation."""

    log_probability: float
    """In nats."""
    is_greedy: bool
    """Whether each of its tokens is the most probable one there."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class TokenLikelihoods:
    """Of each token of a text."""

    log_probability: NDArray[np.float64]
    """(n,) in nats, of ``ids[1:]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A text that the model wrote."""

    text: str
    num_tokens: int


Request = LogLikelihood | RollingLogLikelihood | GenerateUntil
Answer = Likelihood | TokenLikelihoods | Generation


def windows(num_tokens: int, window: int | None, stride: int | None) -> Iterator[tuple[int, int, int]]:
    """(first input, first scored, end) of each window over ``ids`` of ``num_tokens`` + 1: every token is scored once.

    A window feeds ``ids[first input : end - 1]`` and scores ``ids[first scored : end]``.
    """
    if window is None or num_tokens <= window:
        yield 0, 1, num_tokens + 1
        return
    ends = [*range(window + 1, num_tokens + 1, stride or window), num_tokens + 1]
    for scored, end in pairwise([1, *ends]):
        yield max(0, end - 1 - window), scored, end


def num_tokens(request: Request) -> int:
    """Tokens that answering feeds to the model, without shared ones; of a generation its prompt and new tokens."""
    match request:
        case LogLikelihood(context=context, continuation=continuation):
            return len(context) + len(continuation) - 1
        case RollingLogLikelihood(ids=ids, window=window, stride=stride):
            return sum(end - 1 - first for first, _, end in windows(len(ids) - 1, window, stride))
        case GenerateUntil(context=context, max_tokens=most):
            return len(context) + most


def digest(requests: Iterable[Request]) -> str:
    """sha256 of all that is asked."""
    found = hashlib.sha256()
    for request in requests:
        found.update(type(request).__name__.encode())
        for field in fields(request):
            value = getattr(request, field.name)
            data = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
            found.update(b"%d " % len(data) + data)
    return found.hexdigest()


class Encoder:
    """Requests out of text, by the tokenizer of a run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def document(self, text: str) -> Ids:
        """(n + 1,) the end-of-text token, and ``text``."""
        return self.begin(self.tokenizer.encode(text))

    def begin(self, ids: Sequence[int] | NDArray[np.integer]) -> Ids:
        """(n + 1,) the end-of-text token, and ``ids``."""
        return np.concatenate([[self.tokenizer.eot_id], np.asarray(ids)]).astype(np.int32)

    def log_likelihood(self, context: str, continuation: str) -> LogLikelihood:
        """Of ``continuation`` behind ``context``, encoded together: tokens are as in a text that reads so.

        Spaces at the end of the context go to the continuation, as lm-eval has it: most tokenizers put them there.
        """
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before = self.document(context)
        together = self.document(context + continuation)
        if len(together) <= len(before):
            raise UserError(
                f"a continuation must have at least one token; {shortened(repr(continuation), 60)} after "
                f"{shortened(repr(context), 60)} has none"
            )
        return LogLikelihood(context=together[: len(before)], continuation=together[len(before) :])

    def rolling(self, text: str, *, window: int | None = None, stride: int | None = None) -> RollingLogLikelihood:
        """Of each token of ``text``."""
        return RollingLogLikelihood(ids=self.document(text), window=window, stride=stride)

    def generate_until(self, prompt: str, *, until: Sequence[str] = (), max_tokens: int) -> GenerateUntil:
        """The continuation of ``prompt``."""
        return GenerateUntil(context=self.document(prompt), until=tuple(until), max_tokens=max_tokens)
