"""Tables of which the key ``name`` decides the type, as [task] and [optimizer]: the classes by name."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

from lightscale.config.section import Section, error_inside
from lightscale.errors import UserError, shortened


def named_class(what: str, classes: Mapping[str, str], name: object) -> Any:
    """The class ``name`` of ``classes``, "module:class" by name.

    Raises UserError with the nearest and all known names for an unknown one; ``what``: the noun for them.
    """
    if not isinstance(name, str) or name not in classes:
        near = difflib.get_close_matches(str(name), classes, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"unknown {what} {shortened(str(name))}; {hint}known: {', '.join(classes)}")
    module, _, attribute = classes[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def typed_table(what: str, classes: Mapping[str, str], default: str, table: Any) -> Section:
    """``table``, validated with the type of the class that its key ``name`` names: the class's ``options``.

    Raises pydantic's ValidationError, whose locations begin with the name, so that messages find the type.
    """
    if isinstance(table, Section):
        table = table.model_dump()
    if not isinstance(table, dict):
        raise PydanticKnownError("dict_type")
    name = table.get("name", default)
    try:
        found: Section = named_class(what, classes, name).options.model_validate(table)
    except UserError as error:
        wrong = PydanticCustomError("value_error", "{error}", {"error": str(error)})
        details = [InitErrorDetails(type=wrong, loc=(default, "name"), input=name)]
        raise ValidationError.from_exception_data(what, details) from None
    except ValidationError as error:
        inside = [error_inside(name, dict(item)) for item in error.errors(include_url=False)]
        raise ValidationError.from_exception_data(what, inside) from None
    return found
