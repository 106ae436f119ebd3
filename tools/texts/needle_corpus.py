"""Text on which a small model learns to find needles: ``python tools/texts/needle_corpus.py data/needles``.

Writes FOLDER/store, on which `configs/needle-tiny.toml` trains, and for `lightscale evaluate` FOLDER/haystack.txt,
easy.toml and standard.toml.

A document has sentences of filler, facts, and questions about facts that were there before:

    " mi tu fo ri. ev 32 17. zi le po za. oz 63 56.\\n? ev 32 17. pu ka.\\n? oz 63 56."

Only the values behind questions are labels that count. Recall is learnt where there is much of it to be seen: of the
documents some are nothing but facts and questions, others nearly all filler, and there are many short ones.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightscale.data_pipeline.store.format import Split
from lightscale.data_pipeline.store.token_store import StoreWriter
from lightscale.data_pipeline.tokenizers import Tokenizer, train_sentencepiece
from lightscale.errors import UserError

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
FILLER = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
KEYS = [vowel + consonant for consonant in _CONSONANTS for vowel in _VOWELS]
VALUES = [str(number) for number in range(10, 100)]
VOCAB_SIZE = 560
"""Of the smallest tokenizer in which each of these words is one token, and some more."""
ANSWER_WORDS = 2
FILLER_SHARES = (0.0, 0.3, 0.6, 0.9)
"""Of what stands in a document."""
_MOST_FACTS = 24
_EXIT_MISTAKE = 2
_SHORTEST = 32
_VALIDATION_TOKENS = 100_000
_HAYSTACK_WORDS = 4096

TASK = """\
# Made by tools/texts/needle_corpus.py: needles in the language of data/needles.
kind = "needles"
mode = "{mode}"
paths = ["haystack.txt"]
lengths = [32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024]
depths = 11
samples = 4
question = "\\n?"
answer = " {{key}} {{value}}."
keys = {keys}
words = {words}
answer_words = {answer_words}
"""


class Part(NamedTuple):
    """Of a document's text."""

    text: str
    counts: bool
    """Whether it is a label that counts: the value behind a question."""


def document(drawn: random.Random, num_tokens: int) -> list[Part]:
    """About ``num_tokens`` tokens of text, one for each word and each sign."""
    share = drawn.choice(FILLER_SHARES)
    keys = drawn.sample(KEYS, min(len(KEYS), _MOST_FACTS))
    facts: dict[str, str] = {}
    parts: list[Part] = []

    def ask() -> None:
        key = drawn.choice(list(facts))
        parts.extend([Part(f"\n? {key}", False), Part(facts[key], True), Part(".", False)])

    length = 0
    while length < num_tokens - 12:
        kind = drawn.random()
        if facts and kind < share:
            num_words = drawn.randint(2, 11)
            parts.append(Part(sentence(drawn, num_words), False))
            length += num_words + 1
        elif not facts or (len(facts) < len(keys) and drawn.random() < 0.35):
            key = keys[len(facts)]
            facts[key] = "".join(f" {value}" for value in drawn.choices(VALUES, k=ANSWER_WORDS))
            # As needles stand in the haystack in standard mode, and in easy mode.
            parts.append(Part(drawn.choice((f" {key}", f"\n? {key}")) + facts[key] + ".", False))
            length += 5
        else:
            ask()
            length += 6
    ask()
    return parts


def sentence(drawn: random.Random, num_words: int) -> str:
    """Of filler."""
    return "".join(f" {word}" for word in drawn.choices(FILLER, k=num_words)) + "."


def make_tokenizer() -> Tokenizer:
    """A token for each word and sign."""
    return train_sentencepiece([f" {word} . ? \n" for word in (*FILLER, *KEYS, *VALUES)] * 20, vocab_size=VOCAB_SIZE)


def documents(seed: str, num_tokens: int, longest: int) -> Iterator[list[Part]]:
    """About ``num_tokens`` in all, of which as many are in documents of 32 to 64 tokens as of 64 to 128, and so on."""
    drawn = random.Random(seed)
    left = num_tokens
    while left > 0:
        length = int(1 / drawn.uniform(1 / longest, 1 / _SHORTEST))
        yield document(drawn, length)
        left -= length


def write_store(path: Path, tokenizer: Tokenizer, *, seed: int, tokens: int, longest: int) -> None:
    """The sources `needles` and `needles-validation`. UserError where ``path`` is there already."""
    with StoreWriter(path, tokenizer) as writer:
        sources: list[tuple[str, Split, int]] = [
            ("needles", "train", tokens),
            ("needles-validation", "validation", _VALIDATION_TOKENS),
        ]
        for name, split, num_tokens in sources:
            source = writer.source(name, split, has_loss_mask=True)
            for parts in documents(f"{seed} {name}", num_tokens, longest):
                ids = [tokenizer.encode(part.text) for part in parts]
                mask = np.concatenate([np.full(len(one), part.counts) for one, part in zip(ids, parts, strict=True)])
                num_bytes = sum(len(part.text.encode()) for part in parts)
                source.append(np.concatenate(ids), num_bytes=num_bytes, loss_mask=mask.astype(np.uint8))
        writer.finish({"made by": "tools/texts/needle_corpus.py", "seed": seed, "longest": longest})


def write_tasks(folder: Path, *, seed: int) -> None:
    """The haystack, and a task file for each mode."""
    drawn = random.Random(f"{seed} haystack")
    words = [sentence(drawn, drawn.randint(2, 11)) for _ in range(_HAYSTACK_WORDS // 6)]
    (folder / "haystack.txt").write_text("".join(words), encoding="utf-8")
    lists = {"keys": json.dumps(KEYS), "words": json.dumps(VALUES), "answer_words": ANSWER_WORDS}
    for mode in ("easy", "standard"):
        (folder / f"{mode}.toml").write_text(TASK.format(mode=mode, **lists), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all of it; 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(prog="needle_corpus.py", description="Write training text for needle tasks.")
    parser.add_argument("folder", type=Path, help="output folder; the store in it must not exist")
    parser.add_argument("--tokens", type=float, default=2.5e6, help="tokens of training text (default: 2.5e6)")
    parser.add_argument("--longest", type=int, default=256, help="longest document in tokens (default: 256)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the text (default: 0)")
    args = parser.parse_args(arguments)
    if args.longest < _SHORTEST or args.tokens < args.longest:
        print(f"error: --longest must be at least {_SHORTEST}, and --tokens at least --longest", file=sys.stderr)
        return _EXIT_MISTAKE
    try:
        write_store(
            args.folder / "store", make_tokenizer(), seed=args.seed, tokens=int(args.tokens), longest=args.longest
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_MISTAKE
    write_tasks(args.folder, seed=args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
