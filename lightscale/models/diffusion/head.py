"""The output layer of diffusion transformers: what is predicted of every pixel of a patch, and its loss.

prediction = W (norm(s) (1 + a) + b) + b_o,   loss of a token: the mean of (prediction - wanted)² over its patch
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightscale.config.model import ModelConfig
from lightscale.models.diffusion.conditioning import Modulation, modulated
from lightscale.models.layers.context import SequenceContext
from lightscale.models.specs.patches import patch_numbers
from lightscale.parallel.initialization import set_initializer, zeros
from lightscale.parallel.megatron import TransformerConfig, gather_from_sequence_parallel_region


class DiffusionHead(nn.Module):
    """Held whole by every tensor rank, which applies it to its own tokens.

    Args:
        config: the model's Megatron configuration.
        model: its shape.
        group: the tensor group.
    """

    def __init__(self, config: TransformerConfig, model: ModelConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        assert model.patches is not None, "checked with the configuration"
        self.config, self.group = config, group
        d, numbers, device = model.hidden_size, patch_numbers(model.patches), torch.cuda.current_device()
        self.modulation = Modulation(config, d, 2)
        self.weight = nn.Parameter(torch.empty(numbers, d, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.empty(numbers, dtype=config.params_dtype, device=device))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            # As DiT begins: the first prediction is 0.
            set_initializer(parameter, zeros)

    def forward(self, hidden: Tensor, context: SequenceContext, wanted: Tensor | None = None) -> Tensor:
        """hidden: (n / tensor, b, d), normed -> (b, n, p) predictions, fp32 or wider, or with wanted losses (b, n).

        They are equal on all tensor ranks.
        """
        predicted = F.linear(modulated(hidden, *self.modulation(context)), self.weight, self.bias)
        predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
        if self.config.sequence_parallel:
            # All ranks go on alike: each takes the gradient of its own tokens.
            predicted = gather_from_sequence_parallel_region(
                predicted, tensor_parallel_output_grad=False, group=self.group
            )
        predicted = predicted.transpose(0, 1)
        return predicted if wanted is None else (predicted - wanted).square().mean(dim=-1)
