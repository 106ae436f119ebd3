"""Through which parameters a Triton kernel stores, as the CUDA twin reads it off the source: beside what it changes."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from lightscale.config.files import load
from lightscale.models import kernel_check

CONDITIONAL = {"dweight", "leave_U", "right_parts"}
"""Stored to under conditions that do not hold here."""
OPERATORS = {
    "tnl-tiny": ("lightning", "norm", "glu", "cross_entropy"),
    "hgrn2-tiny": ("gla",),
    "gated-delta-net-tiny": ("delta_rule",),
    "kimi-delta-tiny": ("delta_rule",),
    "lightnet-tiny": ("lightnet", "tpe"),
    "lion-s-tiny": ("lion",),
    "causal-rn-tiny": ("relation",),
}
QUADRATIC = ("model.mixer_options.causal-rn.form=quadratic",)
SIZES = (
    *("model.num_layers=1", "model.num_heads=2", "model.hidden_size=16", "model.intermediate_size=16"),
    *("model.vocab_size=128", "data.sequence_length=64"),
)


@pytest.fixture
def new_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is left in memory of an earlier buffer may be what the kernel writes, and zeros over zeros show nothing."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.long
@pytest.mark.parametrize("config", OPERATORS)
def test_what_kernels_change_they_are_known_to_write(
    tools_path: Path, new_memory_is_nan: None, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    """Interpreted, forward and backward; a byte that comes out as it was shows nothing, so over all launches."""
    from cuda_twin.recorded.accesses import written_by

    changed: dict[Any, set[str]] = defaultdict(set)
    given: dict[Any, set[str]] = defaultdict(set)
    launch = InterpretedFunction.run

    def compared(kernel: Any, *words: Any, **options: Any) -> None:
        bound = {**dict(zip(kernel.arg_names, words, strict=False)), **options}
        tensors = {name: value for name, value in bound.items() if isinstance(value, Tensor)}
        before = {name: value.clone() for name, value in tensors.items()}
        launch(kernel, *words, **options)
        given[kernel] |= set(tensors)
        changed[kernel] |= {
            name for name, value in tensors.items() if not torch.equal(_bits(value), _bits(before[name]))
        }

    monkeypatch.setattr(InterpretedFunction, "run", compared)
    monkeypatch.setattr(kernel_check, "operators_of", lambda model: OPERATORS[config])
    model = load(config, (*SIZES, *(QUADRATIC if config.startswith("causal-rn") else ()))).model
    assert (
        list(kernel_check.check_kernels(model, torch.float32, torch.device("cpu"), tokens=24, backend="triton")) == []
    )
    assert len(changed) >= 3
    for kernel, names in changed.items():
        written = written_by(kernel) & given[kernel]
        assert names <= written and written - names <= CONDITIONAL, (kernel.__name__, names, written)


def _bits(tensor: Tensor) -> Tensor:
    """The bytes: NaN equals NaN."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_pointers_are_followed_through_names_tuples_and_helpers(tools_path: Path) -> None:
    from cuda_twin.recorded.accesses import written_by

    assert written_by(_outer) == {"first", "second", "third"}
    assert written_by(_fill) == {"into"}


tl: Any = triton.language


@triton.jit
def _fill(into, source, size):  # type: ignore[no-untyped-def]
    tl.store(into + tl.load(source) % size, 0.0)


@triton.jit
def _outer(first, second, third, read, size):  # type: ignore[no-untyped-def]
    one, other = first + size, read + size
    place = second if size else one
    place += 1
    tl.atomic_add(place, tl.load(other))
    _fill(third + size, source=read, size=size)
