"""Chat templates: Jinja in a sandbox, with bounds, as transformers renders them.

``{% generation %} … {% endgeneration %}`` encloses the text that the assistant generates.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jinja2
import jinja2.meta

from lightscale.data_pipeline.chat.sandbox import BoundedEnvironment, Span
from lightscale.data_pipeline.chat.shapes import ChatFault, Conversation
from lightscale.errors import UserError, shortened

# The names under which files have the reasoning of a message; the first is that of most templates.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    generated: list[Span]
    """What stands in ``{% generation %}`` blocks, in order."""


class ChatTemplate:
    """A compiled template."""

    def __init__(
        self, source: str, *, origin: str, variables: Mapping[str, Any] | None = None, most_characters: int = 2**24
    ) -> None:
        """``origin`` names the template in errors; ``variables``: values beside the conversation.

        ``most_characters``: of a rendering. Raises ``UserError`` for a template with a fault.
        """
        self.origin, self._source = origin, source
        self._environment = BoundedEnvironment(most_characters)
        self._variables = dict(variables or {})
        try:
            code = self._environment.compile(self._environment.bounded(source), filename=origin)
            self._template = jinja2.Template.from_code(self._environment, code, self._environment.globals)
        # Python compiles what Jinja makes of it: it has limits of its own for nested loops, and for digits of numbers.
        except (
            jinja2.TemplateSyntaxError,
            SyntaxError,
            ValueError,
            OverflowError,
            RecursionError,
            MemoryError,
        ) as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise UserError(
                f"{origin}{line}: not a Jinja template ({shortened(str(error), 300)}); correct it"
            ) from error

    @property
    def marks_generation(self) -> bool:
        """Whether it has ``{% generation %}`` blocks."""
        return self._environment.marks_generation

    def names(self) -> set[str]:
        """Of the variables that it reads and does not set."""
        return jinja2.meta.find_undeclared_variables(self._environment.parse(self._source))

    def render(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> Rendered:
        """The text of ``conversation``; ``add_generation_prompt``: with the beginning of an answer behind it.

        Raises ``ChatFault`` for a conversation that the template refuses, or cannot render within the bounds.
        """
        environment = self._environment
        environment.begin(conversation.messages, conversation.tools, self._variables)
        try:
            for part in self._template.generate(
                **self._variables,
                messages=[_with_reasoning(message) for message in conversation.messages],
                tools=conversation.tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ):
                environment.output(part)
        except ChatFault as error:
            raise ChatFault(f"{self.origin}: {error}") from error
        except jinja2.UndefinedError as error:
            raise ChatFault(
                f"{self.origin}: the template fails ({error}); correct it, or set the variable by chat.variables"
            ) from error
        except Exception as error:  # a template can raise anything that Python can
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise ChatFault(
                f"{self.origin}: the template fails ({kind}{shortened(str(error), 300)}); correct the conversation or "
                "the template"
            ) from error
        return Rendered("".join(environment.parts), environment.generated)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """``message`` with its reasoning under the names that templates read, as in transformers."""
    found = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}
