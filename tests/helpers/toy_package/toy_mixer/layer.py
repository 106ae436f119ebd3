from typing import Any

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from lightscale.config.model import ModelConfig
from lightscale.kernels.common.backends import choose_backend, implementation
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.linear import column_parallel, row_parallel
from lightscale.models.layers.shared_parts import EmbeddingPart, StagePart
from lightscale.models.layers.states import incoming_state
from lightscale.models.mixers.interface import Mixer
from lightscale.parallel.initialization import DrawWeights, normal, ones
from toy_mixer.options import ToyOptions
from toy_mixer.spec import MAX_POSITIONS, SUM, PositionsSpec, ScalesSpec


class Scales(StagePart):
    """A scale of every layer and channel, in one table that all layers read."""

    spec = ScalesSpec
    table: nn.Parameter

    @staticmethod
    def initial_values(model: ModelConfig) -> dict[str, DrawWeights]:
        return {"table": ones}

    def forward(self, context: SequenceContext) -> Tensor:
        return self.table


class Positions(EmbeddingPart):
    """A learned vector for each position in the document, times a strength that all channels share."""

    spec = PositionsSpec
    table: nn.Parameter
    strength: nn.Parameter

    @staticmethod
    def initial_values(model: ModelConfig) -> dict[str, DrawWeights]:
        return {"table": normal(model.init_std), "strength": ones}

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        vectors = self.table[context.positions.clamp(max=MAX_POSITIONS - 1)].transpose(0, 1)
        return x + (self.strength * vectors).to(x.dtype)


class Toy(Mixer):
    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        assert isinstance(self.options, ToyOptions)
        self.decay = self.options.share
        d = model.hidden_size
        self.in_proj = column_parallel(config, d, d, std=model.init_std, group=self.group)
        self.out_proj = row_parallel(config, d, d, std=self.output_std, group=self.group)

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        projected = self.in_proj(x)[0].transpose(0, 1) * context.shared[ScalesSpec.name][self.layer]
        shapes = {"y": (projected.size(0), projected.size(2))}
        state = incoming_state(context, self.state_name, shapes, projected.dtype)
        compute = implementation(SUM.name, choose_backend(SUM.name, projected)).decayed_sum
        y = compute(projected, self.decay, context.positions, None if state is None else state["y"])
        if context.states is not None:
            context.states[self.state_name] = {"y": y[:, -1].clone()}
        out: Tensor = self.out_proj(y.transpose(0, 1))[0]
        return out
