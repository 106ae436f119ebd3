"""Patches of images as tokens, as in ViT (Dosovitskiy et al. 2021, arXiv 2010.11929, section 3.1).

x_t = W (p_t / 255 - mean) / std + b   for a patch p_t of h w c bytes, row of pixels after row, channels last
                                       p_t with the pixels around the patch that overlap, if there are any
x_t = a_t                              for leading tokens, such as a class token: learned vectors
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.model import ModelConfig
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.shared_parts import EmbeddingPart
from lightscale.models.specs.patches import PatchesSpec, patch_numbers
from lightscale.parallel.initialization import DrawWeights, normal, zeros
from lightscale.parallel.megatron import ProcessGroupCollection, TransformerConfig


class PatchEmbedding(EmbeddingPart):
    """Pixels (b, n, p) uint8 -> (n, b, d / tensor): tensor ranks share the channels out, each sees all tokens.

    The first part of the embedding of images, whose input is the batch's.
    """

    spec = PatchesSpec

    weight: nn.Parameter
    bias: nn.Parameter
    leading: nn.Parameter
    mean: Tensor
    std: Tensor

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, groups: ProcessGroupCollection, *, stage: int
    ) -> None:
        super().__init__(config, model, groups, stage=stage)
        assert model.patches is not None and model.grid is not None, "checked with the configuration"
        self.leading_tokens = model.grid.leading_tokens
        # Channels are the last dim of a patch: each value for all of its pixels.
        repeats = patch_numbers(model.patches) // model.patches.channels
        self.wide = torch.promote_types(self.weight.dtype, torch.float32)
        for name, values in (("mean", model.patches.mean), ("std", model.patches.std)):
            of_channels = self.weight.new_tensor(values, dtype=self.wide).expand(model.patches.channels)
            self.register_buffer(name, of_channels.repeat(repeats), persistent=False)

    @staticmethod
    def initial_values(model: ModelConfig) -> dict[str, DrawWeights]:
        """As the embedding of tokens has them; the bias begins at 0."""
        std = normal(model.embedding_std or model.init_std)
        values = {"weight": std, "bias": zeros, "leading": std}
        return {name: values[name] for name in PatchesSpec.parameters_of(model)}

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (b, n, p) bytes, or fp32 of noised pixels, whatever they are at leading tokens."""
        # Noised pixels are scaled already.
        scaled = x if x.is_floating_point() else (x.to(self.wide) / 255 - self.mean) / self.std
        embedded = F.linear(scaled.to(self.weight.dtype), self.weight, self.bias)
        if self.leading_tokens:
            # All pixels take part, and those of leading tokens get no gradient.
            own = F.embedding(context.positions.clamp(max=self.leading_tokens - 1), self.leading)
            embedded = own.where((context.positions < self.leading_tokens)[..., None], embedded)
        return embedded.transpose(0, 1).contiguous()
