"""Filters one after the other, as a corpus file lists them. A new one is one file, and one line in ``_SECTIONS``.

language = "en"                                        # the rules of a language
filters = {size = {min = 200}, stop_words = false}     # the same with other limits
filters = "gopher"                                     # a preset in their place
filters = ["gopher", {c4 = {terminal_punctuation = false}}, {size = {min = 200}}, "fineweb"]
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from lightscale.config.fields import shown_value
from lightscale.config.section import Section
from lightscale.data_pipeline.preparation.filters.c4 import C4Filter
from lightscale.data_pipeline.preparation.filters.classifier import ClassifierFilter
from lightscale.data_pipeline.preparation.filters.contamination import ContaminationFilter
from lightscale.data_pipeline.preparation.filters.filter import LANGUAGES, RULE_SETS, Filter, make_filter, nearest
from lightscale.data_pipeline.preparation.filters.judgement import FileSection, Judgement, Step
from lightscale.data_pipeline.preparation.filters.languages import LanguageFilter
from lightscale.data_pipeline.preparation.filters.masks import MaskFilter
from lightscale.data_pipeline.preparation.filters.rules import RULES
from lightscale.errors import UserError

NOTHING_LEFT = "nothing_left"
"""The rule of documents of which a filter takes out everything."""
_Maker = Callable[[Any], Step]


def _rules(name: str, options: Any) -> Filter:
    if options is not True and not isinstance(options, Mapping):
        raise UserError(f"filter {name} = {shown_value(options)}: must be a table of RULE = false, true or its limits")
    return make_filter(name, None if options is True else options)


def _section(kind: type[Section], name: str, options: Any) -> Any:
    """A filter that is a table of its options."""
    if name in _LIST_KEYS and isinstance(options, list):
        options = {_LIST_KEYS[name]: options}
    try:
        return kind.model_validate({} if options is True else options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([name, *map(str, first["loc"])])
        if first["type"] == "extra_forbidden":
            raise UserError(f"filter {key}: {nearest(str(first['loc'][-1]), kind.model_fields)}") from None
        what = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
        raise UserError(f"filter {key} = {shown_value(first['input'])}: {what}") from None


_SECTIONS: dict[str, type[Section]] = {
    "c4": C4Filter,
    "languages": LanguageFilter,
    "decontaminate": ContaminationFilter,
    "mask": MaskFilter,
    "classifier": ClassifierFilter,
}
# A list in place of their table is this key of it: languages = ["en"].
_LIST_KEYS = {"languages": "keep", "mask": "kinds"}

STEPS: Final[Mapping[str, _Maker]] = {
    **{name: partial(_rules, name) for name in RULE_SETS},
    **{name: partial(_section, kind, name) for name, kind in _SECTIONS.items()},
}
"""Every filter by its name; takes ``True`` or its options, and raises ``UserError``."""


class Chain:
    """Filters in their order; each sees the text as the one before leaves it. Can be pickled."""

    def __init__(self, steps: list[tuple[str, Step]]) -> None:
        """``steps``: name, filter. The name precedes the rules of a filter; "": no prefix."""
        self._steps = steps

    def judge(self, text: str) -> Judgement:
        """See ``Step``. A dropped document keeps its text unchanged."""
        left, changes = text, Counter[str]()
        for name, step in self._steps:
            verdict = step.judge(left)
            if verdict.rule is not None:
                return Judgement(text, rule=f"{name}.{verdict.rule}" if name else verdict.rule, score=verdict.score)
            left = verdict.text
            if not left or left.isspace():
                return Judgement(text, rule=f"{name}.{NOTHING_LEFT}")
            changes.update(verdict.changes)
        return Judgement(left, changes=changes)

    def files(self) -> list[str]:
        """Files that the filters read beside the corpus."""
        return [file for _, step in self._steps if isinstance(step, FileSection) for file in step.files()]


def compose(filters: Any, language: str | None) -> Chain | None:
    """The filters of a source: ``filters`` and ``language`` of the corpus file. None: every document is kept.

    Raises ``UserError`` if this is no list of filters, or has an unknown name or invalid options.
    """
    if filters == {}:
        return None if language is None else Chain([("", make_filter(language))])
    if isinstance(filters, Mapping):
        if language is None:
            raise UserError(
                f"filters = {shown_value(filters)}: the table changes the rules of a language, and none is set; set "
                f"language"
            )
        return Chain([("", make_filter(language, filters))])
    return Chain([_step(name, options, language) for name, options in _listed(filters)])


def with_base(filters: Any, base: Path) -> Any:
    """``filters`` with the paths in them relative to ``base``."""
    if isinstance(filters, Mapping) or not any(name in _SECTIONS for name, _ in _listed(filters)):
        return filters
    found: list[dict[str, Any]] = []
    for name, options in _listed(filters):
        step = STEPS[name](options) if name in _SECTIONS else None
        found.append({name: step.with_base(base).options() if isinstance(step, FileSection) else options})
    return found


def sha256_of(path: str) -> str:
    """Of a file that filters read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: a filter needs this file: {error.strerror}") from error


def _listed(filters: Any) -> Iterator[tuple[str, Any]]:
    """(name, options) of each."""
    entries = [filters] if isinstance(filters, str) else filters
    if not isinstance(entries, list) or not entries:
        raise UserError(
            f"filters = {shown_value(filters)}: must be a table of rules, a filter's name, or a list of both"
        )
    for entry in entries:
        if isinstance(entry, str):
            yield entry, True
        elif isinstance(entry, Mapping) and entry:
            yield from entry.items()
        else:
            raise UserError(f"filters: {shown_value(entry)}: must be a filter's name or a table NAME = options")


def _step(name: str, options: Any, language: str | None) -> tuple[str, Step]:
    if name in STEPS:
        return "" if name in LANGUAGES else name, STEPS[name](options)
    if name in RULES:
        off = dict.fromkeys(RULES, False)
        return "", make_filter(language or "en", {**off, name: options})
    raise UserError(f"filter {name!r}: {nearest(name, [*STEPS, *RULES])}")
