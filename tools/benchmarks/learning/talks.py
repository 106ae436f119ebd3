"""Conversations with answers that can be checked: sums, prices in a list, words as JSON; a tokenizer of digits."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

_FOOD = """
apple bread cake egg fig ham jam kiwi lime milk nut oil pear rice salt tea
bean beef beet bun corn crab date dill fish flour grape honey leek lemon mango melon
mint olive onion pasta peach plum pork rye sage soup tofu tuna veal wheat wine yam
"""
WORDS = _FOOD.split()
SOLD = WORDS[:16]
"""Those with a price."""
KINDS = ("sum", "list", "format")
VOCAB_SIZE = 512
_HELD_OUT = 10
"""Of a hundred questions, those that only held-out conversations have."""


def is_held_out(question: str) -> bool:
    """Whether ``question`` is asked in held-out conversations alone; by its text, so that both sides agree."""
    return random.Random(question).randrange(100) < _HELD_OUT


def asked(draw: random.Random, kind: str) -> tuple[str, str]:
    """A question of ``kind``, and its right answer."""
    if kind == "sum":
        a, b = draw.randint(0, 99), draw.randint(0, 9)
        return f"What is {a} + {b}?", f"{a} + {b} = {a + b}."
    if kind == "list":
        prices = {word: draw.randint(10, 99) for word in draw.sample(SOLD, 3)}
        word = draw.choice(list(prices))
        listed = ", ".join(f"{name} {price}" for name, price in prices.items())
        return f"Prices: {listed}. How much is {word}?", f"{word.capitalize()} costs {prices[word]}."
    first, second = draw.sample(WORDS, 2)
    return f"Write {first} and {second} as JSON.", json.dumps([first, second])


def talks(count: int, *, seed: int, held_out: bool) -> Iterator[list[tuple[str, str, str]]]:
    """``count`` conversations of one to three turns: (kind, question, answer) each."""
    draw = random.Random(seed)
    for _ in range(count):
        turns: list[tuple[str, str, str]] = []
        wanted = draw.randint(1, 3)
        while len(turns) < wanted:
            kind = draw.choice(KINDS)
            question, answer = asked(draw, kind)
            if is_held_out(question) == held_out:
                turns.append((kind, question, answer))
        yield turns


def messages(turns: list[tuple[str, str, str]]) -> dict[str, Any]:
    """As a line of a file of conversations."""
    found = []
    for _, question, answer in turns:
        found += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": found}


def write_corpora(folder: Path, count: int) -> None:
    """``count`` conversations, and a tokenizer of the reference pages of Python's ``help()``."""
    # An extra: `bench.py` starts on machines without it.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    lines = [json.dumps(messages(turns)) for turns in talks(count, seed=1, held_out=False)]
    (folder / "talks.jsonl").write_text("\n".join(lines), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    # A number is its digits, as a sum is made of them.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
