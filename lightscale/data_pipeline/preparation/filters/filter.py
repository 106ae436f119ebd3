"""A filter made of rules: those of a language or of a preset with their limits, and a user's changes to them."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightscale.config.fields import shown_value
from lightscale.data_pipeline.preparation.filters.document import DocumentView
from lightscale.data_pipeline.preparation.filters.judgement import Judgement
from lightscale.data_pipeline.preparation.filters.presets import PRESETS, FieldView
from lightscale.data_pipeline.preparation.filters.rules import N_GRAMS, RULES, Limits, Rule
from lightscale.data_pipeline.preparation.filters.thresholds import THRESHOLDS, UNITS
from lightscale.errors import UserError

LANGUAGES = tuple(THRESHOLDS)
_MAX_N, _MAX_LIMIT = 100, 10**15


@dataclass(frozen=True, kw_only=True)
class _RuleSet:
    """Rules in the order in which they are tried, how they see a text, and the limits of those that are on."""

    rules: Mapping[str, Rule[Any]]
    view: Callable[[str], Any]
    limits: Mapping[str, Limits]


def _rule_set(name: str) -> _RuleSet:
    if name in THRESHOLDS:
        unit = UNITS[name]
        return _RuleSet(rules=RULES, view=lambda text: DocumentView(text, unit), limits=THRESHOLDS[name])
    rules, limits = PRESETS[name]
    return _RuleSet(rules={rule.name: rule for rule in rules}, view=FieldView, limits=limits)


RULE_SETS = (*LANGUAGES, *PRESETS)
"""Names of the filters that ``make_filter`` makes."""


class Filter:
    """``filter(text)``: the name of the first rule that drops the document, or none if it is kept.

    Can be pickled. Made by ``make_filter``.
    """

    def __init__(self, name: str, limits: Mapping[str, Limits]) -> None:
        """``name``: one of ``RULE_SETS``; ``limits`` of each rule that is on, in any order."""
        self.name = name
        rules = _rule_set(name).rules
        self.limits = {rule: dict(limits[rule]) for rule in rules if rule in limits}
        """Each enabled rule with its limits, in their order: the entry of the filter in a report."""

    def __call__(self, text: str) -> str | None:
        """``text``: normalised."""
        return self.judge(text).rule

    def judge(self, text: str) -> Judgement:
        """The same with the measured value of the rule."""
        own = _rule_set(self.name)
        document = own.view(text)
        for name, limits in self.limits.items():
            if own.rules[name].drops(document, limits):
                return Judgement(text, rule=name, score=own.rules[name].score(document))
        return Judgement(text)


def make_filter(name: str, overrides: Mapping[str, Any] | None = None) -> Filter:
    """The filter of a language, ``en``, ``zh``, ``code``, or ``other`` for one with spaces between words; or a preset.

    ``overrides`` maps names of rules to ``False`` (off), ``True`` (on, with the language's limits) or a table of
    limits to change, ``{"size": {"min": 20}, "stop_words": False}``; a table for a rule that the language lacks turns
    it on. Raises ``UserError`` for a language, rule or limit that is not known, naming the nearest, and for a value
    that cannot be.
    """
    if name not in RULE_SETS:
        raise UserError(f"filter language {name!r}: {nearest(name, RULE_SETS)}")
    own = _rule_set(name)
    limits: dict[str, Limits] = dict(own.limits)
    for rule, choice in (overrides or {}).items():
        if rule not in own.rules:
            raise UserError(f"filter rule {rule!r}: {nearest(rule, own.rules)}")
        if choice is False:
            limits.pop(rule, None)
        elif choice is True:
            limits[rule] = _with_defaults(own.rules[rule], name, own.limits)
        elif isinstance(choice, Mapping):
            limits[rule] = _changed(own.rules[rule], limits.get(rule, own.limits.get(rule, {})), choice)
        else:
            raise UserError(
                f"filter rule {rule} = {shown_value(choice)}: must be true, false, or a table of limits "
                f"({_names(own.rules[rule])})"
            )
    return Filter(name, limits)


def _with_defaults(rule: Rule[Any], name: str, defaults: Mapping[str, Limits]) -> Limits:
    if rule.limits and rule.name not in defaults:
        raise UserError(f"filter rule {rule.name} = true: {name} has no default limits; set {_names(rule)}")
    return defaults.get(rule.name, {})


def _changed(rule: Rule[Any], limits: Limits, choice: Mapping[str, Any]) -> Limits:
    for name, value in choice.items():
        key = f"filter rule {rule.name}.{name}"
        if rule.limits == N_GRAMS:
            if not (name.isascii() and name.isdigit() and 1 <= int(name) <= _MAX_N):
                raise UserError(f"{key}: n must be a number from 1 to {_MAX_N}")
        elif name not in rule.limits:
            raise UserError(f"{key}: {nearest(name, rule.limits)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MAX_LIMIT:
            raise UserError(f"{key} = {shown_value(value)}: must be a number ≥ 0 and ≤ {_MAX_LIMIT:_}")
    changed = {**limits, **choice}
    missing = [name for name in rule.limits if rule.limits != N_GRAMS and name not in changed]
    one_is_enough = set(rule.limits) == {"min", "max"} and changed
    if rule.limits and not one_is_enough and (missing or not changed):
        raise UserError(f"filter rule {rule.name}: also set {', '.join(missing or rule.limits)}")
    if changed.get("min", 0) > changed.get("max", math.inf):
        raise UserError(f"filter rule {rule.name}: min {changed['min']} is above max {changed['max']}")
    return changed


def _names(rule: Rule[Any]) -> str:
    return ", ".join(rule.limits) if rule.limits else "it has no limits"


def nearest(name: str, known: Iterable[str]) -> str:
    """Replacement for ``name``."""
    known = list(known)
    if not known:
        return "use true or false; it has no limits"
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(known)}"
