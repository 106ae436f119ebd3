"""Linear layers in 8 bits: casts beside a table of all numbers of the format, products, layouts, recomputation."""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.models.accounting import parameter_shapes
from lightscale.models.fp8 import fp8_weights
from lightscale.parallel.linear import fp8
from lightscale.parallel.linear.fp8 import BACKWARD, FORWARD, cast, fp8_linear, product

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]
FORMATS = {FORWARD: (3, 7, 448.0), BACKWARD: (2, 15, 57344.0)}
"""Bits of the mantissa, bias of the exponent and largest number (arXiv 2209.05433, table 1)."""


def numbers(dtype: torch.dtype) -> Tensor:
    """All that are not negative, in their order: m 2^(1 - bias - bits), and from 2^bits on each exponent."""
    bits, bias, largest = FORMATS[dtype]
    one = 2**bits
    found = [
        (code % one + (one if code >= one else 0)) * 2.0 ** (max(code // one, 1) - bias - bits) for code in range(128)
    ]
    return torch.tensor([number for number in found if number <= largest], dtype=torch.float64)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What of x (fp64) is left: the nearest number of the format, of two the even one, under a power of two."""
    amax, largest = float(x.abs().max()), FORMATS[dtype][2]
    scale = 2.0 ** min(math.floor(math.log2(largest / amax)), 126) if amax else 1.0
    table = numbers(dtype)
    wanted = (x.abs() * scale).clamp(max=largest)
    above = torch.searchsorted(table, wanted).clamp(max=len(table) - 1)
    below = (above - 1).clamp(min=0)
    nearer = table[above] - wanted < wanted - table[below]
    tie = table[above] - wanted == wanted - table[below]
    index = torch.where(nearer | (tie & (above % 2 == 0)), above, below)
    return x.sign() * table[index] / scale


def wide(generator: torch.Generator, *shape: int) -> Tensor:
    """Numbers of all sizes that the format has beside each other, and smaller ones."""
    return torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-30, 1, shape, generator=generator)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float64])
def test_casts_are_those_of_the_table(dtype: torch.dtype, of: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    assert float(numbers(dtype).max()) == torch.finfo(dtype).max
    for size in (1e-30, 1e-6, 0.3, 1.0, 448.0, 7e4, 1e30):
        x = (wide(generator, 40, 33) * size).to(of)
        values, factor = cast(x, dtype)
        assert math.frexp(float(factor))[0] == 0.5, "a power of two: parts under other scales are the same numbers"
        assert torch.equal(values.double() * factor.double(), rounded(x.double(), dtype))
    # The largest number is the end of the format, exactly.
    values, factor = cast(torch.tensor([[torch.finfo(dtype).max, -1.0]]), dtype)
    assert float(values.double()[0, 0]) == torch.finfo(dtype).max and float(factor) == 1.0
    zeros = cast(torch.zeros(16, 16), dtype)
    assert not zeros.values.double().any() and float(product(zeros, zeros, torch.float32).abs().max()) == 0


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(16, 16)
    x[3, 5] = bad
    ones = cast(torch.ones(16, 16), FORWARD)
    assert product(cast(x, dtype), ones, torch.float32)[3].isnan().all()


@pytest.mark.parametrize("is_summed", [False, True])
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float64])
def test_products_and_gradients_are_those_of_the_rounded_numbers(of: torch.dtype, is_summed: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias, gradient = (
        torch.randn(shape, generator=generator).to(of) for shape in ((5, 3, 32), (48, 32), (48,), (5, 3, 48))
    )
    x.requires_grad_(), bias.requires_grad_()
    weight = torch.nn.Parameter(weight)
    if is_summed:
        weight.main_grad = torch.ones(48, 32)  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    how: dict[str, Any] = {"allreduce_dgrad": False, "sequence_parallel": False}
    out = fp8_linear(x, weight, bias, gradient_accumulation_fusion=is_summed, **how)
    out.backward(gradient)
    xs, ws = (rounded(one.detach().double(), FORWARD) for one in (x, weight))
    gs = rounded(gradient.double(), BACKWARD)
    near: dict[str, Any] = {"rtol": 2**-7, "atol": 2**-7} if of == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.double(), xs @ ws.t() + bias.double(), **near)
    torch.testing.assert_close(x.grad.double(), gs @ ws, **near)  # type: ignore[union-attr]
    torch.testing.assert_close(bias.grad.double(), gradient.double().sum((0, 1)), **near)  # type: ignore[union-attr]
    expected = gs.flatten(0, 1).t() @ xs.flatten(0, 1)
    if is_summed:
        # In fp32, with the precision of the model no part of it.
        torch.testing.assert_close(weight.main_grad.double(), 1 + expected, rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]
        assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]
    else:
        torch.testing.assert_close(weight.grad.double(), expected, **near)  # type: ignore[union-attr]


@pytest.mark.parametrize("of", [FORWARD, BACKWARD])
def test_the_product_of_tensor_cores_is_called_as_it_wants(of: torch.dtype) -> None:
    """CPUs have PyTorch's operator too, though slowly."""
    generator = torch.Generator().manual_seed(2)
    a = cast(torch.randn(48, 32, generator=generator), of)
    b = cast(torch.randn(64, 32, generator=generator) * 1e-3, FORWARD)
    for out in (torch.float32, torch.bfloat16):
        expected = product(a, b, out)
        with mock.patch.object(fp8, "_has_products", return_value=True):
            torch.testing.assert_close(product(a, b, out), expected)
            # Transposed, as backward.
            torch.testing.assert_close(product(a.t(), a.t(), torch.float32), product(a.t(), a.t(), torch.float32))


def test_chosen_weights_are_the_large_ones_of_blocks() -> None:
    options = {"kimi-delta": {"key_head_dim": 12}}
    shape = {"hidden_size": 64, "num_heads": 8, "intermediate_size": 96, "vocab_size": 128, "num_layers": 4}
    model = ModelConfig.model_validate(
        {**shape, "mixer": ["tnl", "hgrn2", "kimi-delta", "lion-s"], "mixer_options": options}
    )
    chosen = fp8_weights(model)
    left = {name for name, one in parameter_shapes(model).items() if len(one) == 2} - chosen
    kinds = {name.removesuffix(".weight").rpartition(".")[2] for name in chosen}
    assert kinds == {"q_proj", "kv_proj", "fv_proj", "out_proj", "linear_fc1", "linear_fc2"}
    for small in ("word_embeddings", "gate_down", "gate_up", "forget_down", "forget_proj"):
        assert any(small in name for name in left), (small, left)


MODEL = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96}
FP8 = {"fp8": "current"}


def gradients(rank: int, world_size: int, init_method: str, cases: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    """Loss and whole gradients in fp64 of each layout with its options."""
    found = []
    for number, (axes, options) in enumerate(cases):
        with tiny.mesh_on(axes, rank, f"{init_method}-{number}") as mesh:
            engine = tiny.engine_in(mesh, dtype=torch.float64, **MODEL, **options)
            loss = engine.forward_backward(tiny.step_batches(0, mesh)).mean
            names = {id(parameter): name for name, parameter in tiny.named(engine)}
            own = {names[id(p)]: (p, gradient) for _, p, gradient in engine.gradients()}
            found.append((loss, tiny.gather(engine, own)))
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "tnl": {"train": FP8, "mixer": "tnl"},
    "llama with biases": {"train": FP8, "mixer": "llama", "mixer_options": {"llama": {"attention_bias": "all"}}},
    "adapters": {"train": {**FP8, "init_from": "base@1"}, "mixer": "hgrn2", "adapter": {"name": "lora", "r": 2}},
}
AXES = {
    "tnl": [(2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (2, 1, 1, 1), (2, 1, 2, 1, 2)],
    "llama with biases": [(2, 2, 1, 1)],
    "adapters": [(2, 2, 1, 1)],
}


def test_layouts_compute_what_one_process_does(run_ranks: RunRanks) -> None:
    """Ranks scale their own parts. Only the smallest numbers beside the largest ones differ by that."""
    alone = [((1, 1, 1, 1), options) for options in OPTIONS.values()]
    plain = [((1, 1, 1, 1), {**options, "train": {**options["train"], "fp8": "none"}}) for options in OPTIONS.values()]
    (found,) = run_ranks(gradients, 1, [*alone, *plain])
    one, exact = found[: len(OPTIONS)], found[len(OPTIONS) :]
    cases = [(axes, options) for name, options in OPTIONS.items() for axes in AXES[name]]
    for of_rank in run_ranks(gradients, 2, cases):
        results = iter(of_rank)
        for name, (loss, expected), (far_loss, far) in zip(OPTIONS, one, exact, strict=True):
            rounding = max(map(tiny.error, expected.values(), far.values()))
            assert 0.01 < rounding < 0.5 and far_loss != loss, f"{name}: 8 bits change gradients"
            for axes in AXES[name]:
                own_loss, own = next(results)
                assert own_loss == pytest.approx(loss, rel=1e-5), (name, axes)
                apart = {key: tiny.error(gradient, expected[key]) for key, gradient in own.items()}
                assert max(apart.values()) < 2e-3, (name, axes, max(apart.items(), key=lambda one: one[1]))


def trained(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    """Weights of two steps with each kind of recomputation; and losses without training."""
    found: dict[str, Any] = {}
    with tiny.mesh_on((1, 1, 1, 1), rank, init_method) as mesh:
        for name in ("none", "selective", "full"):
            engine = tiny.engine_in(mesh, train={**FP8, "recompute": name}, precision="bf16", **MODEL)
            found[name] = tiny.train(engine, 0, 2)[-1][2]
        plain = tiny.engine_in(mesh, precision="bf16", **MODEL)
        narrow = tiny.engine_in(mesh, train=FP8, precision="bf16", **MODEL)
        batches = tiny.step_batches(0, mesh)
        found["read"] = [one.forward_only(batches).loss for one in (plain, narrow)]
        found["trained"] = [one.forward_backward(batches).loss for one in (plain, narrow)]
        narrow.step(tiny.LR)
        found["bitwise"] = found["read"][0] == plain.forward_only(batches).loss
    return found


def test_recomputation_repeats_the_bits_and_reading_has_none(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(trained, 1)
    for name in ("selective", "full"):
        assert all(torch.equal(weight, found["none"][key]) for key, weight in found[name].items()), name
    assert found["read"][0] == found["read"][1] and found["bitwise"]
    assert found["trained"][0] != found["trained"][1]
