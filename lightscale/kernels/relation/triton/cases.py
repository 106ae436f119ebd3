"""The kernels in the configurations that training launches, for compilation without a GPU."""

from typing import Any

from lightscale.kernels.common.triton.compile import KernelCase
from lightscale.kernels.relation.triton import tiling
from lightscale.kernels.relation.triton.gradients import key_gradients, query_gradients, shares
from lightscale.kernels.relation.triton.kernels import LENGTHS, center, deviations, sums

# Constants of a run. All other integers are lengths, which cause no compilation.
_CONSTANT = ("D", *(f"stride_{name}" for name in ("xb", "xt", "ab", "at", "bb", "bt", "dob", "dot")))
_BLOCKS = {
    center: {"BLOCK_T": tiling.CENTER_BLOCK_T, "BLOCK_D": tiling.MOST_CENTER_BLOCK_D},
    deviations: {
        "BLOCK_Q": tiling.PRODUCT_BLOCK,
        "BLOCK_K": tiling.PRODUCT_BLOCK,
        "BLOCK_D": tiling.PRODUCT_BLOCK_D,
    },
    shares: {"BLOCK_Q": tiling.SHARE_BLOCK_Q, "BLOCK_K": tiling.SHARE_BLOCK_K, "BLOCK_D": tiling.SHARE_BLOCK_D},
}


def _case(
    name: str, kernel: Any, *, sides: str = "fp32", activation: str = "", absent: tuple[str, ...] = (), **more: Any
) -> KernelCase:
    """One kernel for sides of some dtype; ``absent`` names the pointers that are None."""
    constants: dict[str, Any] = {"BLOCK_Q": tiling.BLOCK, "BLOCK_K": tiling.BLOCK, "BLOCK_D": tiling.BLOCK_D}
    constants |= {"UNROLL": tiling.UNROLL, "ACTIVATION": activation, **_BLOCKS.get(kernel, {}), **dict.fromkeys(absent)}
    types = dict.fromkeys(("a_ptr", "b_ptr", "x_ptr"), f"*{sides}") | dict.fromkeys(("first_ptr", "end_ptr"), "*i32")
    types |= dict.fromkeys(_CONSTANT, "i32:16") | dict.fromkeys((*LENGTHS, "num_tokens"), "i32") | {"eps": "fp32"}
    words = " ".join(word for word in ("relation", name, activation, sides) if word)
    return KernelCase.of(words, kernel, types, constants, tensor_cores=kernel is deviations, **more)


def _of(activation: str, *, usual: bool) -> list[KernelCase]:
    given: dict[str, Any] = {"activation": activation, "usual": usual}
    return [
        _case("sums", sums, **given),
        _case("shares", shares, **given),
        _case("gradient of queries", query_gradients, **given),
        _case("gradient of keys", key_gradients, **given),
    ]


COMPILE_CASES = [
    _case("center", center, sides="bf16"),
    _case("center", center, absent=("variance_ptr",)),
    _case("deviations", deviations),
    *_of("exp", usual=True),
    *(case for activation in ("relu", "elu", "silu") for case in _of(activation, usual=False)),
    # Without a norm.
    *(
        _case(f"{name}, no norm", kernel, sides="bf16", activation="silu", absent=absent, usual=False)
        for name, kernel, absent in (
            ("sums", sums, ("r_ptr",)),
            ("gradient of queries", query_gradients, ("r_ptr", "w_ptr")),
            ("gradient of keys", key_gradients, ("r_ptr", "w_ptr")),
        )
    ),
]
