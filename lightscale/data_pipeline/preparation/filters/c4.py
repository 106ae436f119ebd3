"""C4's filter (arXiv 1910.10683, rules of its code): removes lines, and drops documents that become too small."""

import re

from lightscale.config.section import CountOrZero, Section
from lightscale.data_pipeline.preparation.filters.field_words import num_sentences
from lightscale.data_pipeline.preparation.filters.judgement import Judgement

LINES_REMOVED, CITATIONS_REMOVED = "c4: line removed", "c4: citation mark removed"
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_ENDS = (".", "?", "!", '"', "'")
_POLICIES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)


class C4Filter(Section):
    """Limits of C4's filter; a document that it keeps has only the lines that pass, without spaces around them."""

    terminal_punctuation: bool = True
    """Remove lines that do not end with . ? ! or a quotation mark, or end with an ellipsis."""
    min_words: CountOrZero = 3
    """Remove lines with fewer words, separated by spaces."""
    max_word_length: CountOrZero = 1000
    """Remove lines with a longer word."""
    min_sentences: CountOrZero = 5
    """Drop documents with fewer sentences in the remaining lines."""

    def judge(self, text: str) -> Judgement:
        """See ``Step``."""
        kept: list[str] = []
        sentences = citations = 0
        lines = text.splitlines()
        for line in map(str.strip, lines):
            words = line.split()
            if any(len(word) > self.max_word_length for word in words):
                continue
            line, removed = _CITATION.subn("", line)
            if self.terminal_punctuation and (not line.endswith(_ENDS) or line.endswith("...")):
                continue
            if len(words) < self.min_words:
                continue
            lower = line.lower()
            if "lorem ipsum" in lower:
                return Judgement(text, rule="lorem_ipsum")
            if "javascript" in lower:
                continue
            if "{" in line:
                return Judgement(text, rule="curly_bracket")
            if any(policy in lower for policy in _POLICIES):
                continue
            sentences += num_sentences(line)
            citations += removed
            kept.append(line)
        if sentences < self.min_sentences:
            return Judgement(text, rule="sentences", score=sentences)
        changes = {LINES_REMOVED: len(lines) - len(kept), CITATIONS_REMOVED: citations}
        return Judgement("\n".join(kept).strip(), changes={name: times for name, times in changes.items() if times})
