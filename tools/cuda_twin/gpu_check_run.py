"""A program of the twin: ``python -m cuda_twin.gpu_check_run ARGUMENT…``, ``make gpu-check``'s own code at small sizes.

Parts that compare what Triton's kernels compute interpret them. In the others the null device launches them and they
compute nothing, like kernels that a compiler has broken: a run finds that out at its start and does without them, and
where only speed is measured numbers do not matter. With ``--budget`` it is a visit (``gpu_visit.py``), whose parts have
more time: a CPU computes.
"""

import sys
from dataclasses import replace
from typing import TypeVar

import gpu_check
import gpu_visit

INTERPRETED = ("operators", "models", "kernels", "run", "bf16", "losses")
_VARIABLE = "TRITON_INTERPRET"
_SLOWER = 20.0
"""Times the limit of a visit's part."""


Part = TypeVar("Part", gpu_check.Part, gpu_visit.Part)


def _interpret(parts: dict[str, Part]) -> None:
    for name in set(INTERPRETED).intersection(parts):
        part: Part = parts[name]
        parts[name] = replace(part, command=("env", f"{_VARIABLE}=1", *part.command))


def main() -> int:
    """The exit code of the check. ``--broken``: kernels are not interpreted in any part."""
    arguments = sys.argv[1:]
    if "--broken" in arguments:
        arguments.remove("--broken")
    else:
        _interpret(gpu_check.PARTS)
        _interpret(gpu_visit.PARTS)
    for name, part in gpu_visit.PARTS.items():
        gpu_visit.PARTS[name] = replace(part, limit_s=_SLOWER * part.limit_s)
    return gpu_check.main(["--small", *arguments])


if __name__ == "__main__":
    sys.exit(main())
