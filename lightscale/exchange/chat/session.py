"""A conversation with a model, whose states are kept from turn to turn: a turn costs its own tokens.

session = lightscale.load("runs/talk").chat(system="Answer in one word.")
session.ask("Capital of France?"); session.ask("And of Italy?"); session.undo()
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from lightscale.data_pipeline.chat.shapes import ASSISTANT, SYSTEM, USER
from lightscale.data_pipeline.tokenizers import Tokenizer
from lightscale.errors import UserError
from lightscale.evaluation.inference.prompts import Sampling, seed_of
from lightscale.evaluation.inference.sampling import Chooser, choose
from lightscale.evaluation.inference.written_text import WrittenText
from lightscale.exchange.chat.markup import Markup, Message

if TYPE_CHECKING:
    from torch import Tensor

    from lightscale.exchange.plain.mixers import State

TOKENS = 512
"""Most tokens of an answer."""
Ended = Literal["end_of_turn", "tokens", "context", "interrupted"]
_OPEN = "\ufffd"


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """A conversation as the model has read it."""

    messages: tuple[Message, ...]
    text: str = ""
    """Read or written. Longer conversations begin with it, unless their template changes earlier messages."""
    states: "list[State] | None" = None
    unread: tuple[int, ...]
    """The last tokens of ``text``, which the states lack."""
    num_tokens: int = 0
    """Tokens that the states have read."""
    seen: frozenset[int] = frozenset()
    """Ids of its tokens, for the penalty for repetition."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer, and what it took."""

    text: str
    ended: Ended
    num_read: int
    """Tokens that the model read before the first one of the answer."""
    num_written: int
    reads_again: bool
    """Whether the whole conversation was read, because the template has changed what was read before."""


class ChatModel(Protocol):
    """What a conversation needs of a model: a ``TextModel`` has it."""

    @property
    def origin(self) -> str:
        """Its run or export, for messages."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    def feed(self, ids: Sequence[int], states: "list[State] | None") -> "tuple[Tensor, list[State]]":
        """Read ``ids`` behind ``states`` (None: a document begins); logits (V,) of the next token, and the states."""


class ChatSession:
    """A conversation.

    Args:
        model: from ``lightscale.load``.
        markup: its template and tokenizer.
        system: message of the system; none: no such message.
        context: most tokens of the conversation; None: any number.
    """

    def __init__(
        self, model: ChatModel, markup: Markup, *, system: str | None = None, context: int | None = None
    ) -> None:
        self._model, self._markup = model, markup
        self._context = context
        messages = () if system is None else ({"role": SYSTEM, "content": system},)
        self._now = self._unread(messages)
        self._before = list[_Memory]()
        self.last: Answer | None = None
        """The newest answer."""

    @property
    def messages(self) -> list[Message]:
        """All messages so far, that of the system included."""
        return list(self._now.messages)

    def ask(self, text: str, *, tokens: int = TOKENS, sampling: Sampling | None = None) -> str:
        """The answer to ``text``; arguments as for ``stream``."""
        for _ in self.stream(text, tokens=tokens, sampling=sampling):
            pass
        assert self.last is not None
        return self.last.text

    def stream(self, text: str, *, tokens: int = TOKENS, sampling: Sampling | None = None) -> Iterator[str]:
        """Answer ``text`` in parts: for each token the part of the answer that is final now, which can be empty.

        Closing the iterator ends the answer, and the conversation goes on behind it.

        Args:
            text: message of the user.
            tokens: most tokens of the answer.
            sampling: none for ``Sampling()``. Each turn has a seed of its own, made of this one.

        Raises:
            UserError: the template refuses the message, or the context has no room for an answer. The conversation
                stays as it was.
        """
        if tokens < 1:
            raise UserError(f"tokens = {tokens}: must be at least 1")
        messages = (*self._now.messages, {"role": USER, "content": text})
        prompt = self._markup.prompt(messages)
        reads_again = not prompt.startswith(self._now.text)
        begin = self._unread(messages) if reads_again else self._now
        unread = (*begin.unread, *self._markup.ids(messages, prompt, behind=len(begin.text)))
        length = begin.num_tokens + len(unread)
        if self._context is not None and length >= self._context:
            raise UserError(
                f"the conversation has {length:,} tokens with this message, and {self._model.origin} a context of "
                f"{self._context:,}; undo the last turn, or begin another conversation"
            )
        sampling = sampling or Sampling()
        turn = sum(message["role"] == USER for message in self._now.messages)
        work = _Answering(
            self._model,
            self._markup,
            replace(begin, messages=messages, text=prompt, unread=unread, seen=begin.seen | {*unread}),
            tokens=tokens,
            room=None if self._context is None else self._context - length,
            sampling=replace(sampling, seed=seed_of(sampling.seed, turn)),
        )
        return self._parts(work, reads_again=reads_again)

    def undo(self) -> bool:
        """Take back the last turn; whether there was one."""
        if self._before:
            self._now = self._before.pop()
            return True
        return False

    def _parts(self, work: "_Answering", *, reads_again: bool) -> Iterator[str]:
        while work.ended is None:
            # An error or an interruption in here leaves the conversation as it was.
            part = work.step()
            try:
                yield part
            except GeneratorExit:
                break
        text, memory = work.finished()
        self.last = Answer(
            text=text,
            ended=work.ended or "interrupted",
            num_read=len(work.begin.unread),
            num_written=len(work.ids),
            reads_again=reads_again,
        )
        # The states before the last turn alone are kept: memory does not grow with the number of turns.
        self._before = [*(self._unread(one.messages) for one in self._before), self._now]
        self._now = memory

    def _unread(self, messages: tuple[Message, ...]) -> _Memory:
        """A conversation of which nothing is read."""
        return _Memory(messages=messages, unread=(self._model.tokenizer.eot_id,))


class _Answering:
    """An answer that is being written, behind what ``begin`` has in ``unread``."""

    def __init__(
        self,
        model: ChatModel,
        markup: Markup,
        begin: _Memory,
        *,
        tokens: int,
        room: int | None,
        sampling: Sampling,
    ) -> None:
        self._model, self._markup, self.begin = model, markup, begin
        self._most, self._is_short = (room, True) if room is not None and room < tokens else (tokens, False)
        self._chooser = Chooser(sampling, sorted(begin.seen))
        self._written = WrittenText(markup, markup.stop)
        self._states, self._unread = begin.states, list(begin.unread)
        self.ids: list[int] = []
        """Of the answer, with its end marker."""
        self.ended: Ended | None = None
        """None: it is being written."""

    def step(self) -> str:
        """Write one token; the part of the text that is final now."""
        logits, self._states = self._model.feed(self._unread, self._states)
        (token,) = choose(logits[None], [self._chooser])
        is_end = token in self._markup.end_ids
        if token == self._model.tokenizer.eot_id and not is_end:
            # It ends the document, and has no place inside of one.
            self._unread, self.ended = [], "end_of_turn"
            return self._rest()
        self._unread = [token]
        self.ids.append(token)
        if is_end:
            self.ended = "end_of_turn"
            return self._rest()
        part = self._written.add(token)
        if self._written.stopped_by is not None:
            self.ended = "end_of_turn"
        elif len(self.ids) == self._most:
            self.ended = "context" if self._is_short else "tokens"
            return part + self._rest()
        return part

    def finished(self) -> tuple[str, _Memory]:
        """Text of the answer, and the conversation with it."""
        if self.ended is None:
            self._rest()
        text = self._text()
        begin = self.begin
        return text, _Memory(
            messages=(*begin.messages, {"role": ASSISTANT, "content": text}),
            text=begin.text + self._markup.decode(self.ids),
            states=self._states,
            unread=tuple(self._unread),
            num_tokens=begin.num_tokens + len(begin.unread) + len(self.ids) - len(self._unread),
            seen=begin.seen | {*self.ids},
        )

    def _rest(self) -> str:
        return self._written.finish().rstrip(_OPEN)

    def _text(self) -> str:
        # An incomplete character belongs to no message: without it the next turn reads the conversation again.
        return self._written.text.rstrip(_OPEN)
