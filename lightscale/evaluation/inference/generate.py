"""Text from a model: many prompts at once, one token of each at a time, in the recurrent form."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.evaluation.inference.documents import Documents
from lightscale.evaluation.inference.prompts import Prompt, Sampling
from lightscale.evaluation.inference.sampling import Chooser, choose
from lightscale.evaluation.inference.shared_prefixes import SharedPrefixes
from lightscale.evaluation.inference.written_text import WrittenText
from lightscale.models.language_model import LanguageModel

BATCH = 32
"""Documents that are written at once."""
_MOST_ROOM = 2048
"""Tokens that states which grow have room for at first: texts may end long before all that were asked for."""
Ended = Literal["end_of_text", "stop", "tokens"]
"""Why a text ends: the model ended it, a stop string came, or the tokens asked for were written."""


class Continuation:
    """The text that a model has generated behind a prompt so far."""

    def __init__(self, number: int, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self.number, self.prompt = number, prompt
        self.ids: list[int] = []
        """Without the end-of-text token that ends a text; with the tokens of a stop string."""
        self.times_s: list[float] = []
        """When each came, by time.perf_counter."""
        self.ended: Ended | None = None
        """None while it is being written."""
        self._written = WrittenText(tokenizer, prompt.stop)
        self._eot_id = tokenizer.eot_id

    @property
    def text(self) -> str:
        """The text up to the stop string; during generation its final part."""
        return self._written.text

    @property
    def stopped_by(self) -> str | None:
        """The stop string at which it ended."""
        return self._written.stopped_by

    def add(self, token: int) -> str:
        """Take the next token, and give the text that is certain now."""
        if token == self._eot_id:
            self.ended = "end_of_text"
            return self._written.finish()
        self.ids.append(token)
        self.times_s.append(time.perf_counter())
        part = self._written.add(token)
        if self.stopped_by is None and len(self.ids) == self.prompt.max_tokens:
            self.ended = "tokens"
            part += self._written.finish()
        if self.stopped_by is not None:
            self.ended = "stop"
        return part


class TextGenerator:
    """A model that continues prompts. No text depends on the other texts of the batch.

    Collective over the tensor ranks of ``model``: each gives the same prompts and gets the same texts.

    Args:
        model: in evaluation mode, with all layers on this rank.
        tokenizer: the one that the model was trained with.
        batch: prompts that are continued at once; another begins as soon as one has ended.
        least_shared: tokens that prompts must have in common for them to be run once; None: nothing is shared, and
            prompts are begun in their order.
        advance: called after each pass.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        batch: int = BATCH,
        least_shared: int | None = None,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        assert batch > 0, "a batch has a prompt"
        self.model, self.tokenizer, self.batch, self._advance = model, tokenizer, batch, advance
        self._least_shared = least_shared
        self.run_tokens = 0
        """Tokens that have passed through the model, fillers included."""

    def write(self, prompts: Iterable[Prompt]) -> Iterator[tuple[Continuation, str]]:
        """Each token as it is generated: the number of its text, and the part of the text that became final.

        Texts are numbered as their prompts, and end in any order.
        """
        every = [Continuation(number, prompt, self.tokenizer) for number, prompt in enumerate(prompts)]
        ids = [np.asarray(one.prompt.ids, dtype=np.int32) for one in every]
        prefixes = SharedPrefixes(self.model, ids, least_shared=self._least_shared)
        waiting = deque(every[number] for number in prefixes.order)
        documents, active = Documents(self.model), list[Continuation]()
        choosers: list[Chooser] = []
        before = self.run_tokens
        while waiting or active:
            kept = [row for row, one in enumerate(active) if one.ended is None]
            if len(kept) < len(active):
                documents.keep(kept)
                active, choosers = [active[row] for row in kept], [choosers[row] for row in kept]
            logits = [documents.feed([[one.ids[-1]] for one in active])] if active else []
            new = [waiting.popleft() for _ in range(min(len(waiting), self.batch - len(active)))]
            for prefix, group in itertools.groupby(new, key=lambda one: prefixes.behind(one.number)):
                alike = list(group)
                logits.append(_begin(documents, prefix, alike))
                active += alike
                choosers += [Chooser(one.prompt.sampling, one.prompt.ids) for one in alike]
            tokens: list[int] = []
            for part in logits:
                tokens += choose(part, choosers[len(tokens) : len(tokens) + len(part)])
            self._advance()
            self.run_tokens = before + documents.run_tokens + prefixes.run_tokens
            for one, token in zip(active, tokens, strict=True):
                yield one, one.add(token)


def _begin(documents: Documents, prefix: Documents | None, new: Sequence[Continuation]) -> Tensor:
    """The logits behind the prompts of ``new``, which begin with what ``prefix`` has read; they join ``documents``."""
    room = min(_MOST_ROOM, max(one.prompt.max_tokens for one in new))
    if prefix is None:
        return documents.begin([one.prompt.ids for one in new], room=room)
    (shared,) = prefix.positions
    return documents.begin_behind(prefix, [one.prompt.ids[shared:] for one in new], room=room)


def in_order(generator: TextGenerator, prompts: Sequence[Prompt]) -> Iterator[Continuation]:
    """The continuations of ``prompts`` in their order, each as soon as it and those before it have ended."""
    ended: dict[int, Continuation] = {}
    following = 0
    for one, _ in generator.write(prompts):
        if one.ended is not None:
            ended[one.number] = one
        while following in ended:
            yield ended.pop(following)
            following += 1


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int = 200,
    sampling: Sampling | None = None,
) -> Iterator[int]:
    """Yield the tokens with which ``model`` continues one document.

    Args:
        model: in evaluation mode, whole on this process or on its tensor ranks.
        tokenizer: the one that the model was trained with.
        prompt_ids: the document so far, its end-of-text token in front; see ``encode_prompt``.
        max_tokens: tokens at most; fewer where the model ends the text. The end-of-text token is not among them.
        sampling: none for ``Sampling()``. The same seed gives the same tokens on the same machine.
    """
    prompt = Prompt(ids=prompt_ids, max_tokens=max_tokens, sampling=sampling or Sampling())
    written = TextGenerator(model, tokenizer).write([prompt])
    return (one.ids[-1] for one, _ in written if one.ended != "end_of_text")
