"""Models of images as transformers has them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, ImageClassifierOutput
from transformers.utils import can_return_tuple

from lightscale.exchange.plain.model import ImageDecoder
from lightscale.exchange.plain.transformers_config import LightscaleConfig
from lightscale.exchange.plain.transformers_model import LightscalePreTrainedModel, RecomputedLayers
from lightscale.exchange.plain.units import LabelScores, pooled


class LightscaleImageModel(RecomputedLayers, ImageDecoder, LightscalePreTrainedModel):
    """Pixels of images to activations behind the last norm."""

    # Of transformers.
    config: LightscaleConfig
    post_init: Callable[[], None]
    main_input_name = "pixel_values"

    def __init__(self, config: LightscaleConfig) -> None:
        super().__init__(config.shape(), config)
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        """The embedding of patches."""
        found: torch.nn.Module = self.embed_patches
        return found

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, interpolate_pos_encoding: bool | None = None, **more: Any
    ) -> BaseModelOutput:
        """Activations (b, n, d) of pixel_values (b, channels, height, width), as the image processor gives them.

        Args:
            pixel_values: of images.
            interpolate_pos_encoding: whether they may have another size than in training, as in transformers' ViT.
            more: not read.
        """
        hidden = self.pixels_output(pixel_values, interpolate=bool(interpolate_pos_encoding))
        return BaseModelOutput(last_hidden_state=hidden)


class LightscaleForImageClassification(LightscalePreTrainedModel):
    """Pixels of images to logits of their labels."""

    main_input_name = "pixel_values"

    def __init__(self, config: LightscaleConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = LightscaleImageModel(config)
        self.score = LabelScores(config.hidden_size, config.num_labels, bias=config.head_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **more: Any,
    ) -> ImageClassifierOutput:
        """Logits (b, labels), fp32 at least, and with ``labels`` (b,) their loss; see ``LightscaleImageModel``."""
        read = self.model(pixel_values, interpolate_pos_encoding, return_dict=True)
        logits = self.score(pooled(read.last_hidden_state, None, self.config.pooling))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return ImageClassifierOutput(loss=loss, logits=logits)
