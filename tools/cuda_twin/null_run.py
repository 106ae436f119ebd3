"""A program of the twin: ``python -m cuda_twin.null_run CASES.json FOUND.json``, each case in a process of its own."""

import importlib
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from cuda_twin.forks import in_fork, keep_devices_unused


def main() -> int:
    """The cases of the first argument, one after another; what was recorded to the second."""
    keep_devices_unused()
    steps = importlib.import_module("cuda_twin.null_steps")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="null-run-") as folder:
        for number, fields in enumerate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))):
            print(f"null run: {fields}", flush=True)
            case = Path(folder) / str(number)
            case.mkdir()
            # Megatron never gives back a model's memory: the next case would begin with it.
            if not in_fork(partial(_run, steps, fields, case)):
                return 1
            found.append(json.loads((case / "found.json").read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def _run(steps: Any, fields: dict[str, Any], folder: Path) -> None:
    found = steps.run(steps.NullCase(**fields), folder)
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
