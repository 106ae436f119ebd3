"""WikiText's pages, and the text that people would have written."""

from pathlib import Path

import numpy as np
import pytest

from lightscale.data_pipeline.tokenizers import train_sentencepiece
from lightscale.errors import UserError
from lightscale.evaluation.inference.requests import Encoder, RollingLogLikelihood, TokenLikelihoods
from lightscale.evaluation.registry import find_tasks
from lightscale.evaluation.tasks.wikitext import detokenized, split_pages

PAGES = [
    " = First Page = \n \n A text , with 1 @,@ 000 words ( or 3 @.@ 5 @-@ fold ) . \n"
    ' \n = = A Section = = \n \n It \'s " so " . \n \n',
    " = Second = \n \n = = = Deep = = = \n \n The end ; of it : all . \n",
]


def test_a_title_begins_a_page() -> None:
    assert split_pages(" \n" + "".join(PAGES)) == PAGES


def test_tokenization_is_undone() -> None:
    first = detokenized(PAGES[0])
    assert "A text, with 1,000 words (or 3.5-fold)." in first
    assert "== A Section ==" in first
    assert 'It\'s "so".' in first
    assert "The end; of it: all." in detokenized(PAGES[1])


def test_signs_that_follow_one_another_are_undone_in_turn() -> None:
    assert detokenized("one . , two") == "one., two"
    assert detokenized("one : ; two") == "one:; two"


def test_words_and_bytes_are_those_of_the_page_as_it_was_found(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "wiki.test.raw").write_text(" \n" + "".join(PAGES), encoding="utf-8")
    (task,) = find_tasks(["wikitext-2"], tmp_path)
    tokenizer = train_sentencepiece([*PAGES, *map(detokenized, PAGES)] * 10, vocab_size=320)
    requests = task.requests(Encoder(tokenizer))
    asked = [request.ids for request in requests if isinstance(request, RollingLogLikelihood)]
    assert [tokenizer.decode(ids[1:].tolist()) for ids in asked] == list(map(detokenized, PAGES))
    # A nat for each token.
    answers = [TokenLikelihoods(log_probability=np.full(len(ids) - 1, -1.0)) for ids in asked]
    scores = task.score(answers)
    # As lm-eval counts: the pages begin and end with white space, and so with a part that is empty.
    words = sum(len(page.split()) + 2 for page in PAGES)
    assert scores.details["words"] == words
    assert scores.details["bytes"] == sum(len(page.encode()) for page in PAGES)
    assert scores.scores["nats_per_token"].value == 1


def test_the_set_with_unknown_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wikitext-103").mkdir()
    (tmp_path / "wikitext-103" / "wiki.test.raw").write_text(PAGES[0].replace("fold", "<unk>"), encoding="utf-8")
    (task,) = find_tasks(["wikitext-103"], tmp_path)
    with pytest.raises(UserError, match="not the raw set"):
        task.requests(Encoder(train_sentencepiece(PAGES * 10, vocab_size=320)))
