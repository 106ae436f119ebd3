"""The Triton kernels of the scan of Toeplitz positional encoding, interpreted in fp32, against the fp64 recurrence.

The interpreter takes milliseconds for a step of 16 tokens, so shapes are small. Half precision is tested on GPUs.
"""

import runpy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightscale.errors import UserError
from lightscale.kernels import tpe
from lightscale.kernels.common.backends import choose_backend, set_default_backend
from lightscale.kernels.tpe import tpe_scan, tpe_scan_reference, triton

comparing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "comparing.py")))
boundaries, assert_close, rms = comparing.boundaries, comparing.assert_close, comparing.rms

Tensors = dict[str, Tensor]
INPUTS = ("x", "log_decay", "gamma", "initial_state")


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few dozen tokens have several splits, as long ones have."""
    monkeypatch.setattr(triton, "_LEAST_SPLIT_TOKENS", 32)


@pytest.fixture
def by_triton() -> Iterator[None]:
    set_default_backend("triton")
    yield
    set_default_backend("auto")


def make(rows: int, tokens: int, width: int, modes: int, *, with_state: bool = True) -> Tensors:
    """fp64 inputs and the cotangents dy and dstate; time scales from 1.1 to 4096 tokens."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    case = {
        "x": draw(rows, tokens, width),
        "log_decay": torch.log1p(-1 / torch.logspace(0.04, 3.61, modes, dtype=torch.float64)),
        "gamma": draw(width, modes),
        "dy": draw(rows, tokens, width),
        "dstate": draw(rows, width, modes),
    }
    return case | ({"initial_state": draw(rows, width, modes)} if with_state else {})


def differentiate(case: Tensors, leaves: Tensors, y: Tensor, state: Tensor) -> Tensors:
    cotangents = [case["dy"].to(y.dtype), case["dstate"].to(state.dtype)]
    gradients = torch.autograd.grad([y, state], list(leaves.values()), cotangents)
    results = {"y": y.detach(), "state": state.detach()}
    return results | dict(zip((f"d{n}" for n in leaves), gradients, strict=True))


def oracle(case: Tensors, cu_seqlens: Tensor | None = None) -> Tensors:
    leaves = {n: case[n].detach().requires_grad_() for n in INPUTS if n in case}
    return differentiate(case, leaves, *tpe_scan_reference(**leaves, cu_seqlens=cu_seqlens))


def run(case: Tensors, cu_seqlens: Tensor | None = None) -> Tensors:
    leaves = {n: case[n].detach().float().requires_grad_() for n in INPUTS if n in case}
    y, state = tpe_scan(**leaves, cu_seqlens=cu_seqlens, output_final_state=True, backend="triton")
    assert state is not None
    return differentiate(case, leaves, y, state)


@pytest.mark.parametrize(
    ("rows", "tokens", "width", "modes", "with_state"),
    [
        (1, 1, 8, 4, True),
        (1, 15, 3, 1, True),
        (2, 16, 17, 20, True),
        (1, 63, 5, 7, True),
        (1, 35, 2, 70, True),
        (1, 1, 8, 4, False),
        (2, 16, 17, 20, False),
        (1, 35, 2, 70, False),
    ],
    ids=str,
)
def test_equals_recurrence(rows: int, tokens: int, width: int, modes: int, with_state: bool) -> None:
    """Odd lengths; channels and modes that leave tiles half empty; 70 modes are two tiles of the parameters' kernel."""
    case = make(rows, tokens, width, modes, with_state=with_state)
    assert_close(run(case), oracle(case))


@pytest.mark.parametrize(
    "starts",
    [None, [[1, 3, 15, 20], [32]], [[31, 32, 33, 64], [69]], [[40], []]],
    ids=["whole", "many in a step", "split edges", "inside a split"],
)
@pytest.mark.usefixtures("short_splits")
def test_documents_and_splits(starts: list[list[int]] | None) -> None:
    """70 tokens in splits of 32: a state crosses splits unless a document begins between."""
    case = make(2, 70, 3, 5)
    cu_seqlens = None if starts is None else boundaries(starts, 70)
    assert_close(run(case, cu_seqlens), oracle(case, cu_seqlens))


def test_the_number_of_splits_is_bounded() -> None:
    """So that states of splits do not grow with the row."""
    log_decay = torch.tensor([-1.0])
    for rows, tokens, splits in ((1, 512, 1), (1, 513, 2), (1, 100_000, 16), (4, 100_000, 4), (64, 100_000, 1)):
        scan = triton._scan(torch.empty(rows, tokens, 1), log_decay, None)
        assert scan.num_splits == splits and scan.split_tokens % 16 == 0
        assert (splits - 1) * scan.split_tokens < tokens <= splits * scan.split_tokens


@pytest.mark.parametrize("log_decay", [-20.0, -0.7, -1 / 4096, 0.0])
@pytest.mark.usefixtures("short_splits")
def test_each_decay_alone(log_decay: float) -> None:
    """So that no mode's error hides behind another's magnitude."""
    case = make(1, 40, 3, 1) | {"log_decay": torch.tensor([log_decay], dtype=torch.float64)}
    assert_close(run(case), oracle(case))


@pytest.mark.usefixtures("short_splits")
def test_zero_decay_factor_forgets_everything() -> None:
    case = make(1, 40, 3, 1) | {"log_decay": torch.tensor([-torch.inf], dtype=torch.float64)}
    results = run(case)
    assert rms(results["y"] - case["x"] * case["gamma"][:, 0]) < 1e-6
    assert all(tensor.isfinite().all() for tensor in results.values())


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("start", [32, 50])
@pytest.mark.usefixtures("short_splits")
def test_overflow_stays_in_its_document(start: int) -> None:
    case = make(1, 70, 3, 4, with_state=False)
    alone = run(case | {n: case[n][:, start:] for n in ("x", "dy")})
    case["x"][:, 3 : start - 1] = 3e38
    results = run(case, boundaries([[start]], 70))
    assert not results["y"][:, :start].isfinite().all()
    assert rms(results["state"] - alone["state"]) / rms(alone["state"]) < 1e-5
    for name in ("y", "dx"):
        assert rms(results[name][:, start:] - alone[name]) / rms(alone[name]) < 1e-5


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_later_token_changes_nothing_before_it() -> None:
    """Not even one that is not finite."""
    case = make(1, 24, 3, 4)
    before = run(case)["y"]
    case["x"][:, 20] = torch.inf
    after = run(case)["y"]
    assert torch.equal(after[:, :20], before[:, :20]) and not after[:, 20:].isfinite().any()


@pytest.mark.parametrize("cuts", [[20], [7, 7, 33, 40]], ids=["two ranks", "some empty"])
@pytest.mark.parametrize("starts", [None, [[20], [3, 30]]], ids=["whole", "documents"])
@pytest.mark.usefixtures("short_splits", "by_triton")
def test_passes_compose_over_ranks(cuts: list[int], starts: list[list[int]] | None) -> None:
    """As sequence parallelism composes them, with a rank for each part between two cuts."""
    case = make(2, 40, 3, 4)
    known = set() if starts is None else set(boundaries(starts, 40).tolist())
    expected = oracle(case, None if starts is None else boundaries(starts, 40))
    x, dy, log_decay, gamma, state, dstate = (
        case[n].float() for n in ("x", "dy", "log_decay", "gamma", "initial_state", "dstate")
    )
    zero, ranks = torch.zeros_like(state), []
    for begin, end in pairwise([0, *cuts, 40]):
        inside = [[t - begin for t in range(begin + 1, end) if row * 40 + t in known] for row in range(2)]
        cu_seqlens = None if starts is None else boundaries(inside, end - begin)
        fresh = torch.tensor([0 < begin < end and row * 40 + begin in known for row in range(2)])[:, None, None]
        part = x[:, begin:end], dy[:, begin:end]
        local, through = tpe.state_fwd(part[0], log_decay, cu_seqlens)
        decay = torch.where(fresh, zero, through[:, None, :])
        entering = torch.where(fresh, zero, state)
        y, leaving = tpe.out_fwd(part[0], log_decay, gamma, entering, cu_seqlens)
        state = decay * state + local
        assert rms(leaving - state) < 1e-5 * rms(state)
        ranks.append((*part, cu_seqlens, fresh, decay, entering, y))
    gradients: list[tuple[Tensor, Tensor, Tensor]] = []
    for part_x, part_dy, cu_seqlens, fresh, decay, entering, _ in reversed(ranks):
        gradients.insert(0, tpe.grad_bwd(part_x, log_decay, gamma, part_dy, entering, dstate, cu_seqlens))
        own = tpe.state_bwd(part_dy, log_decay, gamma, cu_seqlens)
        dstate = torch.where(fresh, zero, own) + decay * dstate
    found = {
        "y": torch.cat([y for *_, y in ranks], 1),
        "state": state,
        "dx": torch.cat([dx for dx, _, _ in gradients], 1),
        "dlog_decay": torch.stack([g for _, g, _ in gradients]).sum(0),
        "dgamma": torch.stack([g for _, _, g in gradients]).sum(0),
        "dinitial_state": dstate,
    }
    assert_close(found, expected)


def test_strides_and_dtypes() -> None:
    """Rows as a model has them, (T, B, D); a decay in fp64; gradients in the dtypes of their inputs."""
    case = make(2, 20, 5, 4)
    x = case["x"].float().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    log_decay, gamma = case["log_decay"].requires_grad_(), case["gamma"].float().mT.contiguous().mT.requires_grad_()
    state = case["initial_state"].float().mT.contiguous().mT.requires_grad_()
    y, final = tpe_scan(x, log_decay, gamma, initial_state=state, output_final_state=True, backend="triton")
    assert final is not None
    leaves = {"x": x, "log_decay": log_decay, "gamma": gamma, "initial_state": state}
    results = differentiate(case, leaves, y, final)
    assert_close(results, oracle(case))
    assert results["dlog_decay"].dtype == torch.float64


def test_results_that_nobody_uses() -> None:
    """Only the state is differentiated, then only y, without a gradient for the state that enters."""
    case = make(1, 20, 3, 4)
    expected = oracle(case | {"dy": torch.zeros_like(case["dy"])})
    leaves = {n: case[n].float().requires_grad_() for n in INPUTS}
    _, state = tpe_scan(**leaves, output_final_state=True, backend="triton")
    assert state is not None
    state.backward(case["dstate"].float())
    assert_close(
        {f"d{n}": t.grad for n, t in leaves.items() if t.grad is not None}, {f"d{n}": expected[f"d{n}"] for n in INPUTS}
    )
    x = case["x"].float().requires_grad_()
    y, state = tpe_scan(x, case["log_decay"], case["gamma"].float(), backend="triton")
    assert state is None
    y.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_no_tokens() -> None:
    case = make(2, 0, 4, 6)
    results = run(case)
    assert results["y"].shape == (2, 0, 4)
    assert torch.equal(results["state"], case["initial_state"].float())
    assert torch.equal(results["dinitial_state"], case["dstate"].float())
    assert not results["dlog_decay"].any() and not results["dgamma"].any()


def test_checkpoint_changes_nothing() -> None:
    case = make(1, 20, 3, 4)
    results = []
    for recompute in (False, True):
        leaves = {n: case[n].float().requires_grad_() for n in INPUTS}
        options: dict[str, Any] = {"output_final_state": True, "backend": "triton"}
        if recompute:
            y, state = checkpoint(tpe_scan, **leaves, **options, use_reentrant=False)
        else:
            y, state = tpe_scan(**leaves, **options)
        assert state is not None
        results.append(differentiate(case, leaves, y, state))
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


@pytest.mark.usefixtures("by_triton")
def test_one_token_at_a_time() -> None:
    case = make(2, 6, 18, 5)
    expected = oracle(case)
    u, outputs = case["initial_state"].float(), []
    for token in range(6):
        y, u = tpe.recurrent_step(case["x"][:, token].float(), case["log_decay"], case["gamma"].float(), u)
        outputs.append(y)
    assert_close({"y": torch.stack(outputs, 1), "state": u}, {n: expected[n] for n in ("y", "state")})
    # With a gradient asked for it is PyTorch's, which has one.
    x = case["x"][:, 0].float().requires_grad_()
    tpe.recurrent_step(x, case["log_decay"], case["gamma"].float(), u)[0].sum().backward()
    assert x.grad is not None


def test_choice_of_the_backend(by_triton: None) -> None:
    x = torch.ones(1, 2, 1)
    assert choose_backend("tpe", x) == "triton"
    assert choose_backend("tpe", x, "chunked") == "chunked"
    set_default_backend("auto")
    assert choose_backend("tpe", x) == "chunked"
    with pytest.raises(UserError, match=r"backend 'triton' supports fp16, bf16 and fp32, not torch.float64"):
        choose_backend("tpe", x.double(), "triton")
