"""HTML pages of one file, without scripts, which load nothing from elsewhere.

Every text is escaped: markup, control characters and changes of the direction of writing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape as escape_markup

from lightscale.errors import printable

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #888; --bar: #4a7fb5; --lost: #c4703a; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.2em; border-bottom: 1px solid var(--line); }
h3 { font-size: 1em; margin-bottom: .3em; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto;
        font-variant-numeric: tabular-nums; }
th, td { padding: 3px 9px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { border-color: var(--dim); } th:first-child, td:first-child, td.bar { text-align: left; }
tr.published td { color: var(--dim); font-style: italic; }
.bar span { display: inline-block; height: .8em; min-width: 1px; background: var(--bar); vertical-align: middle; }
.lost span { background: var(--lost); }
.columns { display: flex; align-items: flex-end; gap: 2px; height: 9em; margin-top: 1em; }
.columns div { flex: 1; background: var(--bar); min-height: 1px; }
.ticks { display: flex; gap: 2px; font-size: 11px; } .ticks div { flex: 1; text-align: center; }
figure { margin: 1.5em 0; } figure svg { width: 100%; height: auto; }
figcaption, .note { color: var(--dim); font-size: 13px; overflow-wrap: anywhere; }
pre { margin: .3em 0; padding: .7em; border-left: 3px solid var(--line); background: #8881; font-size: 12px;
      white-space: pre-wrap; overflow-wrap: anywhere; max-height: 16em; overflow-y: auto; }
"""
_BAR_WIDTH_PX = 240


@dataclass(frozen=True)
class Bar:
    """A cell of a table: a share of the whole, drawn and printed; `lost`: in the colour of losses."""

    share: float
    lost: bool = False


Cell = str | Bar
"""A text may have several lines."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a chart."""

    height: float
    tick: str
    title: str
    """Shown under the pointer."""


@dataclass
class Html:
    """An HTML file, built from top to bottom."""

    title: str
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str, level: int = 2) -> None:
        """A heading."""
        self.parts.append(f"<h{level}>{escape(text)}</h{level}>")

    def paragraph(self, text: str, *, note: bool = False) -> None:
        """Add text; `note`: in small print."""
        attribute = ' class="note"' if note else ""
        self.parts.append(f"<p{attribute}>{escape(text)}</p>")

    def lines(self, text: str, caption: str = "") -> None:
        """Add text with its line breaks; `caption` stands above it."""
        block = f"<pre>{escape(text)}</pre>"
        above = f"<figcaption>{escape(caption)}</figcaption>"
        self.parts.append(f"<figure>{above}{block}</figure>" if caption else block)

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[Cell]], *, published: Sequence[int] = ()) -> None:
        """Add a table. `published`: indices of rows with published numbers, which are set apart."""
        head = "".join(f"<th>{escape(text)}</th>" for text in headings)
        body = []
        for number, row in enumerate(rows):
            attribute = ' class="published"' if number in published else ""
            body.append(f"<tr{attribute}>{''.join(map(_cell, row))}</tr>")
        self.parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>")

    def picture(self, svg: str, caption: str) -> None:
        """Add an SVG picture with a caption."""
        self.parts.append(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>")

    def chart(self, columns: Sequence[Column], caption: str) -> None:
        """Add a column chart with a caption."""
        highest = max((column.height for column in columns), default=0) or 1
        bars = "".join(
            f'<div style="height: {100 * column.height / highest:.1f}%" title="{escape(column.title)}"></div>'
            for column in columns
        )
        ticks = "".join(f"<div>{escape(column.tick)}</div>" for column in columns)
        drawn = f'<div class="columns">{bars}</div><div class="ticks">{ticks}</div>'
        self.parts.append(f"<figure>{drawn}<figcaption>{escape(caption)}</figcaption></figure>")

    def text(self) -> str:
        """The complete file."""
        body = "\n".join(self.parts)
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title>'
            f"<style>{_STYLE}</style></head><body>\n<h1>{escape(self.title)}</h1>\n{body}\n</body></html>\n"
        )


def _cell(cell: Cell) -> str:
    if isinstance(cell, Bar):
        kind, width_px = "bar lost" if cell.lost else "bar", _BAR_WIDTH_PX * cell.share
        return f'<td class="{kind}"><span style="width: {width_px:.1f}px"></span> {cell.share:.2%}</td>'
    return f"<td>{'<br>'.join(map(escape, cell.split(chr(10))))}</td>"


def escape(text: str) -> str:
    """``text`` as HTML shows it, character by character."""
    return escape_markup(printable(text))
