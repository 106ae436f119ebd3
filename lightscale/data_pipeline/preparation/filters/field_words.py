"""Words and sentences as the field's English filters count them: punctuation marks are separate words.

datatrove's filters take spaCy's English words. These follow the same rules, with the abbreviations that are common in
text. A part between spaces loses the marks at both ends, one after the other, and is then divided at inner marks.
``tests/data_pipeline/preparation/filters/test_field.py`` asserts the agreement of decisions.
"""

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from string import ascii_lowercase

# Chinese, Japanese and Korean characters count as letters, with the marks of their own blocks.
_CJK = "\u2e80-\u2fff\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f"
_ANY_LETTER = rf"(?:[^\W\d_]|[{_CJK}])"
_LOWER = "a-zα-ωа-я\u00df-\u00f6\u00f8-\u00ff" + _CJK
_UPPER = "A-ZА-Я\u00c0-\u00d6\u00d8-\u00de" + _CJK
_TOP_LEVEL = "a-z\u00a1-\uffff"
_QUOTES = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉⟦⟧"
_MARKS = ",:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪" + _QUOTES
_PICTURES = (
    "¦©®°\u2100\u2101\u2103-\u2106\u2108\u2109\u2114\u2116\u2117\u211e-\u2123\u2195-\u2199\u21a1-\u21cd\u21d5-\u21f3"
    "\u2300-\u2307\u230c-\u231f\u2322-\u237b\u237d-\u23db\u23e2-\u244a\u249c-\u25b6\u25b8-\u25c0\u25c2-\u25f7"
    "\u2600-\u266e\u2670-\u2767\u2794-\u27bf\u2800-\u28ff\u2b00-\u2b2f\u2b76-\u2bff\ufffc\ufffd\U0001f000-\U0001faff"
)
_CURRENCIES = "$£€¥฿₽﷼₠-₿"
_UNITS = (
    "km²|km³|km|m²|m³|mm²|mm³|mm|m/s|cm²|cm³|cm|dm²|dm³|dm|km/h|kmh|mph|ha|µm|nm|yd|in|ft|kg|mg|µg|g|lb|oz|hPa|Pa"
    "|mbar|mb|MB|kb|KB|gb|GB|tb|TB|m|t|T|G|M|K|%"
)
_FIRST = re.compile(rf"\.\.+|…+|\+(?![0-9])|[§%=—–{re.escape(_MARKS)}{_CURRENCIES}{_PICTURES}]")
_LAST = re.compile(
    rf"(?:\.\.+|…+|['’][sS]|[—–{re.escape(_MARKS)}{_PICTURES}]|(?<=[0-9])\+|(?<=[0-9])(?:[{_CURRENCIES}]|{_UNITS})"
    rf"|(?<=[0-9{_LOWER}%²\-+{re.escape(_MARKS)}])\.|(?<=[{_UPPER}][{_UPPER}])\.)$"
)
_WITHIN = re.compile(
    rf"\.\.+|…|[{_PICTURES}]|(?<=[0-9])[+\-*^](?=[0-9-])"
    rf"|(?<=[{_LOWER}{re.escape(_QUOTES)}])\.(?=[{_UPPER}{re.escape(_QUOTES)}])"
    rf"|(?:(?<=[^\W\d_])|(?<=[{_CJK}])),(?={_ANY_LETTER})"
    rf"|(?:(?<=[^\W_])|(?<=[{_CJK}]))(?:---|--|——|[-–—~]|[:<>=/])(?={_ANY_LETTER})"
)
_ADDRESS = re.compile(
    rf"(?:[\w+.-]{{2,}}://)?(?:\S+(?::\S*)?@)?(?:\d{{1,3}}(?:\.\d{{1,3}}){{3}}"
    rf"|(?:[^\W_](?:[\w-]{{0,62}}[^\W_])?\.)+[{_TOP_LEVEL}]{{2,63}})(?::\d{{2,5}})?(?:[/?#]\S*)?"
)
_NOT = (
    "ai|are|ca|could|dare|did|does|do|had|has|have|is|may|might|must|need|ought|sha|should|was|were|wo|would"  # + n't
)
_PRONOUNS = "he|how|i|it|she|that|there|these|they|this|those|we|what|when|where|who|why|you"
_PARTS = (
    re.compile(rf"({_NOT})(n['’]?t)(['’]?ve)?", re.IGNORECASE),
    re.compile(rf"({_PRONOUNS}|could|might|must|should|would|not)(['’](?:ll|d|ve|re|m|s))(['’]ve)?", re.IGNORECASE),
    re.compile(
        r"(i)(m|ve|d)|(he|she|that|there|what|when|where|who)(s)|(they|you)(re|ve|ll|d)|(we)(ve|d)|(he)(d)|(that|it)(ll|d)",
        re.IGNORECASE,
    ),
    re.compile(r"(can)(not)|(gon|got)(n?a)|(let)(['’]s)|(c['’])(mon)|(y['’]?)(all)", re.IGNORECASE),
    re.compile(r"(1[0-2]|[1-9])([ap]\.?m\.?)"),
)
_ABBREVIATIONS = (
    "Adm. Ak. Ala. Apr. Ariz. Ark. Aug. Bros. Calif. Co. Colo. Conn. Corp. D.C. Dec. Del. Dr. E.G. E.g. Feb. Fla. "
    "Ga. Gen. Gov. I.E. I.e. Ia. Id. Ill. Inc. Ind. Jan. Jr. Jul. Jun. Kan. Ky. La. Ltd. Mar. Mass. Md. Messrs. "
    "Mich. Minn. Miss. Mo. Mont. Mr. Mrs. Ms. Mt. N.C. N.D. N.H. N.J. N.M. N.Y. Neb. Nev. Nov. Oct. Okla. Ore. Pa. "
    "Ph.D. Prof. Rep. Rev. S.C. Sen. Sep. Sept. St. Tenn. Va. Wash. Wis. a.m. and/or co. e.g. i.e. p.m. v.s. vs. "
    "'s 'S ’s ’S 'd ’d 'll ’ll 're ’re 'em ’em w/o C++ \\n \\t '' ’’ <space> ä. ö. ü. -- --- ——"
)
_FACES = (
    ":) :-) ;) ;-) :( :-( :/ :-/ :* :D :P :p :o :0 :1 :3 :] :[ :| :> =) =( =] =| =3 (: (; 8) 8-) <3 </3 -_- ^_^ O.o "
    "o.O 0.0 :x :X :} :') (= [: [= ): )-: \\\")"
)
_WHOLE = frozenset((*_ABBREVIATIONS.split(), *_FACES.split(), *(f"{letter}." for letter in ascii_lowercase)))
# What affixes were taken from is put together again where it is one of these.
_JOINED = frozenset(word for word in _WHOLE if not word.isalnum())
_MOST_JOINED = 4
_CACHED_CHUNKS = 2**16

_SENTENCE_TERMINAL = (
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 17d4-17d6 "
    "17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 "
    "2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb "
    "fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 "
    "111c5-111c6 111cd 111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 "
    "1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 "
    "16b37-16b38 16b44 16e98 1bc9f 1da88"
)
TERMINAL_PUNCTUATION = frozenset(
    chr(point)
    for span in _SENTENCE_TERMINAL.split()
    for point in range(int(span.split("-")[0], 16), int(span.split("-")[-1], 16) + 1)
)
"""Marks that end a sentence, in any script: Unicode's property Sentence_Terminal, with three Khmer marks."""
_CONTROLS = map(chr, (*range(9), *range(11, 32), *range(127, 160)))
PUNCTUATION = TERMINAL_PUNCTUATION.union(
    "\"#$%&'()*+,-/:;<=>@[\\]^_`{|}~«´»–—’“”„…∶━►、〈〉《》「」【】％（），１：；～", _CONTROLS
)
"""Characters of a word of marks alone."""


def words_of(text: str) -> list[str]:
    """The words of ``text`` in order; marks are words."""
    return [word for chunk in text.split() for word in _words_of_chunk(chunk)]


def num_sentences(line: str) -> int:
    """Number of sentences of a line without line ends: a new one begins behind a mark of ``TERMINAL_PUNCTUATION``."""
    count, ended = 1, False
    for word in words_of(line):
        if word in TERMINAL_PUNCTUATION:
            ended = True
        elif ended and not all(unicodedata.category(character)[0] == "P" for character in word):
            count, ended = count + 1, False
    return count


@lru_cache(maxsize=_CACHED_CHUNKS)
def _words_of_chunk(chunk: str) -> tuple[str, ...]:
    """Of what stands between spaces."""
    if chunk.isascii() and chunk.isalpha() and not any(pattern.fullmatch(chunk) for pattern in _PARTS):
        return (chunk,)
    first: list[str] = []
    last: list[str] = []
    before = ""
    while chunk and chunk != before and not _parts(chunk):
        before = chunk
        if mark := _FIRST.match(chunk):
            first.append(mark.group())
            chunk = chunk[mark.end() :]
            if _parts(chunk):
                break
        if mark := _LAST.search(chunk):
            last.append(mark.group())
            chunk = chunk[: mark.start()]
    words = (*first, *(_parts(chunk) or _divided(chunk)), *reversed(last))
    return words if len(words) == 1 else tuple(_joined(words))


def _joined(words: tuple[str, ...]) -> Iterator[str]:
    start = 0
    while start < len(words):
        for stop in range(min(start + _MOST_JOINED, len(words)), start, -1):
            word = "".join(words[start:stop])
            if stop == start + 1 or word in _JOINED:
                yield word
                start = stop
                break


def _parts(chunk: str) -> tuple[str, ...]:
    """Of an abbreviation, a contraction or a face; nothing of another word."""
    if chunk in _WHOLE:
        return (chunk,)
    if chunk[1:] != chunk[1:].lower():
        return ()
    for pattern in _PARTS:
        if found := pattern.fullmatch(chunk):
            return tuple(part for part in found.groups() if part)
    return ()


def _divided(chunk: str) -> Iterator[str]:
    """At the marks within, but an address, which is one word."""
    if not chunk:
        return
    start = 0
    if not _ADDRESS.fullmatch(chunk):
        for mark in _WITHIN.finditer(chunk):
            if mark.start() > start:
                yield chunk[start : mark.start()]
            yield mark.group()
            start = mark.end()
    if start < len(chunk):
        yield chunk[start:]
