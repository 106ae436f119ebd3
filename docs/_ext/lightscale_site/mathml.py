"""Maths as MathML, which browsers draw without scripts: docutils converts it when the site is built."""

from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

_log = logging.getLogger(__name__)
_NAMESPACE = "http://www.w3.org/1998/Math/MathML"
ElementTree.register_namespace("", _NAMESPACE)


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
        return _with_accents_on_letters(str(tex2mathml(latex, as_block=as_block)))
    except MathError as error:
        _log.warning("the formula %s cannot be converted: %s", latex, error, location=node)
        return ""


def _with_accents_on_letters(formula: str) -> str:
    r"""docutils puts the index of ``\bar k_t`` below the letter, as a limit; it belongs behind the letter."""
    # An entity of HTML, which XML lacks.
    root = ElementTree.fromstring(formula.replace("&ApplyFunction;", "\N{FUNCTION APPLICATION}"))
    for element in root.iter(f"{{{_NAMESPACE}}}munderover"):
        letter, index, above = element
        if above.get("stretchy") == "false":
            element.tag = f"{{{_NAMESPACE}}}msub"
            accented = ElementTree.Element(f"{{{_NAMESPACE}}}mover")
            accented.extend([letter, above])
            element[:] = [accented, index]
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)
