"""What the documentation site needs beside Sphinx: generated parts of pages, maths without scripts, links to files.

A page asks for a generated part by a comment on a line of its own, ``<!-- generated: NAME [ARGUMENT …] -->``. It is
made when the site is built, so that nothing that the code says stands in a second place.
"""

import re
from collections.abc import Callable
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

from lightscale_site.api import kernels_text
from lightscale_site.architectures import parameter_table, size_table
from lightscale_site.commands import commands_text
from lightscale_site.configuration import configuration_text
from lightscale_site.contents import contents
from lightscale_site.links import FileLinks
from lightscale_site.mathml import depart_math, visit_block, visit_inline

PARTS: dict[str, Callable[..., str]] = {
    "commands": commands_text,
    "configuration": configuration_text,
    "contents": contents,
    "kernels": kernels_text,
    "parameters": parameter_table,
    "sizes": size_table,
}
_PLACE = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register all of it with Sphinx."""
    app.connect("source-read", _fill_in)
    app.connect("autodoc-process-docstring", _read_google_style)
    app.connect("autodoc-process-bases", _public_bases)
    app.add_transform(FileLinks)
    app.add_html_math_renderer("mathml", (visit_inline, depart_math), (visit_block, depart_math))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


# Of napoleon's settings; those of a whole site do not exist without its own extension.
_STYLE: Any = Config()


def _fill_in(app: Sphinx, docname: str, source: list[str]) -> None:
    def part(match: re.Match[str]) -> str:
        name, *arguments = match[1].split()
        return PARTS[name](*arguments)

    source[0] = _PLACE.sub(part, source[0])


def _public_bases(app: Sphinx, name: str, obj: object, options: object, bases: list[Any]) -> None:
    """Show the first public class above a private base."""
    for place, base in enumerate(bases):
        above: type = getattr(base, "__origin__", base)
        if above.__name__.startswith("_"):
            bases[place] = next(one for one in above.__mro__ if not one.__name__.startswith("_"))


def _read_google_style(app: Sphinx, what: Any, name: str, obj: object, options: object, lines: list[str]) -> None:
    """napoleon's reading, of all but attributes: it takes the text before their first colon for a type."""
    if what not in ("attribute", "property", "data"):
        lines[:] = str(GoogleDocstring(lines, _STYLE, app, what, name, obj, options)).splitlines()
