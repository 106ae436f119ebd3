"""The delta rule against fla-core's plain formulas, written by others, where fla-core is installed (0.6.0)."""

import runpy
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent
cases = SimpleNamespace(**runpy.run_path(str(HERE / "test_delta_rule.py")))


class WideTorch:
    """torch, in which fp32 is fp64: the formulas convert their inputs to fp32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def naive(decay: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("fla", reason="needs fla-core 0.6.0")
    folder, name = {
        "head": ("gated_delta_rule", "naive_recurrent_gated_delta_rule"),
        "channel": ("kda", "naive_recurrent_kda"),
    }[decay]
    module = import_module(f"fla.ops.{folder}.naive")
    monkeypatch.setattr(module, "torch", WideTorch())
    return getattr(module, name)


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
def test_the_plain_formulas_agree(decay: str, strength: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, the final state and all gradients, in fp64; β up to 2."""
    formulas = naive(decay, monkeypatch)
    case = cases.make_case(2, 37, decay=decay, strength=strength, most_beta=2.0)
    leaves = {name: getattr(case, name).detach().requires_grad_() for name in cases.INPUTS}
    inputs: dict[str, Tensor] = {"g" if name == "log_decay" else name: x for name, x in leaves.items()}
    o, state = formulas(**inputs, scale=1.0, output_final_state=True)
    found = torch.autograd.grad([o, state], list(leaves.values()), [case.do, case.dstate])
    expected = {"o": o, "state": state} | {f"d{name}": g for name, g in zip(leaves, found, strict=True)}
    cases.assert_close(cases.run(case), {name: x.detach() for name, x in expected.items()}, 1e-12)
