"""Results kept with their tensor: computed once, and never of numbers that have changed."""

import gc
import weakref

import torch
from torch import nn

from lightscale.kernels.common.once import once


def _counted(of: torch.Tensor, calls: list[int], key: str = "sum") -> torch.Tensor:
    def make() -> torch.Tensor:
        calls.append(1)
        return of.detach().sum()

    return once(of, key, make)


def test_is_computed_once_for_each_key() -> None:
    x, calls = torch.arange(3), list[int]()
    assert _counted(x, calls) is _counted(x, calls)
    _counted(x, calls, "other")
    assert len(calls) == 2


def test_changed_numbers_are_computed_anew() -> None:
    x, calls = torch.arange(3), list[int]()
    assert _counted(x, calls) == 3
    x.add_(1)
    assert _counted(x, calls) == 6
    x.copy_(torch.zeros(3))
    assert _counted(x, calls) == 0


def test_what_the_optimizer_replaces_is_not_kept() -> None:
    """Megatron's optimizer writes parameters through their buffer, of which autograd's version knows nothing."""
    for x in (nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)):
        calls = list[int]()
        assert _counted(x, calls) == 3
        x.data.fill_(2)
        assert _counted(x, calls) == 6


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        x, calls = torch.ones(3), list[int]()
        _counted(x, calls)
        x.fill_(2)
        assert _counted(x, calls) == 6


def test_ends_with_the_tensor() -> None:
    x = torch.ones(3)
    kept = weakref.ref(_counted(x, []))
    assert kept() is not None
    del x
    gc.collect()
    assert kept() is None
