"""Text as it is written: held to the whole text of the tokens, cut where a plain search finds a stop string."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.evaluation.inference.written_text import WrittenText, decode_stream

BYTES = TiktokenTokenizer(
    name="bytes",
    pat_str=r"(?s:.+)",
    # Pairs too, so that a token may end behind the beginning of a stop string, and within a character.
    mergeable_ranks={
        **{bytes([byte]): byte for byte in range(256)},
        **{pair.encode(): 256 + number for number, pair in enumerate(("ab", "bc", "ca", "aa"))},
    },
    special_tokens={"<|endoftext|>": 260},
)
LETTERS = st.sampled_from([*b"abc", 256, 257, 258, 259, *"字".encode()])
STOPS = st.lists(st.text("abc字", min_size=1, max_size=4), max_size=3)


def plainly(ids: Sequence[int], stop: Sequence[str]) -> tuple[str, int]:
    """The text up to the first stop string that the tokens so far have, and how many tokens that took."""
    for taken in range(1, len(ids) + 1):
        text = BYTES.decode(ids[:taken])
        if found := [text.index(one) for one in stop if one in text]:
            return text[: min(found)], taken
    return BYTES.decode(ids), len(ids)


@given(ids=st.lists(LETTERS, max_size=20), stop=STOPS)
def test_text_ends_before_the_first_stop_string(ids: list[int], stop: list[str]) -> None:
    taken: list[int] = []
    parts = list(decode_stream(BYTES, (taken.append(token) or token for token in ids), stop))  # type: ignore[func-returns-value]
    assert ("".join(parts), len(taken)) == plainly(ids, stop)
    assert all(parts)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    written = WrittenText(BYTES, ["bcb", "xyz"])
    assert [written.add(token) for token in b"abcab"] == ["a", "", "", "bca", ""]
    assert written.finish() == "b"
    assert (written.text, written.stopped_by) == ("abcab", None)


def test_a_stop_string_that_spans_tokens() -> None:
    written = WrittenText(BYTES, ["bca", "c"])
    assert [written.add(token) for token in (256, 258)] == ["a", ""]
    # Both are there now: the one that begins first counts.
    assert (written.text, written.stopped_by) == ("a", "bca")


@pytest.mark.parametrize("stop", ["字", "\ufffd字"])
def test_a_stop_string_of_several_bytes(stop: str) -> None:
    ids = [*b"a", *("\ufffd字".encode()), *b"b"]
    assert "".join(decode_stream(BYTES, ids, [stop])) == "a\ufffd字"[: -len(stop)]
