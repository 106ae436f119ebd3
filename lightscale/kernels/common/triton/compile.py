"""Ahead-of-time compilation of Triton kernels for Hopper (sm_90), which needs no GPU.

Every operator's ``triton`` package exports ``COMPILE_CASES``: its kernels in the configurations that it launches.
``tools/compile_kernels.py`` and the tests hold each result (registers, spills, shared memory, tensor-core instructions)
to limits. A process that compiles must not run Triton's interpreter.
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
"""Most shared memory of a program on an H100 or H200, in bytes."""


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One kernel in one configuration of a launch on a GPU.

    The result equals the just-in-time compiler's for a usual call: pointers are aligned to 16 bytes, and integers
    marked ``:16`` are divisible by 16. Strides of 1 and all constants of a model are in ``constants``.
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
    """Whether the kernel must have tensor-core instructions, because it has a ``tl.dot``."""
    may_spill: bool = False
    """For fp32 configurations, which serve comparisons, and where narrower tiles compile to wrong numbers."""
    usual: bool = True
    """Whether every run of the tests may draw the case, not only the long run: a case takes a few seconds."""

    @classmethod
    def of(
        cls, name: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any
    ) -> "KernelCase":
        """The case with those of an operator's types and constants that this kernel's arguments name.

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
    """Figures of a compiled case, and in ``faults`` each broken limit in words."""

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
    """The operators with Triton kernels of their own; the other operators call the passes of one of these."""
    named = [name for name in operator_names() if "triton" in get_operator(name).backend_names]
    return sorted({get_operator(name).backend("triton").module: name for name in reversed(named)}.values())


def cases_of(operator: str) -> list[KernelCase]:
    """The cases of one of ``operators``."""
    cases: list[KernelCase] = implementation(operator, "triton").COMPILE_CASES
    return cases


def compile_case(case: KernelCase) -> Compiled:
    """Compile one case for sm_90 and read the figures of the result.

    Raises:
        ValueError: the case lacks an argument of the kernel, or names one that the kernel lacks.
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
    """Compile the case at (operator, number in its ``COMPILE_CASES``), a pair that pickle supports."""
    operator, number = case
    return compile_case(cases_of(operator)[number])


def faults(case: KernelCase, *, spills: int, shared_bytes: int, wgmma: int, mma: int, **_: int) -> Iterable[str]:
    """Each limit that the figures break, in words."""
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
