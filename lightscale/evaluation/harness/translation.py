"""lm-eval's requests as ours, and our answers as lm-eval's. Without lm-eval."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightscale.errors import UserError, shortened
from lightscale.evaluation.inference.requests import (
    Answer,
    Encoder,
    Generation,
    Likelihood,
    Request,
    TokenLikelihoods,
)

GENERATED_TOKENS = 256
"""Maximum of generated tokens if a task sets none; lm-eval's number."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_IGNORED = {"do_sample", "temperature", "until", *_LENGTHS}


class HarnessRequest(NamedTuple):
    """One request of lm-eval."""

    kind: str
    """The method of the model that is called: see ``request_of``."""
    arguments: tuple[Any, ...]

    @property
    def key(self) -> str:
        """The same for the same request."""
        return json.dumps([self.kind, *self.arguments], default=str)


def request_of(kind: str, arguments: Sequence[Any], encoder: Encoder, *, window: int | None = None) -> Request:
    """The request of lm-eval's method ``kind``.

    Args:
        kind: "loglikelihood", "loglikelihood_rolling" or "generate_until".
        arguments: (context, continuation), (text,) or (context, generation arguments).
        encoder: of the model's tokenizer.
        window: tokens fed at once of a text whose every token is scored. None: all of it, however long.

    Raises:
        Raises UserError for a request with pictures or sounds, or one that samples at random.
    """
    if kind == "loglikelihood_rolling":
        return encoder.rolling(str(arguments[0]), window=window)
    if len(arguments) != 2:
        raise UserError("the task has images or audio in its prompts; only text is supported")
    context, wanted = arguments
    if kind == "loglikelihood":
        return encoder.log_likelihood(context, wanted)
    assert kind == "generate_until", f"lm-eval request {kind!r} is not supported"
    until, max_tokens = generation_arguments(wanted)
    return encoder.generate_until(context, until=until, max_tokens=max_tokens)


def generation_arguments(wanted: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """(texts at which it stops, most tokens) of lm-eval's `generation_kwargs`.

    Raises:
        Raises UserError for sampling, because generation is greedy here, and for an unknown argument.
    """
    if wanted.get("do_sample") or (wanted.get("do_sample") is None and float(wanted.get("temperature") or 0) > 0):
        raise UserError(
            f"the task samples its text at random ({shortened(str(dict(wanted)), 120)}); lightscale answers only with "
            "the most probable text: set do_sample to false"
        )
    # Beams and penalties would give another text; those that only shape a draw have no effect on a greedy one.
    unknown = sorted(wanted.keys() - _IGNORED - {"top_p", "top_k"})
    if unknown:
        raise UserError(f"the task generates with {', '.join(unknown)}; supported: {', '.join(sorted(_IGNORED))}")
    until = wanted.get("until") or ()
    length = next((wanted[name] for name in _LENGTHS if wanted.get(name) is not None), GENERATED_TOKENS)
    return (until,) if isinstance(until, str) else tuple(until), int(length)


def answered(answer: Answer) -> tuple[float, bool] | float | str:
    """As lm-eval's methods return it."""
    match answer:
        case Likelihood(log_probability=log_probability, is_greedy=is_greedy):
            return log_probability, is_greedy
        case TokenLikelihoods(log_probability=values):
            return float(values.sum())
        case Generation(text=text):
            return text
