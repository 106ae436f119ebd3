"""One rank of the computing twin: ``python -m cuda_twin.computing_run CASES.json FOUND``, each case in its own process.

All ranks go through the cases together; what a rank finds of case 3 is in FOUND.3.RANK.
"""

import importlib
import json
import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cuda_twin.forks import in_fork, keep_devices_unused


def main() -> int:
    """The cases of the first argument, one after another."""
    keep_devices_unused()
    steps = importlib.import_module("cuda_twin.computing_steps")
    rank = int(os.environ["RANK"])
    for number, fields in enumerate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))):
        print(f"computing: {fields}", flush=True)
        if not in_fork(partial(_run, steps, fields, rank, f"{sys.argv[2]}.{number}.{rank}")):
            return 1
    return 0


def _run(steps: Any, fields: dict[str, Any], rank: int, path: str) -> None:
    # Imported late: it asks Triton.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    with importlib.import_module("cuda_twin.upcast").upcast() if interpreted else nullcontext():
        torch.save(steps.run(steps.ComputingCase(**fields), rank), path)


if __name__ == "__main__":
    sys.exit(main())
