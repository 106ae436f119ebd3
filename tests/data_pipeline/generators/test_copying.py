"""The copying task: strings twice, the second one counts, the same store for the same seed."""

import json
from pathlib import Path

import numpy as np
import pytest

from lightscale.cli import main
from lightscale.data_pipeline.generators.copying import Copying
from lightscale.data_pipeline.generators.write import write_made_store
from lightscale.data_pipeline.store.token_store import TokenStore
from lightscale.data_pipeline.tokenizers import load_tokenizer
from lightscale.errors import UserError


def test_documents_are_strings_twice() -> None:
    generator, lengths, seen = Copying(min_length=2, max_length=5, symbols=12), set(), set()
    for number in range(200):
        made = generator.document(7, "train", number)
        begin, *symbols = made.text.split()
        middle = symbols.index("[SEP]")
        assert begin == "[BOS]" and symbols[:middle] == symbols[middle + 1 :]
        lengths.add(middle)
        seen |= {*map(int, symbols[:middle])}
        assert made.counts is not None and made.counts.tolist() == [0] * (middle + 2) + [1] * middle
        ids = generator.tokenizer().encode(made.text)
        # One token for each symbol, none of them a byte.
        assert len(ids) == 2 * middle + 2 and min(ids) >= 256
    assert lengths == {2, 3, 4, 5} and seen == set(range(12))
    assert generator.document(7, "train", 3).text == generator.document(7, "train", 3).text
    assert generator.document(8, "train", 3).text != generator.document(7, "train", 3).text


def test_the_store_counts_the_second_string_and_its_end(tmp_path: Path) -> None:
    """As labels: of the end-of-text token, which begins the next document, that is decided by the token before it."""
    report = write_made_store(tmp_path / "store", "copying", Copying(max_length=3, min_length=3), documents=2,
                              validation=1, seed=0)  # fmt: skip
    assert report["generator"] == {"name": "copying", "seed": 0, "min_length": 3, "max_length": 3, "symbols": 26}
    store = TokenStore(tmp_path / "store")
    source, tokenizer = store.source("copying"), load_tokenizer(tmp_path / "store")
    first, end = source.document(1)
    ids = source.read(first, end)
    assert ids[0] == tokenizer.eot_id and tokenizer.decode(ids[1:]).startswith("[BOS] ")
    assert np.array_equal(ids[2:5], ids[6:9]) and len(ids) == 9
    assert source.loss_mask(first, end).tolist() == [1, 0, 0, 0, 0, 0, 1, 1, 1]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "store"
    words = ["data", "copying", "--out", str(out), "--documents", "50", "--max-length", "4", "--symbols", "5", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sources"]["copying"]["documents"] == 50
    # [BOS], [SEP], two strings and the end-of-text token.
    assert report["sources"]["copying"]["tokens"] == 50 * 11


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_length": 0}, "--max-length 0: must be 1 to"),
        ({"symbols": 20_000}, "--symbols 20000: must be 1 to 10,000"),
        ({"min_length": 9, "max_length": 8}, "--min-length 9: above --max-length 8"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Copying(**fields)
