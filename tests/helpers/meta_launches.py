"""Launches of the Triton kernels of every operator at sizes that no memory holds; loaded by path, without interpreter.

Tensors are on PyTorch's device "meta": they have shapes, strides and no memory. The launching code runs as on a GPU;
what would be launched is recorded, with the specialisation that Triton's own code gives its arguments.
"""

import json
import random
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from lightscale.kernels.common.angles import Angles
from lightscale.kernels.common.backends import implementation
from lightscale.kernels.common.triton import segments
from lightscale.kernels.common.triton.tracing import KernelLaunch, traced
from lightscale.kernels.lightnet import LightNetState
from lightscale.kernels.lightnet.triton.segments import fold as fold_lightnet
from lightscale.kernels.norm import triton as norm_launches
from lightscale.kernels.norm.eager import WIDEST, NormInputs
from lightscale.kernels.relation import triton as relation_launches
from lightscale.kernels.relation.triton.tiling import Band

HERE = Path(__file__).resolve().parent
operators = SimpleNamespace(**runpy.run_path(str(HERE.parent / "gpu" / "operators.py")))
index_ranges = SimpleNamespace(**runpy.run_path(str(HERE / "index_ranges.py")))

_TARGET = GPUTarget("cuda", 90, 32)
_BACKEND = make_backend(_TARGET)
# More than any GPU has, so that rows of 64 heads are cut into splits too, and the splits are folded.
_MULTIPROCESSORS = 1024
# These ask the host where documents are.
_ON_HOST = ("relation", "lightnet_noncausal")


def ttir(one: KernelLaunch) -> str:
    """Triton's intermediate representation of a launch's kernel."""
    bound, found, options = one.bound(debug=False)
    every = {**one.options, "debug": False}
    parsed, signature, constants, attributes = one.kernel._pack_args(_BACKEND, every, bound, found, options)
    context = ir.context()
    ir.load_dialects(context)
    _BACKEND.load_dialects(context)
    source = ASTSource(one.kernel, signature, constants, attributes)
    parts = _BACKEND.get_codegen_implementation(parsed), _BACKEND.get_module_map(), context
    module = type(_BACKEND).make_ttir(source.make_ir(_TARGET, parsed, *parts), {}, parsed, 90)
    return module.str_nodebug()  # type: ignore[no-any-return]


def wraps_in(one: KernelLaunch, loaded: tuple[int, int]) -> list[str]:
    """See ``index_ranges.wrapped_indices``."""
    bound, found = one.specialised()
    given = [value for value, (kind, _) in zip(bound.values(), found, strict=True) if kind != "constexpr"]
    return index_ranges.wrapped_indices(ttir(one), one.grid, given, loaded)  # type: ignore[no-any-return]


@contextmanager
def recorded() -> Iterator[list[KernelLaunch]]:
    """What is launched inside."""

    def last_band(first: Tensor, end: Tensor) -> Iterator[Band]:
        tokens = first.size(1)
        queries = min(tokens, 2048)
        yield Band(tokens - queries, queries, tokens - queries, queries)

    randn = torch.randn

    def drawn(*sizes: int, generator: Any, **options: Any) -> Tensor:
        return randn(*sizes, **options)

    with (
        # There are as many as the square of the length makes.
        mock.patch.object(relation_launches, "bands", last_band),
        # Neither has a form for this device, and nothing is drawn there.
        mock.patch.object(torch, "Generator", _NoGenerator),
        mock.patch.object(torch, "randn", drawn),
        traced(_MULTIPROCESSORS) as found,
    ):
        yield found


class _NoGenerator:
    def __init__(self, device: str) -> None:
        self.device = device

    def manual_seed(self, seed: int) -> "_NoGenerator":
        return self


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Of one launch of every operator."""

    rows: int = 1
    tokens: int
    heads: int
    document: int
    """Tokens of a document."""
    ids: int = 2**17
    """Of the loss."""

    def cut(self, operator: str) -> Tensor:
        """Boundaries of documents."""
        edges = torch.arange(0, self.rows * self.tokens + 1, self.document)
        edges[-1] = self.rows * self.tokens
        return edges if operator in _ON_HOST else edges.to("meta")


def of_operators(batch: Batch, dtype: torch.dtype, found: list[KernelLaunch]) -> dict[str, list[KernelLaunch]]:
    """Launches of every operator, forward and backward, by the operator's case; ``found`` is what ``recorded`` gave."""
    launches = {}
    for name, case in operators.OPERATORS.items():
        found.clear()
        inputs = operators.draw(name, _shape(name, batch), dtype, "meta", with_state=False)
        operators.results(name, inputs, "triton", batch.cut(case.operator))
        launches[name] = list(found)
    return launches


def of_passes(batch: Batch, dtype: torch.dtype, found: list[KernelLaunch]) -> list[KernelLaunch]:
    """Launches of the passes with states, of the folds of states, and of a token of generation of each row."""
    found.clear()
    for name, case in operators.OPERATORS.items():
        if case.passes is not None:
            inputs = operators.draw(name, _shape(name, batch), dtype, "meta", with_state=True)
            operators.passes(name, implementation(case.operator, "triton"), inputs, batch.cut(case.operator))
    _fold_and_step(batch, dtype)
    return list(found)


def _shape(name: str, batch: Batch) -> Any:
    """All heads as channels where there are no heads."""
    by_heads = name in operators.MIXERS or name in operators.LEARNED_ANGLES or "lightnet" in name or "lion" in name
    if by_heads:
        return operators.Shape(rows=batch.rows, tokens=batch.tokens, heads=batch.heads, K=_WIDTH, V=_WIDTH)
    modes = {"tpe": 16, "cross entropy": batch.ids}.get(name, 0)
    if name == "cross entropy":  # pieces of equal size, as many as there is room for
        return operators.Shape(rows=1, tokens=min(batch.tokens, 2**13), K=_WIDTH * batch.heads, V=modes)
    # Rows wider than the norm's kernels take are PyTorch's: as many elements in rows that are not.
    width, times = _WIDTH * batch.heads, 1
    if "norm" in name and width > WIDEST:
        width, times = WIDEST, width // WIDEST
    return operators.Shape(rows=batch.rows * times, tokens=batch.tokens, K=width, V=modes)


def _fold_and_step(batch: Batch, dtype: torch.dtype) -> None:
    def of(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    heads, width = batch.heads, _WIDTH
    state, keys = (heads, 2 * width, width), (heads, width)
    segments.fold(of(_SEGMENTS, 1, *state), of(_SEGMENTS, 1, heads, 1, 1), of(1, *state), reverse=False)
    summaries = LightNetState(of(_SEGMENTS, 1, *keys), of(_SEGMENTS, 1, *state))
    fold_lightnet(summaries, of(_SEGMENTS, 1, heads), LightNetState(of(1, *keys), of(1, *state)), end=_SEGMENTS)
    rows = batch.rows * batch.tokens
    q = of(rows, *keys, dtype=dtype)
    S = of(rows, heads, width, width)
    triton = {name: implementation(name, "triton") for name in ("lightning", "gla", "delta_rule", "lightnet", "tpe")}
    triton["lightning"].recurrent_step(q, q, q, of(rows, heads), S)
    triton["gla"].recurrent_step(q, q, q, of(rows, *keys), S)
    triton["delta_rule"].recurrent_step(q, q, q, of(rows, *keys), of(rows, heads), S)
    angles = Angles(of(*keys), of(rows, dtype=torch.int64))
    triton["lightnet"].recurrent_step(q, q, q, LightNetState(of(rows, *keys), of(rows, *state)), angles)
    channels = heads * width
    given = of(rows, channels, dtype=dtype), of(16), of(channels, 16)
    # As where tensor ranks share out the channels of a norm.
    x = of(batch.rows, batch.tokens * heads, width, dtype=dtype)
    inputs = NormInputs(x, of(width, dtype=dtype), x, "sigmoid")
    norm_launches.square_sums(x)
    norm_launches.cotangent_sums(inputs, of(*x.shape[:2]), x)
    triton["tpe"].recurrent_step(*given, of(rows, channels, 16))


_WIDTH = 128
_SEGMENTS = 1024


def wrapped_indices(
    launches: Sequence[KernelLaunch], loaded: tuple[int, int], *, every_form: bool
) -> dict[str, list[str]]:
    """By kernel: of the launch that gives it the most tensors, or of one launch in each form."""
    forms: dict[str, dict[str, KernelLaunch]] = {}
    for one in sorted(launches, key=lambda one: -sum(isinstance(word, Tensor) for word in one.words)):
        of_kernel = forms.setdefault(one.name, {})
        if every_form or not of_kernel:
            of_kernel.setdefault(str(one.specialised()[1]), one)
    return {
        name: [fault for one in of_kernel.values() for fault in wraps_in(one, loaded)]
        for name, of_kernel in forms.items()
    }


def variants(batches: Sequence[dict[str, list[KernelLaunch]]]) -> dict[str, dict[str, Any]]:
    """By operator and kernel: compiled variants of one batch, of all batches, and integers of more than one type."""
    keys: dict[str, list[set[tuple[tuple[str, str], ...]]]] = {}
    for batch in batches:
        of_batch: dict[str, set[tuple[tuple[str, str], ...]]] = {}
        for case, launches in batch.items():
            for one in launches:
                bound, found = one.specialised()
                key = tuple((name, str(kind)) for name, kind in zip(bound, found, strict=True))
                of_batch.setdefault(f"{case}: {one.name}", set()).add(key)
        for name, some in of_batch.items():
            keys.setdefault(name, []).append(some)
    return {
        name: {
            "batch": max(map(len, some)),
            "run": len(set().union(*some)),
            "integers": sorted(set().union(*map(_integers, zip(*set().union(*some), strict=True)))),
        }
        for name, some in keys.items()
    }


def _integers(column: tuple[tuple[str, str], ...]) -> set[str]:
    """Of one argument in all variants: what it is taken for, if that is not always the same."""
    kinds = {kind for _, kind in column if kind.startswith("('i")}
    return {f"{column[0][0]}: {', '.join(sorted(kinds))}"} if len(kinds) > 1 else set()


def main(what: str) -> None:
    """Print what ``test_triton_launches.py`` asks for, as JSON: "one" or "every" form, or a number of batches."""
    with recorded() as found:
        answer = _variants(found, int(what)) if what.isdigit() else _sizes(found, every_form=what == "every")
    print(json.dumps(answer))


def _sizes(found: list[KernelLaunch], *, every_form: bool) -> dict[str, Any]:
    """Grids, and indices that may wrap, of 4M tokens and 64 heads of 128 as one row, and as rows of 32 tokens."""
    one_row = Batch(tokens=2**22, heads=64, document=2**12)
    rows = Batch(rows=2**17, tokens=2**5, heads=64, document=2**5)
    long, short = (_every(batch, found) for batch in (one_row, rows))
    wraps = KernelLaunch(seeded, (2**22,), (torch.empty(2**35, device="meta"), 2**13), {})
    return {
        "grids": [[one.name, *one.grid] for one in (*long, *short)],
        "elements": max(x.numel() for one in long for x in one.words if isinstance(x, Tensor)),
        "wrapped": wrapped_indices(long, (-1, 2**22), every_form=every_form),
        "seeded": wraps_in(wraps, (0, 0)),
    }


def _every(batch: Batch, found: list[KernelLaunch]) -> list[KernelLaunch]:
    launches = of_operators(batch, torch.bfloat16, found).values()
    return [*chain.from_iterable(launches), *of_passes(batch, torch.bfloat16, found)]


def _variants(found: list[KernelLaunch], batches: int) -> dict[str, Any]:
    """Of batches of random lengths and documents; the first two are cut into one split and into several."""
    source = random.Random(0)
    lengths = [100, 2000, *(source.randint(40, 2000) for _ in range(batches - 2))]
    drawn = [Batch(tokens=n, heads=16, document=source.randint(8, n), ids=1000) for n in lengths]
    return variants([of_operators(batch, torch.bfloat16, found) for batch in drawn])


@triton.jit
def seeded(x, stride):  # type: ignore[no-untyped-def]
    """An index that wraps: the number of a program is of 32 bits."""
    tl.store(x + tl.program_id(0) * stride, 0.0)


if __name__ == "__main__":
    main(sys.argv[1])
