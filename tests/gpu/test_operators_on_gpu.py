"""Every operator's Triton kernels on the device against fp64, outputs and gradients: `make gpu-check`.

Widths are those of the shipped sizes and odd ones; lengths go to a million tokens, tensors beyond 2^31 elements.
Lightning attention with decays of heads has a module of its own.
"""

import runpy
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.kernels.common.backends import choose_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: run `make gpu-check` on a machine that has one"),
    pytest.mark.timeout(300),  # kernels are compiled, and fp64 is slow
]
operators = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("operators.py"))))
Shape, LIMITS = operators.Shape, operators.LIMITS
HALF, FULL = torch.bfloat16, torch.float32

# Each shape compiles kernels anew, so not every width is tried in every dtype.
MIXER_CASES = [
    (HALF, 128, 128, True),
    (HALF, 128, 128, False),
    (HALF, 64, 64, True),
    (HALF, 80, 48, True),
    (torch.float16, 128, 128, True),
    (FULL, 64, 64, True),
    (FULL, 80, 48, False),
]
NORM_WIDTHS = (128, 512, 768, 1000, 1024, 1536, 2048, 2560, 4096)
GLU_WIDTHS = (384, 1000, 1536, 2048, 2816, 4096, 6912, 11008)
FEW_CASES = [*operators.LEARNED_ANGLES, "lion by channel", "whole lightnet with LRPE"]
CASES = [
    *((name, dtype, K, V, cut) for name in operators.MIXERS for dtype, K, V, cut in MIXER_CASES),
    *((name, dtype, K, K, True) for name in FEW_CASES for dtype, K in ((HALF, 128), (FULL, 64))),
    *(("tpe", *case) for case in ((HALF, 512, 128, True), (FULL, 96, 64, False), (HALF, 70, 16, True))),
    *(("log sum", dtype, width, 0, cut) for dtype in (HALF, FULL) for width, cut in ((3072, True), (70, False))),
    *(("relation", dtype, width, 0, cut) for dtype in (HALF, FULL) for width, cut in ((1024, True), (70, False))),
    *((name, HALF, width, 0, False) for name in ("norm", "gated norm") for width in NORM_WIDTHS),
    *((name, FULL, width, 0, False) for name in ("norm", "gated norm") for width in (1000, 2048)),
    *((name, HALF, width, 0, False) for name in ("glu", "glu silu", "glu sigmoid") for width in GLU_WIDTHS),
    *(("glu gelu", HALF, width, 0, False) for width in GLU_WIDTHS),
    *(("glu gelu_tanh", HALF, width, 0, False) for width in GLU_WIDTHS),
    ("glu silu", FULL, 1000, 0, False),
    *(("forget gate", dtype, width, 0, False) for dtype in (HALF, FULL) for width in (128, 80)),
    ("cross entropy", HALF, 512, 100_280, False),
    ("cross entropy", HALF, 2048, 100_280, False),
    ("cross entropy", FULL, 512, 5003, False),
]  # fmt: skip


def boundaries(cut: bool) -> Tensor | None:
    """Documents of two rows of 300 tokens."""
    return torch.tensor([0, 3, 64, 230, 231, 300, 428, 600], device="cuda") if cut else None


@pytest.mark.parametrize(("name", "dtype", "K", "V", "cut"), CASES, ids=lambda x: str(x).removeprefix("torch."))
def test_equals_the_reference_in_fp64(
    name: str, dtype: torch.dtype, K: int, V: int, cut: bool, record_property: Callable[[str, Any], None]
) -> None:
    inputs = operators.draw(name, Shape(rows=2, tokens=300, heads=3, K=K, V=V), dtype, "cuda", with_state=True)
    first = next(iter(inputs.values()))
    assert choose_backend(operators.case_of(name).operator, first) == "triton"
    expected = operators.results(name, inputs, "reference", boundaries(cut), exact=True)
    found = operators.results(name, inputs, "auto", boundaries(cut))
    ratios = operators.errors(found, expected)
    record_property("errors", ratios)
    assert not operators.wrong(ratios, dtype), ratios
    again = operators.results(name, inputs, "auto", boundaries(cut))
    assert all(torch.equal(found[key], again[key]) for key in found), "must not depend on the order of programs"


@pytest.mark.parametrize("tokens", [1, 63, 129, 8192, 65537, 2**20])
@pytest.mark.parametrize("name", [*operators.MIXERS, "tpe", "log sum"])
def test_any_length_in_bf16(name: str, tokens: int, record_property: Callable[[str, Any], None]) -> None:
    """Up to a million tokens, where the states of several splits are folded; the chunked form in fp64 is exact."""
    inputs = operators.draw(name, Shape(rows=1, tokens=tokens, K=128, V=128), HALF, "cuda", with_state=True)
    expected = operators.results(name, inputs, "chunked", exact=True)
    ratios = operators.errors(operators.results(name, inputs, "auto"), expected)
    record_property("errors", ratios)
    assert not operators.wrong(ratios, HALF), ratios


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize(
    ("name", "heads", "K", "V"),
    [
        *((name, 17, 128, 128) for name in operators.MIXERS),
        ("tpe", 1, 2064, 64),
        ("log sum", 1, 2064, 0),
        ("norm", 1, 2064, 0),
        ("gated norm", 1, 2064, 0),
        ("glu silu", 1, 1032, 0),
        ("forget gate", 17, 128, 0),
        ("cross entropy", 1, 2064, 512),
    ],
)
def test_more_than_two_to_the_31_elements(
    name: str, heads: int, K: int, V: int, record_property: Callable[[str, Any], None]
) -> None:
    """The last document of a million tokens, whose offsets are beyond 32 bits, against fp64 by itself."""
    if torch.cuda.get_device_properties(0).total_memory < 130e9:
        pytest.skip("needs 130 GB of GPU memory")
    tokens, last = 2**20 + 512, 400
    torch.cuda.empty_cache()
    inputs = operators.draw(name, Shape(rows=1, tokens=tokens, heads=heads, K=K, V=V), HALF, "cuda", with_state=False)
    assert max(x.numel() for x in inputs.values()) > 2**31
    cut = torch.tensor([0, tokens - last, tokens], device="cuda")
    found = operators.last_tokens(name, operators.results(name, inputs, "auto", cut, last=last), last)
    alone = operators.last_tokens(name, inputs, last)
    ratios = operators.errors(found, operators.results(name, alone, "reference", exact=True, last=last))
    record_property("errors", ratios)
    assert not operators.wrong(ratios, HALF), ratios


@pytest.mark.parametrize("name", [*operators.MIXERS, "tpe", "log sum"])
def test_passes_of_sequence_parallelism(name: str, record_property: Callable[[str, Any], None]) -> None:
    """What one rank computes of its part of a row, with a state that enters and a cotangent that comes back."""
    inputs = operators.draw(name, Shape(rows=2, tokens=1000, heads=2, K=128, V=128), HALF, "cuda", with_state=True)
    cut = torch.tensor([0, 900, 1000, 2000], device="cuda")
    package = import_module(f"lightscale.kernels.{operators.case_of(name).operator}")
    expected = operators.passes(name, operators.chunked_passes(name), inputs, cut, exact=True)
    ratios = operators.errors(operators.passes(name, package, inputs, cut), expected)
    record_property("errors", ratios)
    assert not operators.wrong(ratios, HALF), ratios
