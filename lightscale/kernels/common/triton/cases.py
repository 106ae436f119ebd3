"""Types of arguments and names for the operators' lists of kernels to compile."""

import torch

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def pointers(kinds: dict[str, str | None]) -> tuple[dict[str, str], dict[str, None]]:
    """Types of the given pointers (arguments), and None for the absent ones (constants)."""
    given = {name: f"*{kind}" for name, kind in kinds.items() if kind is not None}
    return given, {name: None for name, kind in kinds.items() if kind is None}


def integers(*names: str) -> dict[str, str]:
    """Types of lengths and counts."""
    return dict.fromkeys(names, "i32")


def strides(*names: str) -> dict[str, str]:
    """Types of the strides of tensors (B, T, H, width) but the last one, which is 1."""
    return {f"stride_{name}{dim}": "i32:16" for name in names for dim in "bth"}


def case_name(operator: str, what: str, K: int, V: int, dtype: torch.dtype, *variants: str) -> str:
    """For example: lightning dstates 128x128 bf16 learned."""
    return " ".join([operator, what, f"{K}x{V}", NAMES[dtype], *variants])
