"""A program of the twin: ``python -m cuda_twin.gpu_check_run ARGUMENT…``, ``make gpu-check``'s own code at small sizes.

Parts that compare what Triton's kernels compute interpret them. In the others the null device launches them and they
compute nothing, like kernels that a compiler has broken: a run finds that out at its start and does without them, and
where only speed is measured numbers do not matter.
"""

import sys
from dataclasses import replace

import gpu_check

INTERPRETED = ("operators", "models", "kernels")
_VARIABLE = "TRITON_INTERPRET"


def main() -> int:
    """The exit code of the check. ``--broken``: kernels are not interpreted in any part."""
    arguments = sys.argv[1:]
    if "--broken" in arguments:
        arguments.remove("--broken")
    else:
        for name in INTERPRETED:
            part = gpu_check.PARTS[name]
            gpu_check.PARTS[name] = replace(part, command=("env", f"{_VARIABLE}=1", *part.command))
    return gpu_check.main(["--small", *arguments])


if __name__ == "__main__":
    sys.exit(main())
