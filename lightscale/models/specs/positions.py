"""Learned positions, a part behind the embedding; see ``layers/learned_positions.py``."""

from lightscale.config.model import ModelConfig
from lightscale.models.specs.interface import EmbeddingPartSpec, PartParameter


class LearnedPositionsSpec(EmbeddingPartSpec):
    """A vector for each position in a document."""

    name = "positions"
    implementation = "lightscale.models.layers.learned_positions:LearnedPositions"

    @staticmethod
    def parameters_of(model: ModelConfig) -> dict[str, PartParameter]:
        """``table`` (positions, d)."""
        shape = (num_positions(model), model.hidden_size)
        return {"table": PartParameter(shape=shape, term="learned positions", split_dim=1, weight_decay=False)}


def num_positions(model: ModelConfig) -> int:
    """The most that a mixer of the model asks for by its option ``positions``; of images their tokens too."""
    images = model.patches is not None and model.patches.learned_positions and model.grid is not None
    of_images = model.grid.document_tokens if images and model.grid is not None else 0
    asked = (getattr(options, "positions", None) for options in model.mixer_options.values())
    # Of other mixers the option is a word.
    return max((of_images, *(number for number in asked if isinstance(number, int))))
