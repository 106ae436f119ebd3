"""One token of linear attention with decays, in one launch."""

from typing import Any

import torch
from torch import Tensor

from lightscale.kernels.common.triton.cases import NAMES, case_name, pointers
from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.kernels import recurrent
from lightscale.kernels.common.triton.launch import LAUNCH, NUM_WARPS, on_device_of, power_of_two

# Most columns of a state per program, which holds all rows of these columns.
_COLUMNS = 32


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """o and the next state, without a gradient.

    Args:
        q: the query (B, H, K).
        k: the key (B, H, K).
        v: the value (B, H, V).
        log_decay: (B, H, K), of any strides, including 0; or None.
        S: the state (B, H, K, V), fp32.
    """
    o, after = torch.empty(v.shape, dtype=v.dtype, device=v.device), S.new_empty(S.shape)
    num_rows, num_heads, width = v.shape
    decays = None if log_decay is None else log_decay.float()
    constants = step_constants(q.size(2), width)
    num_programs = num_rows * num_heads * -(-width // constants["BLOCK_V"])
    if num_programs:
        with on_device_of(q):
            recurrent[(num_programs,)](
                q.contiguous(),
                k.contiguous(),
                v.contiguous(),
                decays,
                S.contiguous(),
                o,
                after,
                num_heads,
                *((0, 0, 0) if decays is None else decays.stride()),
                **constants,
                **LAUNCH,
            )
    return o, after


def recurrent_case(operator: str, dtype: torch.dtype, K: int, V: int, *, by_channel: bool) -> KernelCase:
    """The kernel as ``operator`` launches it, with decays of heads, or of channels."""
    given, _ = pointers(
        {
            **dict.fromkeys(("q", "k", "v", "out"), NAMES[dtype]),
            **dict.fromkeys(("log_decay", "before", "after"), "fp32"),
        }
    )
    one, *others = ("stride_gk", "stride_gh", "stride_gb") if by_channel else ("stride_gh", "stride_gk", "stride_gb")
    return KernelCase(
        name=case_name(operator, "step", K, V, dtype),
        kernel=recurrent,
        arguments={**given, "H": "i32", **dict.fromkeys(others, "i32:16")},
        constants={**step_constants(K, V), one: 1},
        num_warps=NUM_WARPS,
        tensor_cores=False,
    )


def step_constants(K: int, V: int) -> dict[str, Any]:
    """The widths of a state (K, V), and of the part that one program holds (``step_program``)."""
    return {
        "K": K,
        "V": V,
        "BLOCK_K": power_of_two(K, most=1 << 20),
        "BLOCK_V": power_of_two(V, most=_COLUMNS),
    }
