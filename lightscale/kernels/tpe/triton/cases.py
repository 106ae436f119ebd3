"""The kernels of the scan in the configurations that training launches, for compilation without a GPU."""

from typing import Any

import triton

from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.common.triton.launch import power_of_two
from lightscale.kernels.tpe.triton.kernels import parameter_sums, recurrent, sweep
from lightscale.kernels.tpe.triton.tiling import CHANNELS, PARAMETER_MODES, STEP


def _case(name: str, kernel: Any, dtype: str, E: int, absent: tuple[str, ...], **constants: Any) -> KernelCase:
    """One kernel for inputs of ``dtype`` and E modes; ``absent`` names the pointers that are None."""
    fixed = {
        "E": E,
        "BLOCK_E": triton.next_power_of_2(max(16, E)),
        "BLOCK_D": CHANNELS,
        "STEP": STEP,
        "PRECISION": "tf32x3" if dtype == "fp32" else "tf32",
        **dict.fromkeys(absent),
        **constants,
    }
    types = dict.fromkeys(("x", "y", "dy", "gamma"), f"*{dtype}") | {"documents": "*i32"}
    types |= dict.fromkeys(("D", "stride_xb", "stride_xt", "stride_yb", "stride_yt"), "i32:16")
    types |= dict.fromkeys(("stride_dyb", "stride_dyt"), "i32:16")
    types |= dict.fromkeys(("T", "split_tokens", "num_splits", "first_split"), "i32")
    if kernel is parameter_sums:
        fixed["BLOCK_E"] = power_of_two(E, most=PARAMETER_MODES)
    options = {"tensor_cores": kernel is not recurrent, "may_spill": dtype == "fp32"}
    return KernelCase.of(f"tpe {name} E={E} {dtype}", kernel, types, fixed, **options)


_OUTPUTS = ("leaving", "slopes_leaving")
_STATES = ("y", "kappa", "entering", "before", "last")

COMPILE_CASES = [
    case
    for dtype, E in (("bf16", 128), ("fp32", 128))
    for case in (
        _case("outputs", sweep, dtype, E, _OUTPUTS, REVERSE=False),
        _case("outputs reversed", sweep, dtype, E, _OUTPUTS, REVERSE=True),
        _case("states", sweep, dtype, E, (*_STATES, "slopes_leaving"), REVERSE=False),
        _case("states with slopes", sweep, dtype, E, _STATES, REVERSE=False),
        _case("parameters", parameter_sums, dtype, E, ()),
        _case("one token", recurrent, dtype, E, ()),
    )
]
