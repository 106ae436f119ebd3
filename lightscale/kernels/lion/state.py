"""The two states of a bidirectional operator, its saved outputs, and its gates."""

from typing import Literal, NamedTuple, get_args

from torch import Tensor

Gate = Literal["leave", "enter"]
"""The decay between two tokens is the product of their decays and all decays between them, except one. "leave" omits
the decay of the token that is reached, "enter" the decay of the token that is left."""
GATES: tuple[str, ...] = get_args(Gate)


class LionState(NamedTuple):
    """Sums of k [v, 1]ᵀ, decayed, of the tokens on both sides of a row, (B, H, K, W) each, fp32 (fp64 for fp64 inputs).

    W is V + 1: the last column is the normaliser's, the decayed sum of the keys. Without a normaliser W is V.
    """

    prefix: Tensor
    """State of the tokens before."""
    suffix: Tensor
    """State of the tokens behind."""


class LionOutputs(NamedTuple):
    """Results of the forward pass that the backward pass reads beside the inputs."""

    o: Tensor
    """(B, T, H, V), in v's dtype."""
    normalizer: Tensor | None
    """(B, T, H): the divisor of the outputs, including ε; None without normalisation."""


def transposed(gate: Gate) -> Gate:
    """The gate whose matrix of decays is the transpose of ``gate``'s."""
    return "enter" if gate == "leave" else "leave"
