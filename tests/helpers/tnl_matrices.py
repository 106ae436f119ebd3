"""The matrices in weights of TNL, for tests of optimizers of matrices. Loaded by path (runpy)."""

from torch import Tensor


def parts_of(name: str, num_heads: int, weight: Tensor) -> list[Tensor]:
    """Views of the matrices in a weight: keys and values head by head, gate above up."""
    if name.endswith("kv_proj.weight"):
        by_head = weight.view(num_heads, 2, -1, weight.shape[-1])
        return [by_head[:, 0], by_head[:, 1]]
    return list(weight.chunk(2)) if name.endswith("linear_fc1.weight") else [weight]


def is_matrix(name: str) -> bool:
    """Whether Muon and SOAP take it as a matrix, or several."""
    ends = ("_proj.weight", "gate_down.weight", "linear_fc1.weight", "linear_fc2.weight")
    return name.endswith(ends)
