import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightscale.data_pipeline.preparation.normalise import (
    BYTE_ORDER_MARK,
    CONTROL,
    COUNTED,
    ENORMOUS_LINE,
    INVALID_UTF8,
    LINE_END,
    LONE_SURROGATE,
    NUL,
    normalise,
)

# What must not be left, written out independently of the code: C0 without tab, LF and form feed, DEL, C1, surrogates.
FORBIDDEN = re.compile("[\x00-\x08\x0b\x0d-\x1f\x7f-\x9f\ud800-\udfff]")
STRINGS = st.text(alphabet=st.characters(codec=None), max_size=40) | st.text(
    alphabet="a\r\n\0\x85\x9b\x1b\ufeff\ud83d\ude00\f\t字", max_size=40
)
BYTES = st.binary(max_size=60) | st.lists(
    st.sampled_from([b"\xc2", b"\x85", b"\0", b"a", b"\r", b"\n", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xe5\xad\x97"]),
    max_size=20,
).map(b"".join)


@given(data=STRINGS | BYTES)
@example(data=b"\xc2\x00\x85")  # must not become U+0085 when the NUL goes
@example(data="\0\ufeff\ufeffa")
def test_any_input_gives_a_clean_text_and_normalising_again_changes_nothing(data: bytes | str) -> None:
    result = normalise(data)
    assert not FORBIDDEN.search(result.text)
    assert not result.text.startswith("\ufeff")
    assert result.text.encode().decode() == result.text
    again = normalise(result.text)
    assert (again.text, again.counts) == (result.text, {})
    assert normalise(result.text.encode()) == again
    assert set(result.counts) <= set(COUNTED)
    assert all(result.counts.values())


@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=60))
def test_text_without_faults_stays_as_it_is(text: str) -> None:
    text = "x" + text  # a mark at the beginning is a fault
    assert normalise(text).text == text
    assert normalise(text.encode()).text == text


@pytest.mark.parametrize(
    ("data", "text", "counts"),
    [
        (b"", "", {}),
        ("def f():\n\treturn 1  \n\n\n\f\n", "def f():\n\treturn 1  \n\n\n\f\n", {}),
        (b"\xef\xbb\xbfa\xef\xbb\xbf", "a\ufeff", {BYTE_ORDER_MARK: 1}),
        # One U+FFFD for each broken sequence; those that were there are not counted.
        (b"a\xffb\xe5\xadc \xef\xbf\xbd", "a\ufffdb\ufffdc \ufffd", {INVALID_UTF8: 2}),
        (b"\xed\xa0\x80", "\ufffd" * 3, {INVALID_UTF8: 3}),  # a surrogate in bytes is no UTF-8
        ("a\ud800b \ud83d\ude00\udc00", "a\ufffdb \U0001f600\ufffd", {LONE_SURROGATE: 2}),
        ("a\r\nb\rc\x85d\r\r\n", "a\nb\nc\nd\n\n", {LINE_END: 5}),
        ("a\0b\0", "ab", {NUL: 2}),
        ("\x1b[31mred\x07\x7f\x9b", "[31mred", {CONTROL: 4}),
        ("x\r\n\0\x01\ud800".encode("utf-8", "surrogatepass"), "x\n\ufffd\ufffd\ufffd",
         {LINE_END: 1, NUL: 1, CONTROL: 1, INVALID_UTF8: 3}),
    ],
)  # fmt: skip
def test_what_is_changed_is_counted(data: bytes | str, text: str, counts: dict[str, int]) -> None:
    result = normalise(data)
    assert (result.text, result.counts) == (text, counts)


def test_enormous_lines_are_counted_and_kept_whole() -> None:
    text = "short\n" + "x" * 100_001 + "\n" + "字" * 100_001 + "\n" + "y" * 100_000
    result = normalise(text)
    assert (result.text, result.counts) == (text, {ENORMOUS_LINE: 2})
    assert normalise("ab\n" * 100_000).counts == {}


def test_old_sources_in_another_encoding_come_out_as_text() -> None:
    latin = "caf\xe9 na\xefve".encode("latin-1")
    assert normalise(latin).text == "caf\ufffd na\ufffdve"
    assert normalise(bytes(range(256)) * 100).counts[CONTROL] == 100 * (0x20 - 5 + 1)
