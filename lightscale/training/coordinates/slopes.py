"""Exponents of sizes over widths, and their verdict; without torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

SIZE, CHANGE = "size", "change"
"""Root mean square of an activation before the first step; of its difference to that since."""
LOGITS = "logits"
LIMIT = 0.1
"""Largest exponent over the width, of either sign, of what keeps its size."""

FAR = 3.0
"""Change of an activation, as a factor of its size, behind which exponents say little about the scaling: the steps
have left the neighbourhood of the initial weights, where narrow models differ by terms that vanish with the width."""

Key = tuple[str, str, int]
"""Activation, kind, step."""


@dataclass(frozen=True, kw_only=True)
class Slope:
    """Sizes of one activation at one step."""

    activation: str
    kind: str
    step: int
    """0: before the first one."""
    sizes: tuple[float, ...]
    """Of each width."""
    slope: float
    """Exponent of the width; infinite where a size is 0 or not finite."""
    is_judged: bool

    @property
    def is_flat(self) -> bool:
        """Whether it keeps its size."""
        return abs(self.slope) <= LIMIT


def slopes(widths: Sequence[int], measured: Sequence[Mapping[Key, float]]) -> list[Slope]:
    """Of every measurement that all widths have, in the order of the first one.

    Judged are sizes before the first step and changes after the last one. Before the first, logits are sums over drawn
    weights, which µP lets vanish with the width; their change is measured as the sums over what was trained of these.
    """
    last = max(step for _, _, step in measured[0])
    return list(_slopes(widths, measured, last))


def _slopes(widths: Sequence[int], measured: Sequence[Mapping[Key, float]], last: int) -> Iterator[Slope]:
    for key in measured[0]:
        activation, kind, step = key
        sizes = tuple(one[key] for one in measured)
        is_first = kind == SIZE and activation != LOGITS
        yield Slope(
            activation=activation,
            kind=kind,
            step=step,
            sizes=sizes,
            slope=exponent(widths, sizes),
            is_judged=is_first or (kind == CHANGE and step == last),
        )


def exponent(widths: Sequence[float], sizes: Sequence[float]) -> float:
    """That of the width in the power law closest to ``sizes``, by least squares of logarithms."""
    if not all(0 < size < math.inf for size in sizes):
        return math.inf
    x, y = ([math.log(value) for value in values] for values in (widths, sizes))
    centre_x, centre_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((one - centre_x) ** 2 for one in x)
    return sum((a - centre_x) * (b - centre_y) for a, b in zip(x, y, strict=True)) / spread


def largest_change(found: Sequence[Slope]) -> tuple[str, float]:
    """The activation whose judged change is the largest factor of its size, at any width; and that factor."""
    sizes = {one.activation: one.sizes for one in found if one.kind == SIZE and one.is_judged}
    factors = {
        one.activation: max(
            change / size if size else math.inf for change, size in zip(one.sizes, sizes[one.activation], strict=True)
        )
        for one in found
        if one.kind == CHANGE and one.is_judged and one.activation in sizes
    }
    return max(factors.items(), key=lambda item: item[1])
