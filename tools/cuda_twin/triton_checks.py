"""Launches of Triton kernels that are checked instead of made: no compilation, and every argument looked at."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton

from cuda_twin.recorded.accesses import AccessNotes, note_triton
from cuda_twin.recorded.records import Recorder

_MOST_BLOCKS = (2**31 - 1, 65535, 65535)
_INT32 = 2**31


@dataclass(kw_only=True)
class TritonChecks:
    """What was found."""

    faults: Counter[str] = field(default_factory=Counter)
    """What would fail on a device, and how often."""
    large: dict[str, int] = field(default_factory=dict)
    """Kernel and argument to the elements of its largest tensor, of those beyond what int32 can count."""

    def check(self, name: str, arguments: list[str], bound: dict[str, Any], grid: tuple[int, ...]) -> None:
        """Look at one launch."""
        if len(grid) != 3 or any(not 1 <= size <= most for size, most in zip(grid, _MOST_BLOCKS, strict=False)):
            self.faults[f"{name}: a grid of {grid}"] += 1
        for argument in arguments:
            if argument not in bound:
                self.faults[f"{name}: no argument {argument}"] += 1
            elif isinstance(value := bound[argument], torch.Tensor):
                self._check_tensor(f"{name}.{argument}", value)

    def _check_tensor(self, what: str, tensor: torch.Tensor) -> None:
        if not tensor.is_cuda:
            self.faults[f"{what} is on {tensor.device}"] += 1
        elif tensor.device.index != torch.cuda.current_device():
            self.faults[f"{what} is on another device than the launch"] += 1
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if reach >= _INT32:
            self.large[what] = max(reach, self.large.get(what, 0))


@contextmanager
def checked_launches(checks: TritonChecks, recorder: Recorder, notes: AccessNotes) -> Iterator[None]:
    """While this is open, Triton compiles nothing, and a launch is looked at and recorded."""

    def launch(kernel: Any, *words: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        names = list(kernel.arg_names)
        bound = dict(zip(names, words, strict=False))
        bound.update({name: value for name, value in options.items() if name in names})
        for parameter in kernel.params:
            if parameter.name not in bound and parameter.has_default:
                bound[parameter.name] = parameter.default
        sizes = grid(bound) if callable(grid) else grid
        x, y, z = (*sizes, 1, 1)[:3]
        checks.check(kernel.__name__, names, bound, (x, y, z))
        stream = torch.cuda.current_stream().cuda_stream
        recorder.note_triton(kernel.__name__, stream, (x, y, z), 32 * options.get("num_warps", 4))
        note_triton(notes, kernel, bound)

    with mock.patch.object(triton.runtime.jit.JITFunction, "run", launch):
        yield
