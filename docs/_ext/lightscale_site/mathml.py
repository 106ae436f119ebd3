"""Maths as MathML, which browsers draw by themselves: converted when the site is built, without scripts or fonts."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.errors import ExtensionError
from sphinx.writers.html5 import HTML5Translator


def visit_inline(self: HTML5Translator, node: nodes.math) -> None:
    """Write a formula in a line."""
    self.body.append(_mathml(node, "inline"))
    raise nodes.SkipNode


def visit_block(self: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula on lines of its own; wide ones scroll."""
    self.body.append(f'<div class="formula">{_mathml(node, "block")}</div>\n')
    raise nodes.SkipNode


def depart_math(self: HTML5Translator, node: nodes.Element) -> None:
    """Nothing is left: the visit has written all."""


def _mathml(node: nodes.Element, display: str) -> str:
    latex = node.astext().strip()
    try:
        return convert(latex, display=display)
    except Exception as error:  # its own errors share no base
        raise ExtensionError(f"{node.source}:{node.line}: no MathML of ${latex}$: {error!r}") from error
