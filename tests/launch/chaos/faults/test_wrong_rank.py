"""Products that are wrong by a share, in forward and backward passes, as long as somebody orders it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightscale.launch.chaos import poisoned_training
from lightscale.launch.chaos.faults.wrong_rank import wrong_file
from lightscale.launch.chaos.poisoned_training import WrongProducts
from lightscale.parallel.engine import Engine
from lightscale.parallel.weight_gradients import accumulate
from lightscale.training.health.fault_injection import VARIABLE

ERROR = 1e-3


def products() -> list[torch.Tensor]:
    """Of one linear layer: its output, the gradient of its input, that of its weight, and the same added to a sum."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(4, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    out = x @ weight.t()
    out.backward(torch.ones_like(out))
    total = torch.zeros(4, 4, dtype=torch.float64)
    accumulate(x.detach(), torch.ones(4, 4, dtype=torch.float64), total)
    batched = torch.bmm(x.detach()[None], weight.detach()[None])
    assert x.grad is not None and weight.grad is not None
    return [out.detach(), x.grad, weight.grad, total, batched, (x + weight).detach()]


def test_every_product_is_wrong_and_nothing_else() -> None:
    right = products()
    with WrongProducts(ERROR):
        wrong = products()
    for number, (one, two) in enumerate(zip(right, wrong, strict=True)):
        torch.testing.assert_close(two, one if number == 5 else one * (1 + ERROR), rtol=1e-12, atol=0)
    assert all(map(torch.equal, products(), right))


def test_a_rank_is_wrong_for_as_long_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "forward_backward", lambda self, batches: batches[0] @ batches[0])
    monkeypatch.setattr(poisoned_training.train, "_COMMAND", [])
    for name in ("_finalize_gradients", "_keep_reduction"):
        monkeypatch.setattr(Engine, name, getattr(Engine, name))
    monkeypatch.setenv(VARIABLE, f"@{tmp_path}")
    monkeypatch.setenv("RANK", "2")
    poisoned_training._poison_every_step()
    engine: Any = object.__new__(Engine)
    one = torch.ones(1, 1, dtype=torch.float64)

    def found() -> float:
        return float(engine.forward_backward([one]))

    assert found() == 1
    for rank in (1, 2):
        wrong_file(tmp_path, rank).write_text(json.dumps({"error": ERROR}))
        assert found() == (1 + ERROR if rank == 2 else 1)
    assert found() == 1 + ERROR, "until it is mended"
    wrong_file(tmp_path, 2).unlink()
    assert found() == 1
