"""Parameters and operations of the output layer that predicts labels of documents, ``model.head``."""

from lightscale.config.model import HeadConfig
from lightscale.models.specs.interface import Shapes

PREFIX = "output_layer."
"""Of their global names."""
HIDDEN_WEIGHT = "hidden_weight"


def head_shapes(head: HeadConfig, width: int) -> Shapes:
    """Shapes of the parameters, by their names in the layer; tensor ranks hold each whole.

    ``width``: d, of the residual stream.
    """
    shapes: Shapes = {"weight": (head.num_labels, width)}
    if head.pairs:
        shapes[HIDDEN_WEIGHT] = (width, 4 * width)
    if head.bias:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
    return shapes


def head_flops(head: HeadConfig, width: int) -> float:
    """Multiplications and additions of one prediction, forward."""
    return 2.0 * sum(shape[0] * shape[1] for shape in head_shapes(head, width).values() if len(shape) == 2)
