"""How near a written answer comes to the right ones: exact match and F1 of words, and ROUGE for summaries.

Answers are compared as in SQuAD (Rajpurkar et al., 2016): in lower case, without punctuation and articles.
"""

import importlib
import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
ROUGE = ("rouge1", "rouge2", "rougeL")
"""Of Lin (2004): shared words, shared pairs of words, longest common subsequence."""


def words_of(answer: str) -> list[str]:
    """The compared form of an answer."""
    return _ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer is one of ``references``, else 0."""
    return float(any(words_of(answer) == words_of(one) for one in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of the answer's words, for the reference that gives most."""
    return max(_f1(words_of(answer), words_of(one)) for one in references)


def _f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    shared = sum((Counter(answer) & Counter(reference)).values())
    # Two answers without a word, such as "the", are the same.
    return 2 * shared / (len(answer) + len(reference)) if answer or reference else 1.0


def rouge(answer: str, references: Sequence[str]) -> dict[str, float]:
    """F-measures of ``ROUGE``, with stemming, by the package rouge-score; each for the reference that gives most."""
    scorer = importlib.import_module("rouge_score.rouge_scorer").RougeScorer(list(ROUGE), use_stemmer=True)
    found = [scorer.score(reference, answer) for reference in references]
    return {name: max(one[name].fmeasure for one in found) for name in ROUGE}
