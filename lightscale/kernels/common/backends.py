"""What computes an operator: Triton on GPUs, the chunked PyTorch form elsewhere, or what was asked for."""

import os
from collections.abc import Collection
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightscale.errors import UserError

AUTO = "auto"
HAS_TRITON = find_spec("triton") is not None

# Triton kernels have no fp64: dots of it do not reach tensor cores, and the reference needs no speed.
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_default = AUTO
_loaded: dict[str, ModuleType] = {}


def set_default_backend(name: str) -> None:
    """What "auto" means from now on in this process: "auto" (by device), "triton", "chunked" or "reference".

    Operators that lack the named form raise when they are called.
    """
    global _default  # noqa: PLW0603 - one setting of the process, like torch's default dtype
    _default = name


def default_backend() -> str:
    """What was set by ``set_default_backend``."""
    return _default


def choose_backend(requested: str, x: Tensor, known: Collection[str], *, operator: str) -> str:
    """The form of ``operator`` that computes inputs like ``x``: ``requested``, or for "auto" by setting and device.

    Raises:
        UserError: the operator has no such form, or Triton cannot run here or on x's dtype.
    """
    name = _default if requested == AUTO else requested
    if name == AUTO:
        return "triton" if "triton" in known and x.is_cuda and HAS_TRITON and x.dtype in _TRITON_DTYPES else "chunked"
    if name not in known:
        raise UserError(f"{operator} has no backend {name!r}; known here: {', '.join([AUTO, *known])}")
    if name == "triton":
        _check_triton(x, operator)
    return name


def triton_forms(operator: str) -> Any:
    """The module ``lightscale.kernels.<operator>.triton``, imported when it is first used.

    A CPU never needs it, Triton may not be installed, and it decides when it is imported whether it interprets.
    """
    if operator not in _loaded:
        _loaded[operator] = import_module(f"lightscale.kernels.{operator}.triton")
    return _loaded[operator]


def preload_triton(operator: str) -> None:
    """Import the operator's Triton form where it can run: ``torch.compile`` cannot trace the import itself.

    The last line of an operator's ``__init__.py``.
    """
    if HAS_TRITON and (torch.cuda.is_available() or _interpreting()):
        triton_forms(operator)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _check_triton(x: Tensor, operator: str) -> None:
    if not HAS_TRITON:
        raise UserError(f"{operator}: backend 'triton' needs the package triton; use 'auto' or 'chunked'")
    if x.dtype not in _TRITON_DTYPES:
        raise UserError(f"{operator}: backend 'triton' computes fp16, bf16 and fp32, not {x.dtype}; use 'chunked'")
    if not x.is_cuda and not _interpreting():
        raise UserError(
            f"{operator}: backend 'triton' needs a GPU, but q is on {x.device}; use 'auto' or 'chunked' "
            "(the environment variable TRITON_INTERPRET=1 interprets it, very slowly)"
        )
