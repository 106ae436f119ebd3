"""The request of ``lightscale predict``, found and checked without torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from lightscale.config.model import Pooling
from lightscale.errors import UserError
from lightscale.evaluation.chosen_run import ChosenRun
from lightscale.evaluation.prediction.documents import MaskWriting
from lightscale.files import NotRegular, read_regular

Kind = Literal["fillings", "classes", "embeddings"]
_MOST_CLASSES_BYTES = 2**28


class Document(Protocol):
    """A text or an image."""

    @property
    def ids(self) -> NDArray[Any]:
        """(n,) ids of tokens, or (n, p) bytes of patches."""

    def record(self) -> dict[str, Any]:
        """What names it beside its prediction."""

    def heading(self) -> str:
        """Its line for people."""


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """Documents, and the kind of prediction for each."""

    chosen: ChosenRun
    kind: Kind
    documents: Sequence[Document]
    masks: MaskWriting | None
    """Where fillings are asked for."""
    pooling: Pooling | None
    """Where embeddings are: of which tokens."""
    top: int
    """Fillings or classes that are named, the most probable first."""
    class_names: Sequence[str]
    """By number, as far as they are known."""
    grid: Sequence[int] | None
    """Rows and columns of patches of images of another size than in training."""
    row_tokens: int
    out: Path | None
    as_json: bool

    def class_name(self, number: int) -> str:
        """That of class ``number``, or the number where it has none."""
        return self.class_names[number] if number < len(self.class_names) else str(number)


def class_names(chosen: ChosenRun) -> list[str]:
    """The names of the classes that a run keeps, by number; none where its store had none."""
    path = chosen.directory.classes
    try:
        names = json.loads(read_regular(path, what="a list of classes", most_bytes=_MOST_CLASSES_BYTES))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError, NotRegular) as error:
        raise UserError(f"{path}: damaged ({error}); remove it to show class numbers") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: not a list of names; remove it to show class numbers")
    return names
