"""LightNet over whole documents by Triton, interpreted in fp32, against the reference in fp64; parts of rows."""

import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.common.angles import angles_of
from lightscale.kernels.common.backends import set_default_backend
from lightscale.kernels.lightnet import Angles, lightnet_noncausal, noncausal
from lightscale.kernels.lightnet.triton import tiling, whole

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "drawing.py")))
comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
boundaries, error, assert_close = comparing.boundaries, comparing.error, comparing.assert_close
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "SPLIT_TOKENS", 24)
    monkeypatch.setattr(whole, "_FP32_TILE", 16)


def draw(rows: int, tokens: int, K: int, V: int, *, heads: int = 1, angles: bool = True, first: int = 0) -> Tensors:
    """``first``: the position of each row's first token."""
    generator = torch.Generator().manual_seed(tokens + K)

    def normal(*shape: int) -> Tensor:
        # Rounded, so that fp32 and fp64 compute the same.
        return torch.randn(shape, generator=generator).double()

    inputs = {name: normal(rows, tokens, heads, K) for name in ("q", "k")}
    inputs |= {name: normal(rows, tokens, heads, V) for name in ("v", "do")}
    if angles:
        inputs |= {"theta": 2 * normal(heads, K), "positions": (torch.arange(tokens) + first).repeat(rows, 1)}
    return inputs


def run(inputs: Tensors, cu_seqlens: Tensor | None, backend: str) -> Tensors:
    """Outputs and all gradients; fp32 by Triton, fp64 by the reference."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    x = {name: one if name == "positions" else one.detach().to(dtype) for name, one in inputs.items()}
    leaves = {name: x[name].requires_grad_() for name in ("q", "k", "v", "theta") if name in x}
    angles = angles_of(x.get("theta"), x.get("positions"))
    o = lightnet_noncausal(x["q"], x["k"], x["v"], angles=angles, cu_seqlens=cu_seqlens, backend=backend)
    found: Tensors = comparing.with_gradients({"o": o}, [x["do"]], leaves)
    return found


FAR = 1000
OF_FAR_ANGLES = 1e-4
"""Only distances count, some 20 tokens here: of terms times ``FAR`` all but a 50th cancels, but not their rounding.

From 0 on the gradients are right to 6e-7, from ``FAR`` on to 3e-5."""


def assert_near(actual: Tensors, expected: Tensors, first: int = 0) -> None:
    if first:
        assert error(actual.pop("dtheta"), expected.pop("dtheta")) < OF_FAR_ANGLES
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("tokens", "angles", "first", "starts"),
    drawing.some(
        "whole documents",
        [
            (0, True, 0, None),
            (1, False, 0, None),
            (50, True, FAR, None),
            (50, False, 0, [[0], [24, 49]]),
            (41, True, 0, [[1, 2, 17, 33], [16, 40]]),
        ],
        2,
    ),
)
def test_any_length_and_documents(tokens: int, angles: bool, first: int, starts: list[list[int]] | None) -> None:
    """Splits of 24 tokens in tiles of 16; widths that tiles do not fill; two heads."""
    inputs = draw(2, tokens, 20, 24, heads=2, angles=angles, first=first)
    cu_seqlens = None if starts is None else boundaries(starts, tokens)
    if not tokens:
        assert run(inputs, None, "triton")["dk"].shape == inputs["k"].shape
        return
    assert_near(run(inputs, cu_seqlens, "triton"), run(inputs, cu_seqlens, "reference"), first)


def test_extreme_keys_and_padding() -> None:
    """Keys that rise by 160 inside a tile and between splits; padding, a whole document of it; heavy tails."""
    inputs = draw(1, 60, 12, 8)
    inputs["k"] *= 10
    inputs["k"][:, 5:40] -= 80
    inputs["k"][:, 30:] += 80
    for part in (slice(0, 3), slice(41, 50), slice(57, 60)):
        inputs["k"][:, part] = -torch.inf
    inputs["k"] = inputs["k"].float().double()
    cu_seqlens = boundaries([[41, 50]], 60)
    found = run(inputs, cu_seqlens, "triton")
    assert all(x.isfinite().all() for x in found.values())
    assert not found["o"][:, 41:50].any() and not found["dk"][inputs["k"] == -torch.inf].any()
    assert_near(found, run(inputs, cu_seqlens, "chunked"))


def test_half_precision_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16, which the interpreter computes (on GPUs dots are bf16); heads first in memory, slices of a projection."""
    monkeypatch.setattr(tiling, "_HALF", replace(tiling._HALF, compute=torch.float16))
    inputs = {name: x.half().double() if x.is_floating_point() and name != "theta" else x
              for name, x in draw(2, 40, 16, 16, heads=2).items()}  # fmt: skip
    both = torch.stack([inputs["k"], inputs["v"]], dim=3).half()
    q = inputs["q"].half().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    k, v = (x.requires_grad_() for x in both.unbind(3))
    theta = inputs["theta"].float().requires_grad_()
    o = lightnet_noncausal(q, k, v, angles=Angles(theta, inputs["positions"]), backend="triton")
    found = comparing.with_gradients({"o": o}, [inputs["do"].half()], {"q": q, "k": k, "v": v, "theta": theta})
    assert {name: x.dtype for name, x in found.items() if x.dtype != torch.float16} == {"dtheta": torch.float32}
    expected = run(inputs, None, "reference")
    assert_close(found, {name: expected[name] for name in found}, 3e-3)


@pytest.fixture
def by_triton() -> Iterator[None]:
    set_default_backend("triton")
    yield
    set_default_backend("auto")


@pytest.mark.usefixtures("by_triton")
def test_parts_of_rows_on_ranks() -> None:
    """Three segments, one of one token, whose document goes through all of them: the passes that ranks call."""
    inputs = draw(1, 45, 12, 16, first=FAR)
    expected = run(inputs, None, "reference")
    x = {name: one if name == "positions" else one.float() for name, one in inputs.items()}
    segments = [slice(0, 20), slice(20, 21), slice(21, 45)]

    def own(name: str, segment: slice) -> Tensor:
        return x[name][:, segment]

    angles = [Angles(x["theta"], own("positions", one)) for one in segments]
    ranks = list(zip(segments, angles, strict=True))
    states = [noncausal.document_states(own("k", one), own("v", one), turns, None) for one, turns in ranks]
    total = states[0]
    for one in states[1:]:
        total = noncausal.total_states(one, noncausal.Sides(total, empty_like(total)), None, x["q"])
    parts = [noncausal.state_bwd(own("q", one), own("do", one), turns)[0] for one, turns in ranks]
    of_angles = torch.zeros_like(expected["dtheta"])
    for rank, (segment, own_angles) in enumerate(ranks):
        q, k, v, do = (own(name, segment) for name in ("q", "k", "v", "do"))
        o = noncausal.out_fwd(q, v, own_angles, total)
        before, behind = (sum(some, torch.zeros_like(parts[0])) for some in (parts[:rank], parts[rank + 1 :]))
        dq, dk, dv, dtheta = noncausal.grad_bwd(q, k, v, own_angles, do, total, (before, behind), with_theta=True)
        assert dtheta is not None
        of_angles += dtheta
        for name, found in (("o", o), ("dq", dq), ("dk", dk), ("dv", dv)):
            assert error(found, expected[name][:, segment]) < 1e-5, (rank, name)
    assert error(of_angles, expected["dtheta"]) < OF_FAR_ANGLES


def empty_like(state: Any) -> Any:
    return type(state)(torch.full_like(state.z, -torch.inf), torch.zeros_like(state.S))


def test_what_triton_does_not_compute_is_refused() -> None:
    x = torch.ones(1, 3, 1, 16, dtype=torch.float64)
    with pytest.raises(UserError, match=r"lightnet_noncausal: backend 'triton' supports fp16, bf16 and fp32"):
        lightnet_noncausal(x, x, x, backend="triton")
