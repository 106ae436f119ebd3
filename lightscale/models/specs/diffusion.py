"""Conditioning of diffusion transformers, which all blocks read, and further weights; see ``models/diffusion``."""

from math import prod

from lightscale.config.model import DiffusionConfig, ModelConfig
from lightscale.models.specs.interface import PartParameter, Shapes, StagePartSpec
from lightscale.models.specs.patches import patch_numbers

TERM = "conditioning"


class ConditioningSpec(StagePartSpec):
    """A perceptron of the timestep, and a vector for each class."""

    name = "conditioning"
    implementation = "lightscale.models.diffusion.conditioning:Conditioning"

    @staticmethod
    def parameters_of(model: ModelConfig) -> dict[str, PartParameter]:
        """``time_in`` (d, w) of w sines and cosines, ``time_out`` (d, d), biases; ``labels`` (classes + 1, d)."""
        diffusion, d = diffusion_of(model), model.hidden_size
        shapes = {
            "time_in": (d, diffusion.timestep_width),
            "time_in_bias": (d,),
            "time_out": (d, d),
            "time_out_bias": (d,),
            "labels": (diffusion.num_labels + 1, d),
        }
        return {
            name: PartParameter(shape=shape, term=TERM, split_dim=None, weight_decay=name in ("time_in", "time_out"))
            for name, shape in shapes.items()
        }

    @staticmethod
    def forward_flops_per_token(model: ModelConfig) -> float:
        """Of the perceptron, and of the blocks' modulations: once an image."""
        assert model.grid is not None, "checked with the configuration"
        of_time = model.hidden_size * (diffusion_of(model).timestep_width + model.hidden_size)
        of_blocks = sum(prod(shape) for name, shape in more_shapes(model).items() if name.endswith("modulation.weight"))
        return 2.0 * (of_time + of_blocks) / model.grid.document_tokens


def diffusion_of(model: ModelConfig) -> DiffusionConfig:
    """[model.diffusion] of a model that has it."""
    assert model.diffusion is not None, "checked with the configuration"
    return model.diffusion


def more_shapes(model: ModelConfig) -> Shapes:
    """Shapes of the parameters in blocks and output layer, by global names; tensor ranks hold each whole."""
    assert model.patches is not None, "checked with the configuration"
    d, numbers = model.hidden_size, patch_numbers(model.patches)
    shapes: Shapes = {}
    for layer in range(model.num_layers):
        block = f"decoder.layers.{layer}.modulation"
        shapes |= {f"{block}.weight": (6 * d, d), f"{block}.bias": (6 * d,)}
    return shapes | {
        "output_layer.modulation.weight": (2 * d, d),
        "output_layer.modulation.bias": (2 * d,),
        "output_layer.weight": (numbers, d),
        "output_layer.bias": (numbers,),
    }
