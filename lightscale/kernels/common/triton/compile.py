"""Ahead-of-time compilation of Triton kernels for Hopper (sm_90), which needs no GPU.

Every operator's ``triton`` package exports ``COMPILE_CASES``: its kernels in the configurations that it launches. What
they compile to (registers, spills, shared memory, tensor-core instructions) is held to limits by
``tools/compile_kernels.py`` and the tests. A process that compiles must not run Triton's interpreter.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightscale.kernels.common.backends import implementation
from lightscale.kernels.operators import get_operator, operator_names

_TARGET = GPUTarget("cuda", 90, 32)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

MAX_SHARED_BYTES = 227 * 1024
"""What a program may use of an H100's or H200's shared memory."""


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One kernel in one configuration, as it is launched on a GPU.

    Compiles to what the just-in-time compiler makes of a usual call: pointers aligned to 16 bytes, integers marked
    ``:16`` divisible by 16, strides of 1 and everything that is constant for a model in ``constants``.
    """

    name: str
    """Operator, kernel, shapes and dtype, for people: "lightning attend 128x128 bf16"."""
    kernel: Any
    """The function that ``triton.jit`` made."""
    arguments: Mapping[str, str]
    """Type of each argument that is not constant: "*bf16", "fp32", "i32", "i32:16", "i64"."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Value of each constexpr argument; None for a pointer that is not given."""
    num_warps: int = 4
    num_stages: int = 2
    tensor_cores: bool = True
    """Whether it must have tensor-core instructions: it has a ``tl.dot``."""
    may_spill: bool = False
    """For fp32 configurations, which exist to be compared with, and where narrower tiles compile to wrong numbers."""
    usual: bool = True
    """Whether every run of the tests compiles it, not only the long one: a few seconds each."""

    @classmethod
    def of(
        cls, name: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any
    ) -> "KernelCase":
        """The case by types and constants for any of an operator's kernels: of them, those that this one has.

        An argument that neither names is a pointer to fp32.
        """
        names: list[str] = kernel.arg_names
        return cls(
            name=name,
            kernel=kernel,
            arguments={n: types.get(n, "*fp32") for n in names if n not in constants},
            constants={n: constants[n] for n in names if n in constants},
            **options,
        )


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a case compiled to, and in ``faults`` what breaks the limits, in words."""

    name: str
    registers: int
    """Per thread."""
    spills: int
    """Instructions that store registers to local memory or load them back."""
    shared_bytes: int
    wgmma: int
    """Warp-group matrix instructions of Hopper."""
    mma: int
    """Older matrix instructions, of one warp."""
    instructions: int
    faults: tuple[str, ...]


def operators() -> list[str]:
    """The operators that have Triton kernels of their own; others are passes of one of these."""
    named = [name for name in operator_names() if "triton" in get_operator(name).backend_names]
    return sorted({get_operator(name).backend("triton").module: name for name in reversed(named)}.values())


def cases_of(operator: str) -> list[KernelCase]:
    """The cases of one of ``operators``."""
    cases: list[KernelCase] = implementation(operator, "triton").COMPILE_CASES
    return cases


def compile_case(case: KernelCase) -> Compiled:
    """Compile one case for sm_90 and read what came out.

    Raises:
        ValueError: arguments of the kernel that the case does not name, or names that the kernel has not.
    """
    names = case.kernel.arg_names
    if wrong := set(names) ^ {*case.arguments, *case.constants}:
        raise ValueError(f"{case.name}: arguments {sorted(wrong)} are not those of {case.kernel.__name__}")
    signature = {name: case.arguments.get(name, "constexpr").partition(":")[0] for name in names}
    aligned = [i for i, n in enumerate(names) if (t := case.arguments.get(n, "")).startswith("*") or t.endswith(":16")]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(case.kernel, signature, dict(case.constants), attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=_TARGET, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _cuobjdump("--dump-resource-usage", cubin.name)
        sass = _cuobjdump("--dump-sass", cubin.name)
    figures = {
        "registers": int(_only(r"REG:(\d+)", usage)),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        "shared_bytes": int(compiled.metadata.shared),
        "wgmma": len(re.findall(r"\b[HIQ]GMMA\b", sass)),
        "mma": len(re.findall(r"\b[HI]MMA\b", sass)),
        "instructions": len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE)),
    }
    return Compiled(name=case.name, **figures, faults=tuple(faults(case, **figures)))


def compile_nth(case: tuple[str, int]) -> Compiled:
    """Compile the case at (operator, number in its ``COMPILE_CASES``); both can be sent to another process."""
    operator, number = case
    return compile_case(cases_of(operator)[number])


def faults(case: KernelCase, *, spills: int, shared_bytes: int, wgmma: int, mma: int, **_: int) -> Iterable[str]:
    """What breaks the limits."""
    if spills and not case.may_spill:
        yield f"{spills} spills"
    if shared_bytes > MAX_SHARED_BYTES:
        yield f"{shared_bytes} bytes of shared memory, more than {MAX_SHARED_BYTES}"
    if case.tensor_cores and not wgmma + mma:
        yield "no tensor-core instruction"


def _cuobjdump(option: str, cubin: str) -> str:
    return subprocess.run([_TOOLS / "cuobjdump", option, cubin], check=True, capture_output=True, text=True).stdout


def _only(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text)
    assert isinstance(found, str)
    return found
