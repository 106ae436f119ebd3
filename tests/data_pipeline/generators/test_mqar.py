"""Associative recall: every key is asked once, only its values count, and the same seed gives the same store."""

import json
from pathlib import Path

import pytest

from lightscale.cli import main
from lightscale.data_pipeline.generators.mqar import MQAR
from lightscale.errors import UserError


def test_every_key_is_asked_once_and_only_values_count() -> None:
    generator, keys, values, orders = MQAR(pairs=5, keys=7, values=6), set(), set(), set()
    for number in range(200):
        made = generator.document(7, "train", number)
        begin, *symbols = made.text.split()
        told, asked = symbols[:10], symbols[11:]
        assert begin == "[BOS]" and symbols[10] == "[SEP]" and len(asked) == 10
        pairs = dict(zip(told[::2], told[1::2], strict=True))
        assert len(pairs) == 5 and pairs == dict(zip(asked[::2], asked[1::2], strict=True))
        keys |= {*told[::2]}
        values |= {*told[1::2]}
        orders.add(tuple(told[::2].index(key) for key in asked[::2]))
        assert made.counts is not None
        assert [symbol for symbol, counts in zip([begin, *symbols], made.counts, strict=True) if counts] == asked[1::2]
        ids = generator.tokenizer().encode(made.text)
        # One token for each symbol, none of them a byte.
        assert len(ids) == 22 and min(ids) >= 256
    assert keys == {f"k{key}" for key in range(7)} and values == {f"v{value}" for value in range(6)}
    assert len(orders) > 60, "of 120 orders of the queries"
    assert generator.document(7, "train", 3).text == generator.document(7, "train", 3).text
    assert generator.document(8, "train", 3).text != generator.document(7, "train", 3).text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "mqar", "--out", str(tmp_path / "store"), "--documents", "50", "--pairs", "4", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    # [BOS], [SEP], each pair twice and the end-of-text token.
    assert report["sources"]["mqar"]["tokens"] == 50 * 19
    assert report["generator"] == {"name": "mqar", "seed": 0, "pairs": 4, "keys": 64, "values": 64}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pairs": 0}, "--pairs 0: must be 1 to"),
        ({"values": 20_000}, "--values 20000: must be 1 to 10,000"),
        ({"pairs": 9, "keys": 8}, "--pairs 9: above --keys 8"),
    ],
)
def test_sizes_out_of_range_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MQAR(**fields)
