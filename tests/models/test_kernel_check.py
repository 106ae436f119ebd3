"""Kernels beside their chunked forms, interpreted on the CPU: right ones pass, a wrong one is found and named."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightscale.config.model import ModelConfig
from lightscale.errors import UserError
from lightscale.kernels.common import backends
from lightscale.kernels.common.backends import choose_backend, fall_back, implementation, launches_triton
from lightscale.models import kernel_check
from lightscale.models.kernel_check import Mismatch, check_kernels

CPU = torch.device("cpu")


def wrong(mixer: str, **options: Any) -> list[Mismatch]:
    shape = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 48, "vocab_size": 128}
    model = ModelConfig.model_validate({"mixer": mixer, "mixer_options": {mixer: options}, **shape})
    return list(check_kernels(model, torch.float32, CPU, tokens=40, backend="triton"))


@pytest.mark.parametrize(
    "mixer",
    [
        *("tnl", "hgrn2", "gated-delta-net", "lion-s", "decay-attention", "causal-rn"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("lightnet", "delta-net", "kimi-delta")),
    ],
)
def test_right_kernels_pass(mixer: str) -> None:
    assert wrong(mixer) == []


@pytest.mark.long
@pytest.mark.parametrize("mixer", ["causal-rn", "bi-rn"])
def test_of_relations_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch, mixer: str) -> None:
    """Right ones pass; without what the norm adds they do not."""
    monkeypatch.setattr(kernel_check, "_CASES", {"relation": kernel_check._CASES["relation"]})
    options = {"form": "quadratic", "activation": "silu"}
    assert wrong(mixer, **options) == []
    module = implementation("relation", "triton")
    right = module._Pairs.shares
    monkeypatch.setattr(module._Pairs, "shares", lambda *args: 0 * right(*args))
    assert {one.result for one in wrong(mixer, **options)} == {"gradient of a", "gradient of b"}


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head's outputs are 10 % too large."""
    module = implementation("gla", "triton")
    right = module.out_fwd

    def scaled(*args: Any) -> Any:
        o, state = right(*args)
        return torch.cat([1.1 * o[:, :, :1], o[:, :, 1:]], dim=2), state

    monkeypatch.setattr(module, "out_fwd", scaled)
    found = wrong("hgrn2")
    assert {one.operator for one in found} == {"gla"}
    assert found[0].result == "output"
    assert str(found[0]).startswith("gla: output is off by 0.0")


@pytest.mark.parametrize(
    ("mixer", "options", "operator", "place"),
    [("lightnet", {"learned_angles": True}, "lightnet", 3), ("cosformer2", {}, "lightning", 4)],
)
def test_a_wrong_gradient_of_learned_angles_is_named(
    monkeypatch: pytest.MonkeyPatch, mixer: str, options: dict[str, bool], operator: str, place: int
) -> None:
    """It is 1 % too large, and all else right. Of fixed angles there is none to compare."""
    module = implementation(operator, "triton")
    right = module._gradients

    def scaled(*args: Any) -> tuple[torch.Tensor, ...]:
        found = list(right(*args))
        found[place] = 1.01 * found[place]
        return tuple(found)

    monkeypatch.setattr(module, "_gradients", scaled)
    monkeypatch.setattr(kernel_check, "_CASES", {operator: kernel_check._CASES[operator]})
    (found,) = wrong(mixer, **options)
    assert str(found).startswith(f"{operator}: gradient of theta is off by 0.01, ")


def test_nan_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = implementation("gla", "triton")
    right = module.out_fwd
    monkeypatch.setattr(module, "out_fwd", lambda *args: (right(*args)[0] * torch.nan, None))
    assert "gla: output is off by nan, limit 0.0001" in [str(one) for one in wrong("hgrn2")]


def test_a_kernel_that_does_not_run_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("PTX of a newer version\nand a long listing")

    monkeypatch.setattr(implementation("gla", "triton"), "out_fwd", refuse)
    assert [str(one) for one in wrong("hgrn2")] == ["gla: does not run: RuntimeError: PTX of a newer version"]


def test_a_cache_that_cannot_be_written_is_no_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operators would hide it, many times slower."""

    def refuse(*args: Any) -> None:
        raise UserError("Triton's cache /cache: Read-only file system")

    monkeypatch.setattr(implementation("gla", "triton"), "out_fwd", refuse)
    with pytest.raises(UserError, match="Read-only file system"):
        wrong("hgrn2")


def test_auto_falls_back_for_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_fallen", set())
    on_gpu: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda:0"), shape=(1, 64))
    assert (choose_backend("gla", on_gpu), choose_backend("tpe", on_gpu)) == ("triton", "triton")
    assert launches_triton(on_gpu)
    fall_back("gla")
    assert (choose_backend("gla", on_gpu), choose_backend("tpe", on_gpu)) == ("chunked", "triton")
    # Folds of states are not compared at start: where one compiled kernel is wrong, no other is trusted unseen.
    assert not launches_triton(on_gpu)
