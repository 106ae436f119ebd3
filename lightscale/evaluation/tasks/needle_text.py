"""Haystacks, needles, and prompts of both. Without torch.

Prompts are put together from token ids: what stands before a needle is the same ids in all prompts of a haystack, so
that it is run once, and a value has the same ids in the needle and in the answer.
"""

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightscale.evaluation.inference.requests import Ids

Mode = Literal["easy", "standard"]
Encode = Callable[[str], Ids]

_KEYS = """
Accra Athens Bergen Bogota Boston Cairo Chicago Dakar Delhi Denver Dublin Geneva Hanoi Havana Helsinki Istanbul
Jakarta Kyoto Lagos Lima Lisbon London Madrid Manila Milan Montreal Moscow Nairobi Naples Oslo Paris Prague Quito
Riga Rome Seoul Seville Shanghai Sydney Tokyo Toronto Tunis Venice Vienna Warsaw Zagreb Zurich
"""
_WORDS = """
anchor apple arrow basket beacon bell bottle branch bridge bucket butter candle carpet castle chain chair circle
clock cloud coffee copper cotton curtain desert diamond dragon drum eagle engine feather fence finger flower
forest fountain garden glass hammer harbor honey island jacket jungle kettle ladder lantern lemon letter magnet
marble market meadow mirror monkey mountain needle ocean orange paper pencil pepper piano pillow planet pocket
potato rabbit rainbow ribbon river rocket saddle salmon shadow silver spider spoon stone sugar summer table temple
thunder ticket tiger tower tunnel turtle valley velvet violin wagon water whistle window winter wizard yellow
"""
KEYS, WORDS = _KEYS.split(), _WORDS.split()

# A sentence may be cut behind its end; what has none so long, at a space.
_SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s)|(?<=[。！？\n])")
_PART = re.compile(r".{1,400}(?=\s|$)|.{1,400}", re.DOTALL)


@dataclass(frozen=True, eq=False, kw_only=True)
class Haystack:
    """Text that needles are put in."""

    ids: Ids
    """(n,)"""
    places: Ids
    """Where a needle may stand: before these tokens a sentence begins. The first is 0."""
    repeats: int
    """How often the text was begun."""

    def place(self, position: int) -> int:
        """The last place that is not behind ``position``: a needle moves back to the beginning of a sentence."""
        return int(self.places[np.searchsorted(self.places, position, side="right") - 1])


def haystack(texts: Callable[[], Iterable[str]], encode: Encode, num_tokens: int) -> Haystack:
    """``texts`` one behind the other up to ``num_tokens``; again from the first where they are shorter."""
    ids: list[Ids] = []
    places, total, repeats = [0], 0, 0
    while total < num_tokens:
        repeats += 1
        for text in texts():
            for sentence in _SENTENCE_END.split(text.rstrip() + "\n\n"):
                for part in _PART.findall(sentence):
                    ids.append(encode(part))
                    total += len(ids[-1])
                    places.append(total)
            if total >= num_tokens:
                break
        assert total, "a text without a token"
    together = np.concatenate(ids)[:num_tokens]
    allowed = np.unique(np.array(places, dtype=np.int32))
    return Haystack(ids=together, places=allowed[allowed <= num_tokens], repeats=repeats)


@dataclass(frozen=True, kw_only=True)
class Wording:
    """How needles read, and how they are asked for."""

    mode: Mode
    question: str
    """With {key}; the answer follows."""
    answer: str
    """With {key} and, behind it, {value}."""

    def needle(self) -> str:
        """The needle in the haystack: question and answer in easy mode, the answer in standard mode."""
        return self.question + self.answer if self.mode == "easy" else self.answer

    def asked(self) -> str:
        """The end of a prompt: the question, and the answer up to its value."""
        return self.question + self.answer.partition("{value}")[0].rstrip(" ")


@dataclass(frozen=True, eq=False, kw_only=True)
class Needle:
    """A value to retrieve by its key."""

    text: str
    """As it stands in the haystack."""
    ids: Ids
    asked: Ids
    """The end of the prompt."""
    words: tuple[str, ...]
    """The right value."""
    answer: tuple[Ids, ...]
    """Of each word."""
    distractors: tuple[Ids, ...]
    """Other values."""

    @property
    def num_tokens(self) -> int:
        """The parts of a prompt beside the haystack, and the answer."""
        return len(self.ids) + len(self.asked) + sum(map(len, self.answer))


def make_needle(
    wording: Wording,
    encode: Encode,
    *,
    keys: list[str],
    words: list[str],
    answer_words: int,
    distractors: int,
    seed: str,
) -> Needle:
    """The needle of ``seed``: the same always."""
    drawn = random.Random(seed)
    key = drawn.choice(keys)
    values: dict[tuple[str, ...], None] = {}
    while len(values) <= distractors:
        values[tuple(drawn.sample(words, answer_words))] = None
    before, _, behind = wording.needle().replace("{key}", key).partition("{value}")
    # Most tokenizers have a space at the beginning of words.
    space = " " if before.endswith(" ") else ""

    def encoded(value: tuple[str, ...]) -> tuple[Ids, ...]:
        return tuple(encode((" " if number else space) + word) for number, word in enumerate(value))

    right, *others = values
    answer = encoded(right)
    return Needle(
        text=f"{before}{' '.join(right)}{behind}",
        ids=np.concatenate([encode(before.rstrip(" ")), *answer, encode(behind)]),
        asked=encode(wording.asked().replace("{key}", key)),
        words=right,
        answer=answer,
        distractors=tuple(np.concatenate(encoded(other)) for other in others),
    )


def prompt(hay: Haystack, needle: Needle, *, begin: int, position: int, room: int) -> Ids:
    """The id ``begin``, ``room`` tokens of ``hay`` with ``needle`` at or before ``position`` of them, the question."""
    place = hay.place(position)
    return np.concatenate([[begin], hay.ids[:place], needle.ids, hay.ids[place:room], needle.asked]).astype(np.int32)
