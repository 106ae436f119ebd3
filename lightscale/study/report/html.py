"""HTML from text, tables and pictures. Every text is escaped; pictures are SVG from matplotlib."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto; padding: 0 1em; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.2em; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: 3px 9px; text-align: right; white-space: nowrap; border-bottom: 1px solid #eee; }
th { border-bottom: 1px solid #888; } th:first-child, td:first-child { text-align: left; }
tr.published td { color: #777; font-style: italic; }
figure { margin: 1.5em 0; } figure svg { width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: 13px; }
pre { background: #f6f6f6; padding: 0.7em; overflow-x: auto; font-size: 12px; white-space: pre-wrap; }
"""


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

    def lines(self, text: str) -> None:
        """Add text with its line breaks."""
        self.parts.append(f"<pre>{escape(text)}</pre>")

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], *, published: Sequence[int] = ()) -> None:
        """Add a table. `published`: indices of rows with published numbers, which are set apart."""
        head = "".join(f"<th>{escape(text)}</th>" for text in headings)
        body = []
        for number, row in enumerate(rows):
            attribute = ' class="published"' if number in published else ""
            body.append(f"<tr{attribute}>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>")
        self.parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>")

    def picture(self, svg: str, caption: str) -> None:
        """Add an SVG picture with a caption."""
        self.parts.append(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>")

    def text(self) -> str:
        """The complete file."""
        body = "\n".join(self.parts)
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title>'
            f"<style>{_STYLE}</style></head><body>\n<h1>{escape(self.title)}</h1>\n{body}\n</body></html>\n"
        )
