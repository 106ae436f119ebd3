"""What every token mixer is: the one interface that a new architecture implements."""

import math
from abc import ABC, abstractmethod

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from lightscale.config import ModelConfig
from lightscale.models.context import SequenceContext


class Mixer(MegatronModule, ABC):
    """A causal map of (n / tensor, b, d), the ``self_attention`` of Megatron's transformer layer.

    Heads are split over the tensor ranks, tokens over the sequence ranks. A mixer declares its parameters with
    initializers (``parallel.initialization``), takes states from the context and leaves them there.

    Args:
        config: the model's Megatron configuration.
        layer_number: number of the layer in the whole model, from 1 as Megatron counts.
        model: the shape of the whole model.
        pg_collection: Megatron's process groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        model: ModelConfig,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config)
        self.layer = layer_number - 1
        self.state_name = f"layer-{self.layer}"
        self.model = model
        self.group: dist.ProcessGroup = pg_collection.tp
        self.num_heads = model.num_heads // self.group.size()
        self.heads = slice(self.group.rank() * self.num_heads, (self.group.rank() + 1) * self.num_heads)
        # Outputs that are added to the residual stream start smaller, so that its variance does not grow with depth.
        self.output_std = model.init_std / math.sqrt(2 * model.num_layers)

    @staticmethod
    @abstractmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        """Operations of the matrix products in one forward pass of layer ``layer`` (from 0), per token."""

    @abstractmethod
    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n / tensor, b, d), normalised -> (n / tensor, b, d)."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: SequenceContext,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Megatron's calling convention: the context comes as ``packed_seq_params``, and there is no bias."""
        return self.mix(hidden_states, packed_seq_params), None
