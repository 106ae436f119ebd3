"""WikiText's raw test sets: pages, their tokenization undone, perplexity by the words of the page as it was found.

The same as lm-eval's `wikitext`; papers print its word perplexity.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightscale.errors import UserError
from lightscale.evaluation.tasks.perplexity import DEFINITIONS, Perplexity, PerplexitySettings

# " = Title = " begins a page, " = = Section = = " does not.
_TITLE = re.compile(r"^ = (?!= ).*(?<! =) = ?$", re.MULTILINE)

# What the data set's makers put between and around signs, undone one after the other, as lm-eval does.
_RULES: tuple[tuple[str, str], ...] = (
    (r"s '", "s'"),
    # As lm-eval has it, to the letter.
    (r"/' [0-9]/", r"/'[0-9]/"),
    # One sign after the other: what one leaves may be what the next one takes.
    *((f" @{re.escape(sign)}@ ", sign) for sign in "-,."),
    *((f" {re.escape(sign)} ", f"{sign} ") for sign in ":;.!?,"),
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"\{\s*([^}]*?)\s*\}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (" " + chr(176) + " ", chr(176)),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)


class WikiTextSettings(PerplexitySettings):
    """The keys of `perplexity`, and one more."""

    detokenize: bool = True
    """Feed the text as people write it; words and bytes are counted in the text as it was found all the same."""


class WikiText(Perplexity):
    """Perplexity of the pages of wiki.test.raw, or of parquet files of its lines or pages."""

    Settings = WikiTextSettings
    settings: WikiTextSettings
    version = 2

    def num_words(self, text: str) -> int:
        """As lm-eval counts them: also the nothing before the first space of a page and behind its last."""
        return len(re.split(r"\s+", text))

    def definitions(self) -> dict[str, str]:
        """Of the scores."""
        words = (
            "exp(nats / words); words are as lm-eval counts them in its `wikitext`: parts between white space of the "
        )
        return DEFINITIONS | {"word_perplexity": words + "page as it was found, the empty ones at its ends included"}

    def records(self, path: Path, documents: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        """(page as people write it, page as it was found)."""
        # Of parquet files every row is a line, which brings its newline along.
        whole = "".join(document[self.settings.text_field if len(document) > 1 else "text"] for document in documents)
        if "<unk>" in whole:
            raise UserError(
                f"{path}: contains <unk>: this is not the raw set, and its perplexity is not comparable; use the raw "
                "set"
            )
        pages = split_pages(whole)
        if not pages:
            raise UserError(f"{path}: no page found: no line like ' = Title = '; the file may be damaged")
        for page in pages:
            yield detokenized(page) if self.settings.detokenize else page, page


def split_pages(text: str) -> list[str]:
    """The pages of a WikiText file, each from its title on."""
    starts = [match.start() for match in _TITLE.finditer(text)]
    return [text[start:stop] for start, stop in zip(starts, [*starts[1:], len(text)], strict=True)]


def detokenized(text: str) -> str:
    """``text`` without the spaces and marks that tokenization added."""
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    return text
