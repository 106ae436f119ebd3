from typing import Any, ClassVar

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from lightscale.config.schema import ModelConfig
from lightscale.kernels.common.backends import choose_backend, implementation
from lightscale.kernels.operators import (
    Backend,
    CostClass,
    Operator,
    StateAlgebra,
    StateDescription,
    StateTensor,
    register,
)
from lightscale.models.layers.context import SequenceContext
from lightscale.models.layers.linear import column_parallel, row_parallel
from lightscale.models.layers.shared_parts import EmbeddingPart, PartParameter, SharedPart, StagePart
from lightscale.models.layers.states import Shapes, incoming_state
from lightscale.models.mixers.interface import Mixer
from lightscale.parallel.initialization import normal, ones
from toy_mixer.options import ToyOptions

SUM = register(
    Operator(
        name="toy_sum",
        cost=CostClass.SCAN,
        backends=(
            Backend(name="chunked", module="toy_mixer.chunked", chunk_size=16),
            Backend(name="reference", module="toy_mixer.reference"),
        ),
        state=StateDescription(
            tensors=(StateTensor(name="y", shape=("B", "D")),),
            algebra=StateAlgebra.DIAGONAL,
            dtype="inputs",
        ),
    )
)
MAX_POSITIONS = 32


class Scales(StagePart):
    """A scale of every layer and channel, in one table that all layers read."""

    name = "toy_scales"
    table: nn.Parameter

    @staticmethod
    def parameters_of(model: ModelConfig) -> dict[str, PartParameter]:
        shape = (model.num_layers, model.hidden_size)
        return {"table": PartParameter(shape=shape, draw=ones, term="toy scales", split_dim=1, weight_decay=False)}

    def forward(self, context: SequenceContext) -> Tensor:
        return self.table


class Positions(EmbeddingPart):
    """A learned vector for each position in the document, times a strength that all channels share."""

    name = "toy_positions"
    table: nn.Parameter
    strength: nn.Parameter

    @staticmethod
    def parameters_of(model: ModelConfig) -> dict[str, PartParameter]:
        shape = (MAX_POSITIONS, model.hidden_size)
        return {
            "table": PartParameter(shape=shape, draw=normal(model.init_std), term="toy positions", split_dim=1),
            "strength": PartParameter(shape=(1,), draw=ones, term="toy positions", keep_wide=True),
        }

    @staticmethod
    def forward_flops_per_token(model: ModelConfig) -> float:
        return 2 * model.hidden_size

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        vectors = self.table[context.positions.clamp(max=MAX_POSITIONS - 1)].transpose(0, 1)
        return x + (self.strength * vectors).to(x.dtype)


class Toy(Mixer):
    operator = SUM.name
    shared: ClassVar[tuple[type[SharedPart], ...]] = (Scales, Positions)

    def __init__(
        self, config: TransformerConfig, layer_number: int, model: ModelConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, model, *args, **kwargs)
        assert isinstance(self.options, ToyOptions)
        self.decay = self.options.share
        d = model.hidden_size
        self.in_proj = column_parallel(config, d, d, std=model.init_std, group=self.group)
        self.out_proj = row_parallel(config, d, d, std=self.output_std, group=self.group)

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        d = model.hidden_size
        return {"in_proj.weight": (d, d), "out_proj.weight": (d, d)}

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        return 2 * 2 * model.hidden_size**2 + 2 * min(SUM.chunk_size, sequence_length) * model.hidden_size

    def mix(self, x: Tensor, context: SequenceContext) -> Tensor:
        projected = self.in_proj(x)[0].transpose(0, 1) * context.shared[Scales.name][self.layer]
        shapes = {"y": (projected.size(0), projected.size(2))}
        state = incoming_state(context, self.state_name, shapes, projected.dtype)
        compute = implementation(self.operator, choose_backend(self.operator, projected)).decayed_sum
        y = compute(projected, self.decay, context.positions, None if state is None else state["y"])
        if context.states is not None:
            context.states[self.state_name] = {"y": y[:, -1].clone()}
        out: Tensor = self.out_proj(y.transpose(0, 1))[0]
        return out
