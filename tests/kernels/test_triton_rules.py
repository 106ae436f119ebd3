"""Triton kernels are written around known faults of compilers: what must not stand in their sources."""

import ast
import functools
import re
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "lightscale" / "kernels"
SOURCES = sorted(path for path in KERNELS.glob("*/triton/*.py"))

# Pattern, why, and a line that must be found.
RULES = {
    "block pointers": (r"make_block_ptr|\badvance\(", "Triton 3.9 raises", "p = tl.make_block_ptr(x)"),
    "eight warps": (r"(?i)num_warps\W+(?:8|16|32)\b", "crashes on H100, Triton 3.0 to 3.6", "f[grid](x, num_warps=8)"),
    "autotune": (r"\bautotune\b", "tunes again when a length changes, and is not reproducible", "@triton.autotune("),
    "transposed tiles": (
        r"tl\.trans\b|tl\.permute\b|\.T\b|\.trans\(",
        "a dot's result, transposed and fed to another dot, is silently wrong on Hopper, Triton 3.4 to 3.7: "
        "swap the operands of the first dot, or load with swapped strides",
        "acc = tl.dot(tl.trans(p), v)",
    ),
    "32-bit program numbers": (
        r"tl\.program_id\(\d\)(?!\.to\(tl\.int64\))",
        "offsets built from it overflow beyond 2^31 elements",
        "pid = tl.program_id(0)",
    ),
    "lengths as constants": (
        r"\b(?:T|B|num_tokens|num_rows|num_chunks)\s*:\s*tl\.constexpr",
        "compiles anew for every length",
        "    T: tl.constexpr,",
    ),
    "atomics": (r"tl\.atomic_", "the order of additions, and so the result, changes from run to run", "tl.atomic_add("),
    "not interpreted": (r"libdevice|inline_asm", "the interpreter cannot run it, so no test does", "libdevice.exp(x)"),
}


# These speak of what is inside a kernel; the others of the whole file.
IN_KERNELS = {"transposed tiles", "32-bit program numbers", "lengths as constants"}


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.copy_location(ast.Pass(), node) if is_text else node


@functools.cache
def kernels(path: Path) -> list[ast.FunctionDef]:
    """The functions that Triton compiles."""
    tree = _WithoutDocstrings().visit(ast.parse(path.read_text(encoding="utf-8")))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any("triton.jit" in ast.unparse(d) for d in f.decorator_list)]


@functools.cache
def code(path: Path, *, in_kernels: bool) -> list[str]:
    """Lines without comments and docstrings."""
    tree = _WithoutDocstrings().visit(ast.parse(path.read_text(encoding="utf-8")))
    parts = kernels(path) if in_kernels else [tree]
    return [line for part in parts for line in ast.unparse(part).splitlines()]


def test_kernels_are_found() -> None:
    assert {path.parents[1].name for path in SOURCES} >= {
        "common",
        "delta_rule",
        "gla",
        "lightnet",
        "lightning",
        "lion",
        "norm",
        "tpe",
    }
    names = {kernel.name for path in SOURCES for kernel in kernels(path)}
    assert {"scan_states", "fold_splits", "attend", "recurrent"} <= names


@pytest.mark.parametrize("rule", RULES)
def test_known_faults_are_designed_out(rule: str) -> None:
    pattern, why, example = RULES[rule]
    assert re.search(pattern, example), "the rule must find its example"
    for path in SOURCES:
        found = [line for line in code(path, in_kernels=rule in IN_KERNELS) if re.search(pattern, line)]
        assert not found, f"{path.relative_to(KERNELS)}: {why}: {found}"


def uses_both(function: ast.FunctionDef) -> bool:
    called = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    return {"tl.cumsum", "tl.sum"} <= called


def test_no_kernel_has_both_cumsum_and_sum() -> None:
    """Suspected of crashes with several warps on H100."""
    bad = ast.parse("def f(x):\n    y = tl.cumsum(x, 0)\n    return tl.sum(y, 0)").body[0]
    assert isinstance(bad, ast.FunctionDef) and uses_both(bad)
    for path in SOURCES:
        assert not [kernel.name for kernel in kernels(path) if uses_both(kernel)], path
