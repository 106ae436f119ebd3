"""The loss of a linear layer without its logits: both backends against log_softmax in fp64, split over ranks too."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightscale.errors import UserError
from lightscale.kernels.cross_entropy import (
    chunked,
    linear_cross_entropy,
    linear_cross_entropy_and_z_loss,
    linear_cross_entropy_reference,
)

ROWS, NUM_IDS, WIDTH = 64, 45, 24  # on two ranks the second holds 13 ids and 19 rows of padding
TOKENS = (3, 7)
Results = dict[str, Tensor]


def make(rows: int = ROWS, num_ids: int = NUM_IDS, scale: float = 1.0) -> Results:
    """fp64: hidden, weight, labels, a mask, and a cotangent of each token's loss; padding rows are the largest."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weight = scale * draw(rows, WIDTH)
    weight[num_ids:] *= 100
    labels = torch.randint(0, num_ids, TOKENS, generator=generator)
    labels[0, :2] = torch.tensor([0, num_ids - 1])
    mask = torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 1.0, 0.0], dtype=torch.float64).expand(TOKENS)
    return {"hidden": draw(*TOKENS, WIDTH), "weight": weight, "labels": labels, "mask": mask, "dlosses": draw(*TOKENS)}


def run(
    case: Results,
    function: Callable[..., Tensor],
    dtype: torch.dtype,
    *,
    masked: bool = False,
    summed: bool = False,
    **options: Any,
) -> Results:
    """Losses and gradients; no two tokens' cotangents are equal, but those of a sum are."""
    hidden, weight = (case[n].to(dtype).requires_grad_() for n in ("hidden", "weight"))
    labels = case["labels"]
    options = {"num_ids": NUM_IDS} | options
    if masked:
        labels = labels.where(case["mask"] != 0, -100)
        options["loss_mask"] = case["mask"].to(torch.float32 if dtype != torch.float64 else dtype)
    losses = function(hidden, weight, labels, **options)
    dlosses = case["dlosses"].to(losses.dtype)
    loss, dloss = (losses.sum(), dlosses[0, 0]) if summed else (losses, dlosses)
    gradients = torch.autograd.grad(loss, (hidden, weight), dloss)
    return {"losses": losses.detach(), "dhidden": gradients[0], "dweight": gradients[1]}


def check(found: Results, expected: Results, limit: float) -> None:
    for name, wanted in expected.items():
        error = float((found[name].double() - wanted).norm() / wanted.norm())
        assert error < limit, (name, error)


FORMS = [("chunked", torch.float64, 1e-13), ("chunked", torch.float32, 1e-5), ("triton", torch.float32, 1e-5)]


@pytest.mark.parametrize(("backend", "dtype", "limit"), FORMS)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("summed", [False, True], ids=["any cotangents", "of a sum"])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 8])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_equals_log_softmax(
    backend: str,
    dtype: torch.dtype,
    limit: float,
    masked: bool,
    summed: bool,
    chunk_tokens: int | None,
    cap: float | None,
    z_loss: float,
) -> None:
    case, how = make(), {"masked": masked, "summed": summed, "cap": cap, "z_loss": z_loss}
    expected = run(case, linear_cross_entropy_reference, torch.float64, **how)
    found = run(case, linear_cross_entropy, dtype, **how, chunk_tokens=chunk_tokens, backend=backend)
    check(found, expected, limit)
    assert not found["dweight"][NUM_IDS:].any(), "padding has no gradient"
    if masked:
        out = case["mask"] == 0
        assert not found["losses"][out].any() and not found["dhidden"][out].any()


def test_reference_is_pytorchs() -> None:
    case = make()
    logits = case["hidden"].flatten(0, 1) @ case["weight"][:NUM_IDS].mT
    expected = F.cross_entropy(logits, case["labels"].flatten(), reduction="none").view(TOKENS)
    found = linear_cross_entropy_reference(case["hidden"], case["weight"], case["labels"], num_ids=NUM_IDS)
    assert torch.allclose(found, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("backend", ["reference", "chunked", "triton"])
def test_the_term_of_the_normaliser_is_apart(backend: str) -> None:
    case = make()
    logits = case["hidden"] @ case["weight"][:NUM_IDS].mT
    expected = 0.3 * logits.exp().sum(dim=-1).log().square()
    dtype = torch.float32 if backend == "triton" else torch.float64
    inputs = case["hidden"].to(dtype).requires_grad_(), case["weight"].to(dtype), case["labels"]
    losses, terms = linear_cross_entropy_and_z_loss(*inputs, num_ids=NUM_IDS, z_loss=0.3, backend=backend)
    plain = linear_cross_entropy(*inputs, num_ids=NUM_IDS, backend=backend)
    assert losses.requires_grad and not terms.requires_grad
    assert torch.allclose(terms.double(), expected, rtol=1e-5)
    assert torch.allclose((losses - terms).double(), plain.double(), rtol=1e-5, atol=1e-6)
    masked = linear_cross_entropy_and_z_loss(*inputs, num_ids=NUM_IDS, z_loss=0.3, loss_mask=case["mask"].to(dtype))[1]
    assert torch.allclose(masked.double(), expected * case["mask"], rtol=1e-5)
    assert not linear_cross_entropy_and_z_loss(*inputs, num_ids=NUM_IDS, backend=backend)[1].any()


@pytest.mark.parametrize("backend", ["chunked", "triton"])
@pytest.mark.parametrize("num_ids", [1, 4096, 4097, 8190])
def test_several_tiles_of_columns(backend: str, num_ids: int) -> None:
    """A program's tile has 4096 columns: ids that end on its edge, behind it, and before the padding."""
    case = make(rows=8200, num_ids=num_ids)
    expected = run(case, linear_cross_entropy_reference, torch.float64, num_ids=num_ids)
    found = run(case, linear_cross_entropy, torch.float32, num_ids=num_ids, backend=backend)
    if num_ids == 1:
        assert not any(t.any() for t in found.values()), "one id takes all probability"
    else:
        check(found, expected, 1e-5)


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_large_logits_cost_no_digits(backend: str) -> None:
    """Logits of ±1e4 and differences of a few, against the same in fp64."""
    case = make(scale=1e-3)
    case["hidden"][..., 0] = 1e4
    case["weight"][:, 0] = torch.arange(ROWS).double() / 8
    case["hidden"], case["weight"] = (case[n].float().double() for n in ("hidden", "weight"))
    expected = run(case, linear_cross_entropy_reference, torch.float64)
    found = run(case, linear_cross_entropy, torch.float32, backend=backend)
    check(found, expected, 1e-5)


def test_half_precision() -> None:
    """Logits are rounded as a linear layer's; the rest is fp32."""
    case = make(scale=0.1)
    for n in ("hidden", "weight"):
        case[n] = case[n].bfloat16().double()
    expected = run(case, linear_cross_entropy_reference, torch.float64)
    found = run(case, linear_cross_entropy, torch.bfloat16)
    assert (found["losses"].dtype, found["dweight"].dtype) == (torch.float32, torch.bfloat16)
    check(found, expected, 5e-3)
    # A cap that most logits come near: the slope there has its digits.
    for summed in (False, True):
        capped = run(case, linear_cross_entropy_reference, torch.float64, cap=0.3, summed=summed)
        check(run(case, linear_cross_entropy, torch.bfloat16, cap=0.3, summed=summed), capped, 5e-3)


def test_chunks_fill_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(1000, 4)
    monkeypatch.setattr(chunked, "LOGITS_WORKSPACE_BYTES", 1000 * 4 * 300)
    cuts = list(chunked.chunks(torch.zeros(1000, 4), weight, None))
    assert [c.stop - c.start for c in cuts] == [250] * 4  # 334 would not fit, and 300 would leave a rest
    assert [c.stop - c.start for c in chunked.chunks(torch.zeros(100, 4), weight, None)] == [100]


def test_memory_does_not_hold_the_vocabulary() -> None:
    """Between forward and backward two numbers a token; no tensor is larger than a chunk's logits or the weight."""
    tokens, rows, width, chunk = 512, 3000, 16, 64
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(rows, width, requires_grad=True)
    labels, saved = torch.randint(0, rows, (tokens,)), []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        linear_cross_entropy(hidden, weight, labels, num_ids=rows, chunk_tokens=chunk).sum().backward()
    assert sum(saved) <= hidden.numel() + weight.numel() + 4 * tokens
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 4 * chunk * rows <= largest < 2 * 4 * chunk * rows  # all logits would be 8 times as much


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        return func(*args, **(kwargs or {}))


def products(*, summed: bool = False, no_grad: bool = False) -> tuple[int, int]:
    """In forward and in backward, of 21 tokens in three chunks."""
    case = make()
    hidden, weight = (case[name].requires_grad_() for name in ("hidden", "weight"))
    with Products() as forward, torch.set_grad_enabled(not no_grad):
        losses = linear_cross_entropy(hidden, weight, case["labels"], num_ids=NUM_IDS, chunk_tokens=8)
    with Products() as backward:
        if not no_grad:
            loss, dloss = (losses.sum(), None) if summed else (losses, case["dlosses"])
            torch.autograd.grad(loss, (hidden, weight), dloss)
    return forward.count, backward.count


class Logits(TorchDispatchMode):
    """Collects the memory of each chunk's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._overloadpacket is torch.ops.aten.mm and args[1].shape[1] == ROWS:
            self.made.append(found.untyped_storage().data_ptr())
        return found


@pytest.mark.parametrize(("summed", "passes"), [(True, 1), (False, 2)])
def test_logits_of_all_chunks_have_one_memory(summed: bool, passes: int) -> None:
    """In both passes, of which the second makes them where losses have cotangents of their own."""
    with Logits() as mode:
        products(summed=summed)
    assert len(mode.made) == 3 * passes
    assert all(len(set(mode.made[first : first + 3])) == 1 for first in range(0, len(mode.made), 3))


def test_logits_are_computed_once_for_a_sum() -> None:
    """Three products a chunk, all in the forward pass; a loss that nobody differentiates takes one."""
    assert products(summed=True) == (9, 0)
    assert products() == (9, 9)
    assert products(no_grad=True) == (3, 0)


def test_gradients_are_handed_out_once_and_found_again() -> None:
    case = make()
    inputs = [case[name].requires_grad_() for name in ("hidden", "weight")]
    loss = linear_cross_entropy(*inputs, case["labels"], num_ids=NUM_IDS).sum()
    first = torch.autograd.grad(loss, inputs, torch.tensor(3.0).double(), retain_graph=True)
    second = torch.autograd.grad(loss, inputs, torch.tensor(3.0).double())
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_a_factor_is_not_rounded_to_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_SCALED_ELEMENTS", 40)
    gradient = torch.randn(9, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    factor = torch.tensor(1 + 2**-12)
    expected = (gradient.float() * (1 / 3 * factor)).bfloat16()
    assert torch.equal(chunked.scale_(gradient.clone(), 1 / 3 * factor), expected)


def test_frozen_weight_and_no_tokens() -> None:
    case = make()
    hidden = case["hidden"].requires_grad_()
    linear_cross_entropy(hidden, case["weight"], case["labels"], num_ids=NUM_IDS).sum().backward()
    assert hidden.grad is not None and case["weight"].grad is None
    for backend in ("chunked", "triton"):
        empty, weight = torch.zeros(0, WIDTH, requires_grad=True), torch.ones(ROWS, WIDTH, requires_grad=True)
        losses = linear_cross_entropy(empty, weight, torch.zeros(0).long(), num_ids=NUM_IDS, backend=backend)
        losses.sum().backward()
        assert losses.shape == (0,) and weight.grad is not None and not weight.grad.any()


def test_compile_changes_nothing() -> None:
    case = make()
    plain = run(case, linear_cross_entropy, torch.float32, backend="triton")
    compiled = run(case, torch.compile(linear_cross_entropy, backend="aot_eager"), torch.float32, backend="triton")
    assert all(torch.equal(plain[n], compiled[n]) for n in plain)


def reduce_over_world(x: Tensor, how: str) -> None:
    dist.all_reduce(x, op={"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}[how])


def on_ranks(rank: int, world_size: int, init_method: str) -> dict[Any, Results]:
    """Losses, this rank's part of the gradient of hidden, and the gradient of its rows of the weight."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    found = {}
    for used in (NUM_IDS, ROWS // 2):  # of the latter the second rank holds nothing but padding
        case = make(num_ids=used)
        own = ROWS // world_size
        case["weight"] = case["weight"].chunk(world_size)[rank].contiguous()
        options = {"num_ids": used, "first_id": rank * own, "reduce": reduce_over_world, "chunk_tokens": 8}
        for backend, dtype, _ in FORMS:
            for summed in (False, True):
                how = {"masked": True, "summed": summed, "backend": backend, "z_loss": 0.3}
                found[used, backend, dtype, summed] = run(case, linear_cross_entropy, dtype, **how, **options)
    dist.destroy_process_group()
    return found


def test_vocabulary_split_over_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    results = run_ranks(on_ranks, 2, env={"TRITON_INTERPRET": "1"})
    for used, summed in itertools.product((NUM_IDS, ROWS // 2), (False, True)):
        how = {"masked": True, "summed": summed, "num_ids": used, "z_loss": 0.3}
        expected = run(make(num_ids=used), linear_cross_entropy_reference, torch.float64, **how)
        for backend, dtype, limit in FORMS:
            first, second = (result[used, backend, dtype, summed] for result in results)
            assert torch.equal(first["losses"], second["losses"])
            whole = {
                "losses": first["losses"],
                "dhidden": first["dhidden"] + second["dhidden"],
                "dweight": torch.cat([first["dweight"], second["dweight"]]),
            }
            check(whole, expected, limit)
            assert not whole["dweight"][used:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.ones(3, 7)}, r"hidden must be \(..., d\) and weight \(rows, d\), got \(3, 7\) and \(6, 4\)"),
        ({"hidden": torch.ones(3, 4).long()}, "hidden must be fp16, bf16, fp32 or fp64, got torch.int64"),
        ({"weight": torch.ones(6, 4).double()}, "weight must be of hidden's dtype torch.float32, got torch.float64"),
        ({"labels": torch.zeros(2).long()}, r"labels must be int64 of shape \(3,\), got torch.int64, \(2,\)"),
        ({"labels": torch.zeros(3)}, r"labels must be int64 of shape \(3,\), got torch.float32"),
        ({"labels": torch.tensor([0, 5, 1])}, "labels must be ids from 0 to 4, got 5"),
        ({"labels": torch.tensor([0, -100, 1])}, "labels must be ids from 0 to 4, got -100"),
        ({"loss_mask": torch.ones(2)}, r"loss_mask must be of shape \(3,\), got \(2,\)"),
        ({"weight": torch.ones(6, 4, device="meta")}, "weight is on meta, but hidden is on cpu"),
        ({"num_ids": 0}, "num_ids must be at least 1 and first_id at least 0, got 0 and 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ({"z_loss": -1e-4}, "z_loss must be at least 0, got -0.0001"),
        ({"backend": "cuda"}, "cross_entropy has no backend 'cuda'"),
        ({"reduce": lambda t, how: None, "backend": "reference"}, "backend 'reference' has no `reduce`"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden": torch.ones(3, 4),
        "weight": torch.ones(6, 4),
        "labels": torch.tensor([0, 4, 1]),
        "num_ids": 5,
    }
    with pytest.raises(UserError, match=message):
        linear_cross_entropy(**(arguments | change))
