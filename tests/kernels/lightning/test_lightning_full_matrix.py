"""Lightning attention with a decay per head and token against the masked full matrix, written out for each document.

With the angles of LRPE or without, values with a column of ones behind them (the sums that normalised mixers divide
by), whose width k + 1 no tile divides, states that enter, and documents: outputs and every gradient.
"""

import runpy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightscale.kernels.common.angles import Angles
from lightscale.kernels.lightning import lightning_attention
from lightscale.kernels.lightning.triton import tiling

comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
Inputs = dict[str, Tensor]
SMALL = replace(tiling._FULL, chunk=32, tile_tokens=16, contracted=16, width=16, state_key=16, state_value=16)
DOCUMENTS = {"whole": [[], []], "documents": [[17, 40, 41], [64]]}


def draw(rows: int, tokens: int, heads: int, width: int, *, turned: bool) -> Inputs:
    """fp64; values are ``width`` wide with the column of ones, and so are keys without it."""
    generator = torch.Generator().manual_seed(tokens + width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    angles = {"theta": normal(heads, width - 1).float().double()} if turned else {}
    return {
        "q": normal(rows, tokens, heads, width - 1),
        "k": normal(rows, tokens, heads, width - 1),
        "v": torch.cat([normal(rows, tokens, heads, width - 1), torch.ones(rows, tokens, heads, 1)], dim=-1),
        # Some tokens forget nearly all, most little.
        "log_decay": -torch.exp(2 * normal(rows, tokens, heads) - 2).float().double(),
        "initial_state": normal(rows, heads, (width - 1) * (1 + turned), width),
        **angles,
        "upstream": normal(rows, tokens, heads, width),
    }


def full_matrix(x: Inputs, starts: list[list[int]], first_position: int) -> Tensor:
    """(B, T, H, V): every pair of a document's tokens, decays multiplied up one by one, cosines of distances."""
    tokens = x["q"].size(1)
    rows = []
    for row, of_row in enumerate(starts):
        parts = []
        for begin, end in pairwise([0, *of_row, tokens]):
            q, k, v, log_decay = (x[name][row, begin:end].transpose(0, 1) for name in ("q", "k", "v", "log_decay"))
            n, place = end - begin, torch.arange(end - begin, dtype=torch.float64)
            between = [[log_decay[:, j + 1 : i + 1].sum(1) for j in range(n)] for i in range(n)]
            mask = torch.stack([torch.stack(line, 1) for line in between], 1).exp().tril()
            if "theta" in x:
                cosines = torch.cos((place[:, None] - place)[None, :, :, None] * x["theta"][:, None, None])
                scores = torch.einsum("hik, hjk, hijk -> hij", q, k, cosines)
            else:
                scores = q @ k.mT
            o = (scores * mask) @ v
            if begin == 0:
                if "theta" in x:
                    turns = (place + first_position)[:, None] * x["theta"][:, None]
                    q = torch.cat([q * turns.cos(), q * turns.sin()], dim=-1)
                o = o + log_decay.cumsum(1).exp()[..., None] * (q @ x["initial_state"][row])
            parts.append(o.transpose(0, 1))
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def results(x: Inputs, compute: Callable[[Inputs], Tensor]) -> Inputs:
    leaves = {name: value.detach().requires_grad_() for name, value in x.items() if name != "upstream"}
    o = compute(leaves)
    gradients = torch.autograd.grad(o, list(leaves.values()), x["upstream"])
    return {"o": o.detach()} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


def operator(starts: list[list[int]], first_position: int, backend: str) -> Callable[[Inputs], Tensor]:
    def compute(x: Inputs) -> Tensor:
        tokens = x["q"].size(1)
        # As models count: from each document's start; the first one has begun before the row.
        positions = torch.arange(tokens).repeat(len(starts), 1) + first_position
        for row, of_row in enumerate(starts):
            for start in of_row:
                positions[row, start:] = torch.arange(tokens - start)
        given = {name: value for name, value in x.items() if name not in ("theta", "upstream")}
        angles = Angles(x["theta"], positions) if "theta" in x else None
        cut = comparing.boundaries(starts, tokens) if any(starts) else None
        return lightning_attention(**given, angles=angles, cu_seqlens=cut, backend=backend)[0]

    return compute


@pytest.mark.parametrize("starts", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "angles"])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_fp64_is_the_full_matrix(starts: list[list[int]], turned: bool, backend: str) -> None:
    x = draw(2, 70, 2, 8, turned=turned)
    expected = results(x, lambda leaves: full_matrix(leaves, starts, 5))
    comparing.assert_close(results(x, operator(starts, 5, backend)), expected, 1e-10)


@pytest.mark.parametrize("turned", [False, True], ids=["plain", "angles"])
@pytest.mark.parametrize("tiles", ["small", pytest.param("half", marks=pytest.mark.long)])
def test_triton_is_the_full_matrix(turned: bool, tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, in fp32; one column behind the last whole tile, in small tiles and in those of half precision."""
    small = tiles == "small"
    monkeypatch.setattr(tiling, "_FULL", SMALL if small else replace(tiling._HALF, stored=torch.float32))
    x = draw(1, 40, 1, 17 if small else 65, turned=turned)
    starts = [[17, 33, 34]]
    expected = results(x, lambda leaves: full_matrix(leaves, starts, 5))
    single = {name: value.float() for name, value in x.items()}
    comparing.assert_close(results(single, operator(starts, 5, "triton")), expected, 1e-5)
