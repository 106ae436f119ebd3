"""The kernels in the configurations that training launches, for compilation without a GPU."""

from typing import Any

from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.log_sum.triton.kernels import scan, scan_back
from lightscale.kernels.log_sum.triton.tiling import CHANNELS, CHUNK

_STRIDES = ("split_tokens", "stride_bb", "stride_bt", "stride_zb", "stride_zt", "stride_dzb", "stride_dzt")


def _case(name: str, kernel: Any, dtype: str, *absent: str) -> KernelCase:
    """One kernel for b of ``dtype``; ``absent`` names the pointers that are None."""
    constants: dict[str, Any] = {"CHUNK": CHUNK, "BLOCK_D": CHANNELS, **dict.fromkeys(absent)}
    types = dict.fromkeys(("b_ptr", "db_ptr"), f"*{dtype}") | {"starts_ptr": "*i8", "T": "i32", "num_splits": "i32"}
    types |= dict.fromkeys(("D", *_STRIDES), "i32:16")
    options = {"tensor_cores": False, "usual": dtype == "bf16"}
    return KernelCase.of(f"log_sum {name} {dtype}", kernel, types, constants, **options)


COMPILE_CASES = [
    case
    for dtype in ("bf16", "fp32")
    for case in (
        _case("sums", scan, dtype, "last_ptr"),
        _case("sums of splits", scan, dtype, "entering_ptr", "z_ptr"),
        _case("gradient", scan_back, dtype, "first_ptr"),
        _case("cotangents of splits", scan_back, dtype, "b_ptr", "behind_ptr", "db_ptr"),
    )
]
