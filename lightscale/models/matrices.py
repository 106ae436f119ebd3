"""The matrices in a model's parameters: what linear layers of blocks multiply hidden states by; without torch."""

import re
from collections.abc import Iterable

from lightscale.config.model import ModelConfig
from lightscale.models.accounting import parameter_shapes
from lightscale.models.registry import mixer_spec

_WEIGHT = re.compile(r"decoder\.layers\.(\d+)\.(self_attention|mlp)\.(.+\.weight)")

Ranges = tuple[tuple[int, int], ...]


def matrices(model: ModelConfig) -> dict[str, tuple[Ranges, ...]]:
    """Global name of each parameter with matrices, and of each of these its rows: first and last + 1 of ranges.

    The weights of linear layers in mixers and gated linear units, also of gates and decays. Neither the embedding nor
    the output layer, which map ids and not hidden states, nor convolutions, angles and biases. A weight that holds
    several matrices (keys and values head by head; gate and up) has one for each role (``MixerSpec.roles``).
    """
    found: dict[str, tuple[Ranges, ...]] = {}
    for name, shape in parameter_shapes(model).items():
        match = _WEIGHT.fullmatch(name)
        if match is None or len(shape) != 2 or "_conv." in name:
            continue
        layer, module, own = int(match[1]), match[2], match[3]
        if own == "linear_fc1.weight" and model.gated_linear_unit:
            found[name] = ((0, shape[0] // 2),), ((shape[0] // 2, shape[0]),)
            continue
        roles = mixer_spec(model.layers[layer]).roles(model, layer).values() if module == "self_attention" else ()
        found[name] = _parts([rows.ranges for rows in roles if rows.parameter == own and rows.ranges], shape[0])
    return found


def _parts(of_roles: Iterable[Ranges], rows: int) -> tuple[Ranges, ...]:
    """Those of the roles, and the rows that have none as one more."""
    parts = list(of_roles)
    rest, first = [], 0
    for start, stop in sorted(one for part in parts for one in part):
        if first < start:
            rest.append((first, start))
        first = stop
    if first < rows:
        rest.append((first, rows))
    return (*parts, tuple(rest)) if rest else tuple(parts)
