"""Angles along several axes (MD-LRPE): operators against the direct sum over pairs of tokens, with every gradient."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels import lightnet, lightning
from lightscale.kernels.common.angles import Angles, axis_angles, by_axis, for_axes, over_axes

comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "comparing.py")))

Tensors = dict[str, Tensor]

# Two documents, of which the second begins inside a chunk: images of 5 x 7, and a film of 2 x 3 x 4 behind one of 11.
SHAPES = {"2 axes": ((5, 7), (5, 7)), "3 axes": ((1, 1, 11), (2, 3, 4))}
HEADS, WIDTH, VALUES = 2, 12, 5


def coordinates(shapes: tuple[tuple[int, ...], ...]) -> Tensor:
    """(1, T, A), by counting."""
    return torch.cat([torch.cartesian_prod(*map(torch.arange, shape)) for shape in shapes])[None]


def draw(places: Tensor, decays: str) -> Tensors:
    generator = torch.Generator().manual_seed(len(decays))
    tokens = places.size(1)

    def normal(*shape: int) -> Tensor:
        # Rounded, so that fp32 and fp64 compute the same.
        return torch.randn(shape, generator=generator).double()

    inputs = {name: normal(1, tokens, HEADS, WIDTH) for name in ("q", "k")}
    inputs |= {"v": normal(1, tokens, HEADS, VALUES), "theta": normal(HEADS, WIDTH)}
    if decays != "none":
        shape = (HEADS,) if decays == "heads" else (1, tokens, HEADS)
        inputs["log_decay"] = -normal(*shape).abs() / 10
    return inputs


def turned(x: Tensors, places: Tensor) -> Tensor:
    """(T, T, h, k): cos of the angle between two tokens: channel c of k turns along axis c A / k."""
    distances = (places[0, :, None] - places[0]).to(x["theta"].dtype)
    return torch.cos(distances.repeat_interleave(WIDTH // places.size(-1), dim=-1)[:, :, None] * x["theta"])


def pairs_of(first: int, tokens: int, *, causal: bool) -> Tensor:
    """(T, T) bool: pairs of tokens that see each other, in documents of which the second begins at ``first``."""
    document = torch.arange(tokens) >= first
    same = document[:, None] == document
    return same.tril() if causal else same


def direct_sums(x: Tensors, places: Tensor, first: int) -> Tensor:
    """Lightning attention, all pairs."""
    scores = torch.einsum("btgc,bsgc,tsgc->bgts", x["q"], x["k"], turned(x, places))
    tokens = scores.size(-1)
    if "log_decay" in x:
        of_tokens = x["log_decay"].expand(1, tokens, HEADS).cumsum(1).transpose(1, 2)
        scores = scores * (of_tokens[..., :, None] - of_tokens[..., None, :]).exp()
    scores = scores.masked_fill(~pairs_of(first, tokens, causal=True), 0.0)
    return torch.einsum("bgts,bsgv->btgv", scores, x["v"])


def direct_averages(x: Tensors, places: Tensor, first: int, *, causal: bool) -> Tensor:
    """LightNet: softmax of the keys over the tokens that each token sees."""
    seen = pairs_of(first, x["k"].size(1), causal=causal)
    keys = x["k"][0].expand(len(seen), -1, -1, -1).masked_fill(~seen[..., None, None], -torch.inf)
    scores = torch.einsum("tgc,tsgc,tsgc->gts", x["q"][0], keys.softmax(1), turned(x, places))
    return torch.einsum("gts,sgv->tgv", scores, x["v"][0])[None]


def by_operator(kind: str, backend: str, places: Tensor, first: int) -> Callable[[Tensors], Tensor]:
    axes, tokens = places.size(-1), places.size(1)
    cut = torch.tensor([0, first, tokens])

    def compute(x: Tensors) -> Tensor:
        q, k, v = by_axis(x["q"], axes), by_axis(x["k"], axes), for_axes(x["v"], axes)
        angles = axis_angles(x["theta"], places)
        if kind == "whole":
            o = lightnet.lightnet_noncausal(q, k, v, angles=angles, cu_seqlens=cut, backend=backend)
        elif kind == "lightnet":
            o, _ = lightnet.lightnet_attention(q, k, v, angles=angles, cu_seqlens=cut, backend=backend)
        else:
            decay = for_axes(x["log_decay"], axes, dim=-1) if "log_decay" in x else None
            o, _ = lightning.lightning_attention(q, k, v, decay, angles=angles, cu_seqlens=cut, backend=backend)
        return over_axes(o, axes)

    return compute


def directly(kind: str, places: Tensor, first: int) -> Callable[[Tensors], Tensor]:
    if kind in ("whole", "lightnet"):
        return lambda x: direct_averages(x, places, first, causal=kind == "lightnet")
    return lambda x: direct_sums(x, places, first)


def results(inputs: Tensors, dtype: torch.dtype, compute: Callable[[Tensors], Tensor]) -> Tensors:
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    o = compute(leaves)
    upstream = torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    found: Tensors = comparing.with_gradients({"o": o}, [upstream], leaves)
    return found


# Triton's interpreter takes seconds for a row.
@pytest.mark.parametrize(
    ("backend", "shapes"),
    [
        *(pytest.param("chunked", shapes, id=f"chunked, {name}") for name, shapes in SHAPES.items()),
        pytest.param("reference", SHAPES["3 axes"], id="reference"),
        pytest.param("triton", ((1, 1, 2), (2, 2, 3)), id="triton"),
    ],
)
@pytest.mark.parametrize("kind", ["none", "heads", "tokens", "lightnet", "whole"])
def test_operators_are_the_direct_sum(shapes: tuple[tuple[int, ...], ...], backend: str, kind: str) -> None:
    places = coordinates(shapes)
    first = torch.Size(shapes[0]).numel()
    inputs = draw(places, kind if kind in ("heads", "tokens") else "none")
    expected = results(inputs, torch.float64, directly(kind, places, first))
    dtype = torch.float32 if backend == "triton" else torch.float64
    found = results(inputs, dtype, by_operator(kind, backend, places, first))
    comparing.assert_close(found, expected, *([] if backend == "triton" else [1e-10]))


@pytest.mark.parametrize("kind", ["none", "lightnet"])
def test_one_token_after_another_is_the_whole_row(kind: str) -> None:
    places = coordinates(SHAPES["2 axes"][:1])
    x = draw(places, "none")
    q, k, v = by_axis(x["q"], 2), by_axis(x["k"], 2), for_axes(x["v"], 2)
    whole = axis_angles(x["theta"], places)
    rows: list[Tensor] = []
    if kind == "none":
        expected, _ = lightning.lightning_attention(q, k, v, angles=whole)
        S = torch.zeros(1, 2 * HEADS, WIDTH, VALUES, dtype=torch.float64)
        for t in range(q.size(1)):
            here = Angles(whole.theta, whole.positions[:, t])
            o, S = lightning.recurrent_step(q[:, t], k[:, t], v[:, t], None, S, angles=here)
            rows.append(o)
    else:
        expected, _ = lightnet.lightnet_attention(q, k, v, angles=whole)
        state = lightnet.empty_state(1, 2 * HEADS, WIDTH // 2, WIDTH, VALUES, dtype=torch.float64, device=q.device)
        for t in range(q.size(1)):
            here = Angles(whole.theta, whole.positions[:, t])
            o, state = lightnet.recurrent_step(q[:, t], k[:, t], v[:, t], state, here)
            rows.append(o)
    comparing.assert_close({"o": torch.stack(rows, 1)}, {"o": expected}, 1e-12)


@pytest.mark.parametrize(
    ("theta", "positions", "named"),
    [((3, 1, 4), (1, 6, 3), "angles.theta"), ((2, 1, 4), (1, 6), "angles.positions")],
)
def test_angles_that_do_not_fit_are_named(theta: tuple[int, ...], positions: tuple[int, ...], named: str) -> None:
    q = torch.zeros(1, 6, 2, 4)
    angles = Angles(torch.zeros(theta), torch.zeros(positions, dtype=torch.int64))
    with pytest.raises(UserError, match=named):
        lightnet.lightnet_noncausal(q, q, q, angles=angles)
