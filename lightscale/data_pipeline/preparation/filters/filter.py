"""A filter: the rules of a language with their limits, and a user's changes to them."""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from lightscale.config.fields import shown_value
from lightscale.data_pipeline.preparation.filters.document import DocumentView
from lightscale.data_pipeline.preparation.filters.rules import N_GRAMS, RULES, Limits, Rule
from lightscale.data_pipeline.preparation.filters.thresholds import THRESHOLDS, UNITS
from lightscale.errors import UserError

LANGUAGES = tuple(THRESHOLDS)
_MAX_N, _MAX_LIMIT = 100, 10**15


class Filter:
    """``filter(text)``: the name of the first rule that drops the document, or none if it is kept.

    Can be pickled. Made by ``make_filter``.
    """

    def __init__(self, language: str, limits: Mapping[str, Limits]) -> None:
        """``limits`` of each rule that is on; the rules are tried in the order of ``RULES``."""
        self.language = language
        self.limits = {name: dict(limits[name]) for name in RULES if name in limits}
        """Each rule that is on, with its limits: what a report says of the filter."""

    def __call__(self, text: str) -> str | None:
        """``text``: normalised."""
        document = DocumentView(text, UNITS[self.language])
        return next((name for name, limits in self.limits.items() if RULES[name].drops(document, limits)), None)


def make_filter(language: str, overrides: Mapping[str, Any] | None = None) -> Filter:
    """The filter of ``language``: ``en``, ``zh``, ``code``, or ``other`` for one with spaces between words.

    ``overrides`` maps names of rules to ``False`` (off), ``True`` (on, with the language's limits) or a table of
    limits to change, ``{"size": {"min": 20}, "stop_words": False}``; a table for a rule that the language lacks turns
    it on. Raises ``UserError`` for a language, rule or limit that is not known, naming the nearest, and for a value
    that cannot be.
    """
    if language not in THRESHOLDS:
        raise UserError(f"filter language {language!r}: {_nearest(language, LANGUAGES)}")
    limits: dict[str, Limits] = dict(THRESHOLDS[language])
    for name, choice in (overrides or {}).items():
        if name not in RULES:
            raise UserError(f"filter rule {name!r}: {_nearest(name, RULES)}")
        if choice is False:
            limits.pop(name, None)
        elif choice is True:
            limits[name] = _with_defaults(RULES[name], language)
        elif isinstance(choice, Mapping):
            limits[name] = _changed(RULES[name], limits.get(name, THRESHOLDS[language].get(name, {})), choice)
        else:
            raise UserError(
                f"filter rule {name} = {shown_value(choice)}: must be true, false, or a table of limits "
                f"({_names(RULES[name])})"
            )
    return Filter(language, limits)


def _with_defaults(rule: Rule, language: str) -> Limits:
    if rule.limits and rule.name not in THRESHOLDS[language]:
        raise UserError(f"filter rule {rule.name} = true: {language} has no limits for it; set {_names(rule)}")
    return THRESHOLDS[language].get(rule.name, {})


def _changed(rule: Rule, limits: Limits, choice: Mapping[str, Any]) -> Limits:
    for name, value in choice.items():
        key = f"filter rule {rule.name}.{name}"
        if rule.limits == N_GRAMS:
            if not (name.isascii() and name.isdigit() and 1 <= int(name) <= _MAX_N):
                raise UserError(f"{key}: its limits are named by n; use a number from 1 to {_MAX_N}")
        elif name not in rule.limits:
            raise UserError(f"{key}: {_nearest(name, rule.limits)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MAX_LIMIT:
            raise UserError(f"{key} = {shown_value(value)}: must be a number ≥ 0 and ≤ {_MAX_LIMIT:_}")
    changed = {**limits, **choice}
    missing = [name for name in rule.limits if rule.limits != N_GRAMS and name not in changed]
    one_is_enough = set(rule.limits) == {"min", "max"} and changed
    if rule.limits and not one_is_enough and (missing or not changed):
        raise UserError(f"filter rule {rule.name}: it also needs {', '.join(missing or rule.limits)}")
    if changed.get("min", 0) > changed.get("max", math.inf):
        raise UserError(f"filter rule {rule.name}: min {changed['min']} is above max {changed['max']}")
    return changed


def _names(rule: Rule) -> str:
    return ", ".join(rule.limits) if rule.limits else "it has none"


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    if not known:
        return "it has no limits, only true and false"
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(known)}"
