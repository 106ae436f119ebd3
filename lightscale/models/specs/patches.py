"""Patches of images, in place of the table of tokens; see ``layers/patches.py``."""

import math

from lightscale.config.model import ModelConfig, PatchesConfig
from lightscale.models.specs.interface import EmbeddingPartSpec, PartParameter

# That of `models.accounting`: the map of patches stands in the place of the table of ids.
_TERM = "embedding"


class PatchesSpec(EmbeddingPartSpec):
    """A linear map of the pixels of a patch, and a vector for each leading token."""

    name = "patches"
    implementation = "lightscale.models.layers.patches:PatchEmbedding"

    @staticmethod
    def parameters_of(model: ModelConfig) -> dict[str, PartParameter]:
        """``weight`` (d, p), of p numbers of a patch, ``bias`` (d,), and with leading tokens ``leading`` (l, d)."""
        assert model.patches is not None and model.grid is not None, "checked with the configuration"
        d, leading = model.hidden_size, model.grid.leading_tokens
        shapes = {"weight": ((d, patch_numbers(model.patches)), 0), "bias": ((d,), 0)}
        if leading:
            shapes["leading"] = ((leading, d), 1)
        return {
            name: PartParameter(shape=shape, term=_TERM, split_dim=dim, weight_decay=name == "weight")
            for name, (shape, dim) in shapes.items()
        }

    @staticmethod
    def forward_flops_per_token(model: ModelConfig) -> float:
        """Of the linear map."""
        assert model.patches is not None, "checked with the configuration"
        return 2.0 * model.hidden_size * patch_numbers(model.patches)


def patch_numbers(patches: PatchesConfig) -> int:
    """Numbers that a token reads: the pixels of its patch, and of the overlap around it, times channels."""
    return math.prod(extent + 2 * patches.overlap for extent in patches.size) * patches.channels
