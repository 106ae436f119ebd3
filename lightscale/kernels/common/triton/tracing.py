"""Launches of Triton kernels as a GPU would get them, without a GPU, memory or compilation.

Tensors are on PyTorch's device "meta": they have shapes, strides and no memory. The launching code runs as on a GPU.
Each launch is recorded with its arguments, which ``compile_launch`` compiles as a launch on a GPU would.
A process that traces must not run Triton's interpreter.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, create_function_from_signature

from lightscale.kernels.common.backends import meta_as_gpu
from lightscale.kernels.common.triton import launch

# Types and specialisations of arguments are the same for all of NVIDIA's GPUs.
_BACKEND = make_backend(GPUTarget("cuda", 90, 32))


@cache
def _binder(kernel: Any) -> Callable[..., tuple[dict[str, Any], list[tuple[str, Any]], dict[str, Any]]]:
    """Triton's own function that names the types of arguments at a launch."""
    return create_function_from_signature(kernel.signature, kernel.params, _BACKEND)


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    words: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's, with its operator's."""
        return f"{self.kernel.__module__.removeprefix('lightscale.kernels.')}.{self.kernel.__name__}"

    def specialised(self) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
        """Arguments by name; type and specialisation of each, of which Triton makes the key of a compiled variant."""
        bound, specialisation, _ = self.bound()
        return bound, specialisation

    def bound(self, **options: Any) -> tuple[dict[str, Any], list[tuple[str, Any]], dict[str, Any]]:
        """``specialised``, and the options that are no arguments, with those given here."""
        return _binder(self.kernel)(*self.words, **self.options, **options)

    @property
    def variant(self) -> str:
        """Equal for launches of one compiled variant of one kernel."""
        _, specialisation, options = self.bound()
        return f"{self.name} {specialisation} {sorted(options.items())}"


class _Launching(TorchDispatchMode):
    """Operators that hold launches are run: on this device PyTorch would take what they registered as fakes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "lightscale":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within, ``owner.name`` is ``value``."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def traced(num_multiprocessors: int) -> Iterator[list[KernelLaunch]]:
    """The launches that operators on tensors of the device "meta" make inside, for a GPU of so many multiprocessors."""
    found: list[KernelLaunch] = []

    def note(kernel: Any, *words: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        assert not callable(grid), f"{kernel.__name__}: a grid that depends on tuned constants"
        found.append(KernelLaunch(kernel, tuple(grid), words, options))

    with ExitStack() as stack:
        for owner, name, value in (
            (JITFunction, "run", note),
            (launch, "num_multiprocessors", lambda device: num_multiprocessors),
            # Neither has a form for this device, and nothing is cast there.
            (torch, "autocast", lambda *_, **__: nullcontext()),
            (torch, "get_autocast_dtype", lambda device: torch.bfloat16),
        ):
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(meta_as_gpu())
        stack.enter_context(_Launching())
        yield found


class _Driver:
    """Stands in for Triton's driver of a GPU that nothing is launched on."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_launch(one: KernelLaunch, capability: int) -> bool:
    """Compile the variant of a launch for GPUs of compute capability ``capability`` (90 for sm_90) into Triton's cache.

    The key in the cache is that of a real launch, because Triton's own code makes it. Returns whether the cache had the
    variant. The process can launch nothing afterwards.
    """
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    driver.set_active(_Driver(GPUTarget("cuda", capability, 32)))
    one.kernel.run(*one.words, grid=one.grid, warmup=True, **one.options)
    # Without a compilation or a search in the cache: this process has the variant already.
    return all(hits)
