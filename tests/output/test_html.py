"""A page holds what was added, as text, and names nothing outside of itself."""

from html.parser import HTMLParser

from lightscale.output.html import Bar, Column, Html

HOSTILE = "<script src='http://elsewhere'>&\"</script>"


class Reader(HTMLParser):
    """Tags in their order, and the texts of cells and headings."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and data.strip():
            self.texts.append(data)


def test_every_text_is_escaped_wherever_it_stands() -> None:
    html = Html(HOSTILE)
    html.heading(HOSTILE)
    html.paragraph(HOSTILE)
    html.lines(HOSTILE, HOSTILE)
    html.table([HOSTILE], [[HOSTILE]])
    html.picture("<svg></svg>", HOSTILE)
    html.chart([Column(height=1, tick=HOSTILE, title=HOSTILE)], HOSTILE)
    found = Reader(html.text())
    assert found.open == []
    assert "script" not in found.tags
    assert found.texts == [HOSTILE] * 11
    assert ("title", HOSTILE) in found.attributes


def test_tables_have_bars_lines_and_rows_set_apart() -> None:
    html = Html("page")
    html.table(("name", "share"), [["two\nlines", Bar(0.5)], ["one", Bar(1, lost=True)]], published=[1])
    page = html.text()
    assert "<tr><td>two<br>lines</td>" in page
    assert '<td class="bar"><span style="width: 120.0px"></span> 50.00%</td>' in page
    assert '<tr class="published"><td>one</td><td class="bar lost"><span style="width: 240.0px"></span> 100.00%' in page


def test_the_highest_column_fills_its_chart() -> None:
    html = Html("page")
    html.chart([Column(height=height, tick="", title="") for height in (0, 5, 10)], "caption")
    html.chart([Column(height=0, tick="", title="")], "nothing")
    page = html.text()
    assert [page.count(f"height: {share}%") for share in ("0.0", "50.0", "100.0")] == [2, 1, 1]
