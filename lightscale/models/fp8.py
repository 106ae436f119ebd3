"""The linear maps whose products are computed in 8 bits (``train.fp8``), from a model's shape alone; without torch."""

from lightscale.config.model import ModelConfig
from lightscale.models.accounting import parameter_shapes
from lightscale.models.adapters import linear_maps


def fp8_weights(model: ModelConfig) -> set[str]:
    """Global names of the weights of blocks that are cast to 8 bits.

    Those of projections and linear units. Left out are embedding, output layer and what every tensor rank holds whole,
    and weights with a side no longer than a head is wide, or than there are heads: low-rank gates and decays, decays
    and factors of a head. There casting costs more than the product gains.
    """
    narrow = max(model.hidden_size // model.num_heads, model.num_heads)
    shapes = parameter_shapes(model)
    split = {one.weight for one in linear_maps(model) if one.split is not None}
    return {name for name in split if min(shapes[name]) > narrow}
