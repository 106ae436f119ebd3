"""Which language a text is in, by py3langid's model, which comes with the package."""

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from lightscale.config.section import MOST_ENTRIES, ZeroToOne
from lightscale.data_pipeline.preparation.filters.judgement import FileSection, Judgement
from lightscale.errors import UserError

# Of a long text so many characters at its beginning, middle and end: more change the answer of few, and cost time.
_PART_CHARACTERS = 2000
# py3langid decides between all its languages however little there is.
_UNCERTAIN = "uncertain"


@lru_cache(maxsize=1)
def _identifier() -> tuple[Any, str]:
    """What tells languages apart, and its model's file."""
    try:
        from py3langid import langid  # noqa: PLC0415 - an optional package
    except ImportError:
        raise UserError("filter languages: py3langid is needed; pip install 'lightscale[corpus]'") from None
    path = Path(langid.MODEL_DIR) / langid.MODEL_FILE
    return langid.LanguageIdentifier.from_model_file(path, norm_probs=True), str(path)


class LanguageFilter(FileSection):
    """Keeps texts in some languages. The rule that drops one is the language found, or ``uncertain``."""

    keep: Annotated[list[str], Field(min_length=1, max_length=MOST_ENTRIES)]
    """Codes of ISO 639-1: "en", "zh"."""
    min_probability: ZeroToOne = 0.65
    """Minimum probability of the most likely language; the limit of FineWeb."""

    def files(self) -> list[str]:
        """See ``FileSection``: another model decides otherwise."""
        _check(tuple(self.keep))
        return [_identifier()[1]]

    def with_base(self, base: Path) -> Self:
        """The model is the package's."""
        return self

    def judge(self, text: str) -> Judgement:
        """See ``Step``."""
        _check(tuple(self.keep))
        language, probability = language_of(text)
        if language not in self.keep:
            return Judgement(text, rule=language, score=probability)
        if probability < self.min_probability:
            return Judgement(text, rule=_UNCERTAIN, score=probability)
        return Judgement(text)


@lru_cache(maxsize=64)
def _check(keep: tuple[str, ...]) -> None:
    """Not with the corpus file: the model takes seconds to load."""
    known = sorted(set(_identifier()[0].nb_classes))
    if wrong := [code for code in keep if code not in known]:
        raise UserError(
            f'filter languages.keep: language "{wrong[0]}" cannot be detected; use some of {", ".join(known)}'
        )


def language_of(text: str) -> tuple[str, float]:
    """The most likely language of ``text``, and how likely it is among all that are known."""
    if len(text) > 3 * _PART_CHARACTERS:
        middle = (len(text) - _PART_CHARACTERS) // 2
        parts = (text[:_PART_CHARACTERS], text[middle : middle + _PART_CHARACTERS], text[-_PART_CHARACTERS:])
        text = "\n".join(parts)
    language, probability = _identifier()[0].classify(text)
    return str(language), float(probability)
