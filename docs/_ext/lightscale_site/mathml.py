"""Maths as MathML, which browsers draw without scripts: docutils converts it when the site is built."""

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

_log = logging.getLogger(__name__)


def visit_inline(self: HTML5Translator, node: nodes.math) -> None:
    """Write a formula in a line."""
    self.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def visit_block(self: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula on lines of its own; wide ones scroll."""
    self.body.append(f'<div class="formula">{_mathml(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def depart_math(self: HTML5Translator, node: nodes.Element) -> None:
    """Nothing is left: the visit has written all."""


def _mathml(node: nodes.Element, *, as_block: bool) -> str:
    latex = node.astext().strip()
    try:
        return str(tex2mathml(latex, as_block=as_block))
    except MathError as error:
        _log.warning("the formula %s cannot be converted: %s", latex, error, location=node)
        return ""
