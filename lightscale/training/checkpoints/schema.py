"""Schema of the JSON files of a checkpoint: types, ranges, and agreement within one file.

Values are not converted: ``true`` is no number, and ``"7"`` neither. A later version may add facts (manifest) or parts
(state): unknown ones are ignored. Within a part, unknown keys are damage, because they would change its meaning.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from lightscale.training.checkpoints.reading import DamagedCheckpoint, shown

# A name of 8 digits.
_MOST_STEPS = 99_999_999
# Of 5 digits.
_MOST_RANKS = 99_999
_MOST_LISTED = 1 << 20


def _printable(text: str) -> str:
    # Shown on terminals.
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


_Sum = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=1 << 62)]
_Text = Annotated[str, Field(max_length=4096), AfterValidator(_printable)]
_Ranks = Annotated[int, Field(ge=1, le=_MOST_RANKS)]
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
# Plain names, in the directory itself. Which ones a checkpoint has is checked with its layout.
_FileName = Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
_Word = Annotated[int, Field(ge=0, lt=1 << 32)]
_Bytes = Annotated[str, Field(pattern="^([0-9a-f]{2})+$", max_length=1 << 16)]
# The value of a key that is not there: ``null`` is no value of its type.
_MISSING: Any = None
# Tuples alone are lax: JSON has lists only. What is in them is strict.
_TUPLE = Field(strict=False)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class _File(_Strict):
    bytes: _Count
    xxh3_128: _Hash


class Recorded(_Strict):
    """Entries of every manifest; the facts of a checkpoint are added (``Facts``)."""

    model_config = ConfigDict(extra="ignore")

    files: Annotated[dict[_FileName, _File], Field(max_length=2 * _MOST_RANKS + 1)]


class _Layout(_Strict):
    tensor: _Ranks
    pipeline: _Ranks
    sequence: _Ranks
    data: _Ranks


class _Base(_Strict):
    checkpoint: _Text
    step: Annotated[int, Field(ge=0, le=_MOST_STEPS)]
    manifest: _Hash


class Facts(_Strict):
    """The facts of a manifest that are read."""

    model_config = ConfigDict(extra="ignore")

    step: Annotated[int, Field(ge=0, le=_MOST_STEPS)]
    # Manifests from before there were others do not say what is in a full checkpoint.
    contents: Literal["full", "weights"] = "full"
    tokens: _Count = 0
    store: _Text = ""
    config: _Text = ""
    attempt: _Count = 0
    tokenizer: _Text = ""
    # Of runs with a frozen model: adapters, and preferences with a reference.
    base: _Base | None = None
    layout: _Layout
    # Whether parameters that several pipeline stages hold were drawn alike; not in manifests from before they were.
    stage_copies: _Text = ""
    # How fp32 weights and state were found; not in manifests from before each parameter had its own.
    numbering: _Text = ""
    versions: Annotated[dict[_Text, _Text], Field(max_length=100)]
    hosts: Annotated[list[_Text], Field(max_length=_MOST_RANKS)]

    @model_validator(mode="after")
    def _agree(self) -> Self:
        axes = self.layout
        num_ranks = axes.tensor * axes.pipeline * axes.sequence * axes.data
        if num_ranks != len(self.hosts):
            raise ValueError(f"a layout of {num_ranks} ranks, and the hosts of {len(self.hosts)}")
        return self


class _Data(_Strict):
    tokens: _Count
    skips: Annotated[
        list[Annotated[tuple[_Count, Annotated[int, Field(ge=1, le=1 << 62)]], _TUPLE]], Field(max_length=_MOST_LISTED)
    ] = []
    # Behind skipped data; not in checkpoints from before batches could grow.
    position: _Count = 0
    fingerprint: Annotated[dict[_Text, _Text], Field(max_length=_MOST_LISTED)] | _Text

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if late := [at for at, _ in self.skips if at > self.tokens]:
            raise ValueError(f"{self.tokens} tokens, but data is skipped after {late[0]}")
        return self


class _Guard(_Strict):
    losses: Annotated[list[float], Field(max_length=_MOST_LISTED)]
    grad_norms: Annotated[list[Annotated[float, Field(ge=0)]], Field(max_length=_MOST_LISTED)]
    skips_in_a_row: Annotated[int, Field(ge=0, le=_MOST_STEPS)]

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if len(self.losses) != len(self.grad_norms):
            raise ValueError(f"{len(self.losses)} losses and {len(self.grad_norms)} norms of gradients")
        return self


class State(_Strict):
    """``state.json``; parts of the caller pass unchanged."""

    model_config = ConfigDict(extra="ignore")

    step: Annotated[int, Field(ge=0, le=_MOST_STEPS)]
    optimizer: Annotated[dict[_Text, _Count | _Sum], Field(max_length=_MOST_LISTED)] = _MISSING
    data: _Data = _MISSING
    guard: _Guard = _MISSING


class Generators(_Strict):
    """``rank-RRRRR.json``: the states of the random number generators, of the lengths that they take."""

    torch: Annotated[_Bytes, Field(min_length=2 * 5056, max_length=2 * 5056)]
    python: Annotated[
        tuple[Literal[3], Annotated[list[_Word], Field(min_length=625, max_length=625)], float | None], _TUPLE
    ]
    numpy: Annotated[
        tuple[
            Literal["MT19937"],
            Annotated[list[_Word], Field(min_length=624, max_length=624)],
            Annotated[int, Field(ge=0, le=624)],
            Annotated[int, Field(ge=0, le=1)],
            float,
        ],
        _TUPLE,
    ]
    cuda: Annotated[_Bytes, Field(min_length=32, max_length=32)] = _MISSING

    @model_validator(mode="after")
    def _agree(self) -> Self:
        # The last word is the position in the others.
        if not 1 <= self.python[1][-1] <= 624:
            raise ValueError(f"Python's generator at position {self.python[1][-1]} of 624")
        return self


_Shape = Annotated[list[Annotated[int, Field(ge=1, le=1 << 48)]], Field(max_length=8)]


class Whole(_Strict):
    """The shape of a whole tensor, beside the boxes of it."""

    shape: _Shape


class Place(_Strict):
    """A box in the header of a file of tensors, as the safetensors format has it."""

    dtype: Literal["F64", "F32", "BF16", "F16", "I64", "I32", "U8"]
    shape: _Shape
    data_offsets: Annotated[tuple[_Count, _Count], _TUPLE]


_Model = TypeVar("_Model", bound=BaseModel)


def checked(model: type[_Model], value: Any, path: Path, *names: str) -> _Model:
    """``value``, of the file ``path``, as a ``model``; ``DamagedCheckpoint`` names the first key that is not one's.

    ``names``: the keys that lead to ``value``.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, (*names, *first["loc"])))
        # A whole file would say nothing.
        found = f" = {shown(repr(first['input']))[:80]}" if first["loc"] else ""
        what = f"{where}{found}: {first['msg']}" if where else first["msg"]
        raise DamagedCheckpoint(f"{path}: {shown(what)}") from None
