"""Cases that were kept, as JSON lines: {"seed", "number", "case", "wrong"}, ``wrong`` a line for each failure."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from layout_fuzzing.drawing import Drawn


def read_case(text: str) -> Drawn:
    """A case as ``command`` writes it."""
    values: dict[str, Any] = json.loads(text)
    return Drawn(**{**values, "cuts": None if values.get("cuts") is None else tuple(values["cuts"])})


def read_cases(paths: Iterable[Path]) -> list[Drawn]:
    """The cases without failures of files as ``--out`` writes them, and of folders of such files."""
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [read_case(json.dumps(line["case"])) for line in lines if not line["wrong"]]
