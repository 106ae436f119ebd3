"""Building blocks of configuration sections: bounded value types, and the base type of all sections.

Corpus files, task files and the options of mixers use them too.
"""

import itertools
import re
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails

from lightscale.config.text import path_fault, text_fault

# Bounds lie far beyond what has been trained, and keep arithmetic, messages and allocations small whatever is written.
MOST_LAYERS = 10_000
MOST_RANKS = 1_000_000
MOST_IDS = 2**24
"""Largest vocabulary, in tokens."""
MOST_ENTRIES = 10_000
"""Most entries of a list, or of a table with keys that the user chooses."""
MOST_SEQUENCE_TOKENS = 2**30
_MOST_STEPS, _MOST_TOKENS = 10**9, 10**15

# Of little things: failures, skips, checkpoints.
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=1_000_000)]
Width = Annotated[int, Field(ge=1, le=2**20)]
WidthOrZero = Annotated[int, Field(ge=0, le=2**20)]
Steps = Annotated[int, Field(ge=1, le=_MOST_STEPS)]
StepsOrZero = Annotated[int, Field(ge=0, le=_MOST_STEPS)]
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Ids = Annotated[int, Field(ge=1, le=MOST_IDS)]
IdsOrZero = Annotated[int, Field(ge=0, le=MOST_IDS)]
# Of a patch, in pixels: its numbers are a row of a matrix.
Extent = Annotated[int, Field(ge=1, le=1024)]
# Positions are written as floats of 32 bits at places.
SequenceLength = Annotated[int, Field(ge=1, le=MOST_SEQUENCE_TOKENS)]
# What generators of random numbers take.
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, le=604_800, allow_inf_nan=False)]
Small = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
PositiveOrZero = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Finite = Annotated[float, Field(ge=-1e6, le=1e6)]
ZeroToOne = Annotated[float, Field(ge=0, le=1)]


def _path(value: object) -> object:
    """`value` as it is. ValueError where it is a text that can be no path."""
    if isinstance(value, str) and (fault := path_fault(value)):
        raise ValueError(fault)
    return value


# TOML has neither paths nor tuples: they are read from text and from lists, everything else as it is.
PathText = Annotated[Path, Field(strict=False), BeforeValidator(_path)]


def _whole(value: object) -> object:
    """300e9 -> 300_000_000_000, as people write token counts; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


TokenCount = Annotated[int, Field(ge=1, le=_MOST_TOKENS), BeforeValidator(_whole)]


_RUN_AT_STEP = re.compile(r".+@[0-9]{1,10}")


def _run_at_step(value: str) -> str:
    if not _RUN_AT_STEP.fullmatch(value):
        raise ValueError('must be RUN@STEP, like "runs/first@1000"')
    return value


RunAtStep = Annotated[str, AfterValidator(_run_at_step)]
"""A checkpoint: the directory of a run, and a step of it."""


def _check_texts(value: Any) -> None:
    """ValueError where a text in `value`, also in its lists and tables, can be no value."""
    if isinstance(value, str):
        if fault := text_fault(value):
            raise ValueError(fault)
    elif isinstance(value, (dict, list, tuple)):
        # What is read from a file has no more than some levels.
        for one in itertools.chain(value, value.values() if isinstance(value, dict) else ()):
            _check_texts(one)


def _holds_section(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(map(_holds_section, get_args(annotation)))


class Section(BaseModel):
    """Base type of all sections: frozen, no unknown keys, no silent conversions, documented fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _unset(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        # Sections check their own, and name the whole key.
        if not _holds_section(annotation):
            _check_texts(value)
        # TOML has no null: "none" unsets an optional field that an earlier file, or its default, set.
        return None if value == "none" and type(None) in get_args(annotation) else value


def error_inside(name: str, error: dict[str, Any]) -> InitErrorDetails:
    """Move a pydantic error of the table `name` into the table that contains it."""
    return InitErrorDetails(
        type=error["type"], loc=(name, *error["loc"]), input=error["input"], ctx=error.get("ctx", {})
    )
