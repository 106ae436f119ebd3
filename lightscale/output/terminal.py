"""Plain text on terminals: consoles, tables, and views that are drawn again and again."""

import time
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.table import Table

from lightscale.errors import printable


class PlainConsole(Console):
    """A console that spells out control characters of texts on terminals (`printable`), and writes its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See rich."""
        for segment in super().render(renderable, options):
            is_text = self.is_terminal and segment.control is None
            yield Segment(printable(segment.text), segment.style) if is_text else segment

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that rich handles now, as `print` does: rich alone exits with code 1."""
        raise  # noqa: PLE0704


def plain_console(*, least_width: int | None = None, soft_wrap: bool = False) -> Console:
    """Standard output without markup; `least_width`: also in a narrower terminal; `soft_wrap`: lines are not broken."""
    width = None if least_width is None else max(Console().width, least_width)
    return PlainConsole(highlight=False, markup=False, soft_wrap=soft_wrap, width=width)


def plain_table(
    words: Sequence[str],
    numbers: Sequence[str] = (),
    *,
    has_notes: bool = False,
    title: str | None = None,
    caption: str | None = None,
) -> Table:
    """A table under one line: columns of `words`, then of `numbers`, then one of notes, which alone may be broken."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for heading in words:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    if has_notes:
        table.add_column("")
    return table


def watch(view: Callable[[], RenderableType], every_s: float, console: Console) -> None:
    """Draw `view` in place every `every_s` seconds, until Ctrl-C."""
    # Drawn when something was read: a thread that draws would only repeat it.
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(view(), refresh=True)
            time.sleep(every_s)
