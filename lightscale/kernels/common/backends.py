"""Choice of back-ends, from the descriptions in ``lightscale.kernels.operators``.

The choice is Triton on GPUs, PyTorch in chunks elsewhere, or the requested back-end. An operator calls
``choose_backend`` and imports the module of the back-end by ``implementation``. Sequence parallelism calls its passes,
generation its recurrent step. Both are functions of ``chunked.py``; ``dispatch_passes`` and ``dispatch_step`` apply the
same choice to them.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, TypeVarTuple, cast

import torch
from torch import Tensor

from lightscale.errors import UserError
from lightscale.kernels.operators import PYTORCH, Backend, Operator, get_operator

AUTO = "auto"
HAS_TRITON = find_spec("triton") is not None

# Triton kernels have no fp64: its dots do not use tensor cores, and the reference needs no speed.
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Passes = TypeVarTuple("_Passes")

_default = AUTO
_loaded: dict[str, ModuleType] = {}
_fallen: set[str] = set()
# Types of devices whose tensors count as those of a GPU.
_gpus = {"cuda"}


def set_default_backend(name: str) -> None:
    """Set the back-end of "auto" for this process: "auto" (by device), "triton", "chunked" or "reference".

    Operators that lack the named back-end raise when they are called.
    """
    global _default  # noqa: PLW0603 - one setting of the process, like torch's default dtype
    _default = name


def fall_back(operator: str) -> None:
    """Exclude Triton from "auto" for ``operator`` in this process, because a check of its kernels failed here."""
    _fallen.add(get_operator(operator).name)


def default_backend() -> str:
    """The value of ``set_default_backend``."""
    return _default


def choose_backend(operator: str, x: Tensor, requested: str = AUTO) -> str:
    """The name of the back-end of ``operator`` that computes inputs like ``x`` (dtype, device and width count).

    The name is ``requested``; for "auto" the value of ``set_default_backend``, else the first back-end that supports x.
    For an operator without back-ends it is always ``PYTORCH``.

    Raises:
        UserError: the operator is unknown, lacks this back-end, or Triton supports neither this machine nor x's dtype.
    """
    described = get_operator(operator)
    return _choose(described, described.backends, x, requested, what=operator)


@contextmanager
def meta_as_gpu() -> Iterator[None]:
    """Within, back-ends are chosen for tensors on PyTorch's device "meta" as for a GPU's; see ``triton/tracing.py``."""
    _gpus.add("meta")
    try:
        yield
    finally:
        _gpus.discard("meta")


def launches_triton(x: Tensor) -> bool:
    """Whether Triton computes helpers such as folds of states on tensors like ``x``.

    The choice is that of ``choose_backend``, but False where Triton cannot run: a requested back-end concerns operators
    alone. It is also False after the check of an operator's kernels failed, because no check covers the helpers.
    """
    if _default == AUTO:
        return _on_gpu(x) and HAS_TRITON and x.dtype in _TRITON_DTYPES and not _fallen
    return _default == "triton" and x.dtype in _TRITON_DTYPES and HAS_TRITON and (_on_gpu(x) or _interpreting())


def implementation(operator: str, backend: str) -> Any:
    """The module of a back-end, imported at its first use.

    A CPU never needs Triton's module, and Triton is optional. Triton chooses between compiler and interpreter at its
    import.
    """
    module = get_operator(operator).backend(backend).module
    if module not in _loaded:
        _loaded[module] = import_module(module)
    return _loaded[module]


def preload_backends(operator: str) -> None:
    """Import the back-ends that can run here: ``torch.compile`` cannot trace the import.

    An operator's ``__init__.py`` ends with this call.
    """
    for name in get_operator(operator).backend_names:
        if name != "triton" or (HAS_TRITON and (torch.cuda.is_available() or _interpreting())):
            implementation(operator, name)


def dispatch_pass(operator: str, chunked: Callable[_P, _R]) -> Callable[_P, _R]:
    """A pass of state passing, by the back-end that fits the first argument's device and dtype.

    Args:
        operator: name of the operator.
        chunked: the pass of the chunked back-end, which documents the pass; it has the same name in the other
            back-ends.
    """
    described = get_operator(operator)
    # The reference computes whole rows only.
    able = tuple(backend for backend in described.backends if backend.name != "reference")

    @wraps(chunked)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        name = _choose(described, able, _first(args), AUTO, what=f"sequence-parallel {operator}")
        return _function(operator, name, chunked)(*args, **kwargs)

    return run


def dispatch_passes(operator: str, *chunked: *_Passes) -> tuple[*_Passes]:
    """``dispatch_pass`` of each pass of an operator, in their order."""
    passes = cast("tuple[Callable[..., Any], ...]", chunked)
    return cast("tuple[*_Passes]", tuple(dispatch_pass(operator, one) for one in passes))


def dispatch_step(operator: str, chunked: Callable[_P, _R]) -> Callable[_P, _R]:
    """``dispatch_pass`` for ``recurrent_step``: one launch on a GPU, but PyTorch if autograd needs a gradient.

    Triton's steps have no gradient. The reference's step is the chunked back-end's, which has no chunks.
    """
    described = get_operator(operator)

    @wraps(chunked)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        name = _choose(described, described.backends, _first(args), AUTO, what=f"recurrent_step of {operator}")
        learned = torch.is_grad_enabled() and any(x.requires_grad for x in _tensors((args, *kwargs.values())))
        return _function(operator, "chunked" if learned or name == "reference" else name, chunked)(*args, **kwargs)

    return run


def _function(operator: str, backend: str, chunked: Callable[_P, _R]) -> Callable[_P, _R]:
    if backend == "chunked":
        return chunked
    function: Callable[_P, _R] = getattr(implementation(operator, backend), chunked.__name__)
    return function


def _choose(operator: Operator, able: tuple[Backend, ...], x: Tensor, requested: str, *, what: str) -> str:
    """``choose_backend`` among ``able``; ``what`` names it in messages."""
    if not operator.backends:
        return PYTORCH
    wanted = _default if requested == AUTO else requested
    known = [backend for backend in able if backend.max_width is None or x.shape[-1] <= backend.max_width]
    if wanted == AUTO:
        for backend in known:
            able_here = _on_gpu(x) and HAS_TRITON and x.dtype in _TRITON_DTYPES and operator.name not in _fallen
            if backend.name != "triton" or able_here:
                return backend.name
        raise UserError(f"{what} has no back-end for {x.dtype} on {x.device}; use {_names(known)}")
    if wanted not in [backend.name for backend in known]:
        raise UserError(f"{what} has no backend {wanted!r}; use {_names(known)}")
    if wanted == "triton":
        _check_triton(x, what)
    return wanted


def _names(backends: list[Backend]) -> str:
    return ", ".join([AUTO, *(backend.name for backend in backends)])


def _first(args: tuple[Any, ...]) -> Tensor:
    first = args[0]
    assert isinstance(first, Tensor), "a pass takes its first tensor by position"
    return first


def _tensors(nested: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, tuple):
        for part in nested:
            yield from _tensors(part)


def _on_gpu(x: Tensor) -> bool:
    return x.device.type in _gpus


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _check_triton(x: Tensor, what: str) -> None:
    if not HAS_TRITON:
        raise UserError(f"{what}: backend 'triton' needs the package triton; use 'auto' or 'chunked'")
    if x.dtype not in _TRITON_DTYPES:
        raise UserError(f"{what}: backend 'triton' supports fp16, bf16 and fp32, not {x.dtype}; use 'chunked'")
    if not _on_gpu(x) and not _interpreting():
        raise UserError(
            f"{what}: backend 'triton' needs a GPU, but the inputs are on {x.device}; use 'auto' or 'chunked' "
            "(the environment variable TRITON_INTERPRET=1 runs it in the interpreter, very slowly)"
        )
