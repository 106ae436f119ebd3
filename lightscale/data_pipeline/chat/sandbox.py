"""The sandbox of chat templates: Jinja's, with bounds on what a rendering makes and on how long it takes.

No clock decides: the bounds follow from the conversation and the template alone, as texts must. Jinja's own sandbox
keeps templates from files and from attributes of Python.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from lightscale.data_pipeline.chat.shapes import ChatFault

Span = tuple[int, int]
"""(first character, one behind the last) of a text."""

MOST_STEPS = 200_000
"""Loop items and calls of one rendering."""
_MOST_WORK = 2**33
"""Characters that all steps may look at: each may look at the longest string that there is."""
_MOST_VALUES = 2**20
"""Of a list or table that becomes text."""
_MOST_BITS = 2**13
"""Of a whole number; Python writes numbers of 4300 digits at most."""
_MOST_INDENT = 64
_ITEMS, _JOINED, _SEEN = "lightscale_items", "lightscale_joined", "lightscale_seen"
# Filters in Python, which take as long for a character as others for a thousand.
_SLOW, _SLOW_WORK = frozenset({"wordwrap", "urlize", "title", "striptags", "pprint", "xmlattr"}), 1000
# Widths in the formats of % and of str.format, where * and nested braces take them from an argument.
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\d*|\*)(?:\.(\d*|\*))?")
_BRACES = re.compile(r"\{[^{}:]*:?([^{}]*)")
_DIGITS = re.compile(r"\d{1,20}")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with counters of the rendering that runs."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, most_characters: int) -> None:
        """``most_characters``: of a rendering, and of each string in it."""
        self.marks_generation = False
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # What is constant is computed when it is reached: to look for it takes the cube of an expression's depth.
            optimized=False,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=self._finalized,
        )
        self._most_characters = most_characters
        # A text must follow from the conversation alone.
        del self.globals["lipsum"], self.filters["random"]
        self.filters["tojson"] = _tojson
        self.filters = {name: self._bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters |= {_ITEMS: self._items, _JOINED: self._joined, _SEEN: self._seen}
        self.globals["raise_exception"] = _raise_exception
        self.begin()

    def bounded(self, source: str) -> nodes.Template:
        """The syntax tree of ``source``, in which loops and comparisons are counted."""
        tree: nodes.Template = _Bounded().visit(self.parse(source))
        return tree

    def begin(self, *inputs: Any) -> None:
        """Count from zero; ``inputs``: what the template may read."""
        self.parts: list[str] = []
        self.generated: list[Span] = []
        self.num_characters = 0
        self._num_steps = self._work = 0
        self._longest = max((len(one) for one in _values(inputs) if isinstance(one, str)), default=0) + 1

    def output(self, part: str) -> None:
        """Add ``part`` to the text."""
        self.num_characters += len(part)
        self._require_size(self.num_characters)
        self.parts.append(part)

    def call(*args: Any, **kwargs: Any) -> Any:
        """See jinja2; ``self`` has no name here, so that templates can use any."""
        self, _, function, *values = args
        assert isinstance(self, BoundedEnvironment)
        self._step(1)
        # Jinja wraps str.format.
        method = getattr(function, "__wrapped__", function)
        text = getattr(method, "__self__", None)
        if isinstance(text, (str, bytes)):
            self._check(method.__name__, text, [*values, *kwargs.values()])
        return self._made(ImmutableSandboxedEnvironment.call(*args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """See jinja2."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._require_bits(left.bit_length() * abs(right))
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int):
                    self._require_size(len(value) * times)
            if isinstance(left, int) and isinstance(right, int):
                self._require_bits(left.bit_length() + right.bit_length())
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            self._require_size(len(left) + len(right))
        if operator == "%" and isinstance(left, (str, bytes)):
            self._check("format", left, right if isinstance(right, (tuple, list)) else [right])
        return self._made(super().call_binop(context, operator, left, right))

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        num_first = int(hasattr(function, "jinja_pass_arg"))

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            values = [*args[num_first:], *kwargs.values()]
            if name in ("join", "sum", "string", "list") and len(args) > num_first:
                args = (*args[:num_first], _listed(args[num_first]), *args[num_first + 1 :])
                values[0] = args[num_first]
            self._look()
            if values:
                self._check(name, values[0], values[1:], is_filter=True)
            return self._made(function(*args, **kwargs))

        return bounded

    def _check(self, name: str, value: Any, arguments: Sequence[Any], *, is_filter: bool = False) -> None:
        """Before a filter or a method of a text runs: it makes nothing that is larger than a rendering may be."""
        numbers = [abs(one) for one in arguments if isinstance(one, (int, float)) and not isinstance(one, bool)]
        texts = [len(one) for one in arguments if isinstance(one, (str, bytes))]
        number, text = max(numbers, default=0), max(texts, default=0)
        self._require_size(number)
        length = self._text_length(value) if is_filter or not isinstance(value, (str, bytes)) else len(value)
        if name in _SLOW:
            self._add_work(_SLOW_WORK * length)
        match name:
            case "batch" | "slice":
                self._step(int(number))
            case "indent" | "expandtabs":
                lines = value.count("\n") + value.count("\t") if isinstance(value, str) else 0
                self._require_size(length + (lines + 1) * int(max(number, text)))
            case "replace" | "wordwrap":
                self._require_size(length + (length + 1) * text)
            case "translate":
                self._require_size(length * max(map(self._text_length, arguments), default=1))
            case "join":
                items = value if is_filter else arguments[0] if arguments else ()
                count = len(items) if isinstance(items, (str, list, tuple, dict)) else 0
                self._step(0 if isinstance(items, str) else count)
                self._require_size(
                    count * (text if is_filter else length) + max(length, *map(self._text_length, arguments), 0)
                )
            case "sum" if any(isinstance(one, (list, tuple)) for one in arguments):
                raise ChatFault("the template sums up lists; use +")
            case "format" | "format_map":
                self._require_size(self._formatted_length(value, arguments, int(number), by_percent=is_filter))

    def _formatted_length(self, value: Any, arguments: Sequence[Any], number: int, *, by_percent: bool) -> int:
        """At most so long is the text of ``str.format``, or of ``%``."""
        form = value.decode("latin-1") if isinstance(value, bytes) else str(value)
        percents = [width for match in _PERCENT.finditer(form) for width in match.groups(default="")]
        braces = [width for match in _BRACES.finditer(form) for width in _DIGITS.findall(match[1])]
        widths = sum(number if one == "*" else int(one[:20] or 0) for one in (*percents, *braces))
        places = len(percents) // 2 + form.count("{")
        longest = max(map(self._text_length, arguments), default=0)
        nested = number * form.count("{") if re.search(r"\{[^{}]*\{", form) else 0
        return len(form) + widths + nested + places * longest

    def _text_length(self, value: Any) -> int:
        """About the length of a value as text; ChatFault for one of more than ``_MOST_VALUES`` values."""
        if isinstance(value, (str, bytes)):
            return len(value)
        length = count = 0
        for one in _values(value):
            count += 1
            if count > _MOST_VALUES:
                raise ChatFault(f"the template makes a list of more than {_MOST_VALUES:,} values; correct its loops")
            length += len(one) if isinstance(one, (str, bytes)) else 1
        return length + count

    def _made(self, value: Any) -> Any:
        if isinstance(value, (str, bytes)):
            self._require_size(len(value))
            self._longest = max(self._longest, len(value))
            self._add_work(len(value))
        return value

    def _finalized(self, value: Any) -> Any:
        """What ``{{ }}`` prints: lists that hold one another many times have texts without end."""
        if isinstance(value, (list, tuple, dict)):
            self._require_size(self._text_length(value))
        return value

    def _items(self, values: Iterable[Any]) -> list[Any]:
        items = list(values)
        self._step(len(items))
        return items

    def _joined(self, values: Sequence[Any]) -> str:
        self._require_size(sum(map(self._text_length, values)))
        text: str = self._made("".join(map(str, values)))
        return text

    def _seen(self, value: Any) -> Any:
        self._look()
        return self._made(value)

    def _step(self, count: int) -> None:
        self._num_steps += count
        if self._num_steps > MOST_STEPS:
            raise ChatFault(f"the template takes more than {MOST_STEPS:,} loop items and calls; correct its loops")
        self._add_work(count * self._longest)

    def _look(self) -> None:
        """The longest string that there is may be looked at."""
        self._add_work(self._longest)

    def _add_work(self, num_characters: int) -> None:
        self._work += num_characters
        if self._work > _MOST_WORK:
            raise ChatFault("the template looks at long strings too often; correct its loops, or shorten the messages")

    def _require_size(self, size: float) -> None:
        if size > self._most_characters:
            raise ChatFault(
                f"the template makes more than {self._most_characters:,} characters; correct its loops, or raise "
                "max_document_bytes"
            )

    def _require_bits(self, count: int) -> None:
        if count > _MOST_BITS:
            raise ChatFault(f"the template computes a number of more than {_MOST_BITS:,} bits; correct it")


class _Bounded(NodeTransformer):
    """Counts what loops iterate over, what ``~`` joins, and what looks at whole strings."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """``for x in y`` becomes ``for x in y|items``."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _ITEMS)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """``x ~ y`` becomes ``[x, y]|joined``."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """``x == y`` becomes ``(x == y)|seen``."""
        self.generic_visit(node)
        return _filtered(node, _SEEN)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        """``x is upper`` becomes ``(x is upper)|seen``."""
        self.generic_visit(node)
        return _filtered(node, _SEEN)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """``x[1:]`` becomes ``x[1:]|seen``."""
        self.generic_visit(node)
        return _filtered(node, _SEEN) if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _values(value: Any) -> Iterator[Any]:
    """``value``, and all that is in it; what is there several times comes each time."""
    waiting = [value]
    while waiting:
        yield (one := waiting.pop())
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple)):
            waiting += one


def _listed(values: Any) -> Any:
    """Of a generator the items, which can be counted."""
    return list(values) if hasattr(values, "__next__") else values


class _Generation(jinja2.ext.Extension):
    """The tag ``{% generation %}``."""

    tags = frozenset({"generation"})  # type: ignore[assignment] # a set that nobody adds to

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        """A block whose text passes through ``_mark``."""
        assert isinstance(self.environment, BoundedEnvironment)
        self.environment.marks_generation = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: jinja2.runtime.Macro) -> str:
        environment = self.environment
        assert isinstance(environment, BoundedEnvironment)
        # Pieces are written one by one: all that stands before the block is in the text already.
        begin = environment.num_characters
        text: str = caller()
        environment.generated.append((begin, begin + len(text)))
        return text


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes of HTML, which jinja2's own filter makes."""
    if isinstance(indent, int) and indent > _MOST_INDENT:
        raise ChatFault(f"the template asks tojson for an indent of {indent}; use at most {_MOST_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
