"""Matrix products of fp32 on CPUs: by oneDNN where that is faster, by MKL where it is not.

On AMD's CPUs MKL takes AVX2, oneDNN all that they have; ``bench.py cpu-training`` measures steps by both. But a call of
oneDNN costs more, and one of a new shape much more.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# As far as products of fp32 are from those of fp64 here: 2e-7. Of bf16 3e-3, of TF32 3e-4.
_LARGEST_ERROR = 1e-5
_LEAST_NUMBERS = 4096
"""Of the activations (tokens, hidden_size). Below, calls cost more than products."""
_MKL, _ONEDNN = "highest", "medium"


def use_onednn_products() -> None:
    """Multiply matrices of fp32 by oneDNN in place of MKL from now on, where PyTorch can and they stay fp32's.

    PyTorch asks oneDNN for products of fp32 only where the process permits bf16 ("medium"). oneDNN uses this permission
    on CPUs with units for it (AMX, some of Arm); there a product shows it, and all stays as it was. A precision that
    the process has chosen already has precedence.
    """
    if torch.get_float32_matmul_precision() != _MKL:
        return
    torch.set_float32_matmul_precision(_ONEDNN)
    if _error() > _LARGEST_ERROR:
        use_mkl_products()


def use_mkl_products() -> None:
    """PyTorch's default."""
    torch.set_float32_matmul_precision(_MKL)


def _error() -> float:
    """Relative error of a product of fp32. Nothing is drawn: the generators' states are those of a run."""
    a, b = (torch.arange(256 * 256, dtype=torch.float64).mul(step).sin().view(256, 256) for step in (1.1, 0.7))
    expected = a.float().double() @ b.float().double()
    return float(torch.dist((a.float() @ b.float()).double(), expected) / expected.norm())


@contextmanager
def products_of(numbers: int) -> Iterator[None]:
    """A pass whose activations have so many numbers, tokens x hidden_size: few are multiplied by MKL."""
    chosen = torch.get_float32_matmul_precision()
    if chosen != _ONEDNN or numbers >= _LEAST_NUMBERS:
        yield
        return
    use_mkl_products()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)
