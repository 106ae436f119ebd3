"""The one place where a back-end is chosen, by the descriptions in ``lightscale.kernels.operators``.

Triton on GPUs, PyTorch in chunks elsewhere, or what was asked for. An operator calls ``choose_backend`` and gets the
module of a back-end by ``implementation``; what sequence parallelism and generation call of it, its passes and its
recurrent step, are functions of ``chunked.py`` that ``dispatch_passes`` and ``dispatch_step`` hand to the same choice.
"""

import os
from collections.abc import Callable, Iterator
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

# Triton kernels have no fp64: dots of it do not reach tensor cores, and the reference needs no speed.
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Passes = TypeVarTuple("_Passes")

_default = AUTO
_loaded: dict[str, ModuleType] = {}
_fallen: set[str] = set()


def set_default_backend(name: str) -> None:
    """What "auto" means from now on in this process: "auto" (by device), "triton", "chunked" or "reference".

    Operators that lack the named back-end raise when they are called.
    """
    global _default  # noqa: PLW0603 - one setting of the process, like torch's default dtype
    _default = name


def fall_back(operator: str) -> None:
    """From now on "auto" never means Triton for ``operator`` in this process: its kernels were found wrong here."""
    _fallen.add(get_operator(operator).name)


def default_backend() -> str:
    """What was set by ``set_default_backend``."""
    return _default


def choose_backend(operator: str, x: Tensor, requested: str = AUTO) -> str:
    """The name of the back-end of ``operator`` that computes inputs like ``x`` (dtype, device and width count).

    That is ``requested``; for "auto" what ``set_default_backend`` says, else the first that can. ``PYTORCH`` for an
    operator without back-ends, whatever is asked for.

    Raises:
        UserError: an unknown operator, one that has no such back-end, or Triton cannot run here or on x's dtype.
    """
    described = get_operator(operator)
    return _choose(described, described.backends, x, requested, what=operator)


def launches_triton(x: Tensor) -> bool:
    """Whether Triton computes on tensors like ``x`` what is no operator of its own, such as folds of states.

    As ``choose_backend`` would choose it, but PyTorch where Triton cannot: it is asked for operators, not for this.
    Nor where an operator's kernels were found wrong: nobody has compared these.
    """
    if _default == AUTO:
        return x.is_cuda and HAS_TRITON and x.dtype in _TRITON_DTYPES and not _fallen
    return _default == "triton" and x.dtype in _TRITON_DTYPES and HAS_TRITON and (x.is_cuda or _interpreting())


def implementation(operator: str, backend: str) -> Any:
    """The module of a back-end, imported when it is first used.

    A CPU never needs Triton's, Triton may not be installed, and it decides when it is imported whether it interprets.
    """
    module = get_operator(operator).backend(backend).module
    if module not in _loaded:
        _loaded[module] = import_module(module)
    return _loaded[module]


def preload_backends(operator: str) -> None:
    """Import the back-ends that can run here: ``torch.compile`` cannot trace the import itself.

    The last line of an operator's ``__init__.py``.
    """
    for name in get_operator(operator).backend_names:
        if name != "triton" or (HAS_TRITON and (torch.cuda.is_available() or _interpreting())):
            implementation(operator, name)


def dispatch_pass(operator: str, chunked: Callable[_P, _R]) -> Callable[_P, _R]:
    """A pass of state passing, by the back-end that fits the first argument's device and dtype.

    Args:
        operator: its name.
        chunked: the pass of the chunked back-end, which documents it; the others have it under the same name.
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
    """``dispatch_pass`` for ``recurrent_step``: one launch on a GPU, but by PyTorch where a gradient is asked for.

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
            able_here = x.is_cuda and HAS_TRITON and x.dtype in _TRITON_DTYPES and operator.name not in _fallen
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
    """Those in nested tuples."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, tuple):
        for part in nested:
            yield from _tensors(part)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _check_triton(x: Tensor, what: str) -> None:
    if not HAS_TRITON:
        raise UserError(f"{what}: backend 'triton' needs the package triton; use 'auto' or 'chunked'")
    if x.dtype not in _TRITON_DTYPES:
        raise UserError(f"{what}: backend 'triton' supports fp16, bf16 and fp32, not {x.dtype}; use 'chunked'")
    if not x.is_cuda and not _interpreting():
        raise UserError(
            f"{what}: backend 'triton' needs a GPU, but the inputs are on {x.device}; use 'auto' or 'chunked' "
            "(the environment variable TRITON_INTERPRET=1 runs it in the interpreter, very slowly)"
        )
