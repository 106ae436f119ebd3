from typing import ClassVar

from lightscale.config.model import ModelConfig
from lightscale.kernels.operators import (
    Backend,
    CostClass,
    Operator,
    StateAlgebra,
    StateDescription,
    StateTensor,
    register,
)
from lightscale.models.specs.interface import (
    EmbeddingPartSpec,
    MixerSpec,
    PartParameter,
    PartSpec,
    Shapes,
    StagePartSpec,
)

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


class ScalesSpec(StagePartSpec):
    name = "toy_scales"
    implementation = "toy_mixer.layer:Scales"

    @staticmethod
    def parameters_of(model: ModelConfig) -> dict[str, PartParameter]:
        shape = (model.num_layers, model.hidden_size)
        return {"table": PartParameter(shape=shape, term="toy scales", split_dim=1, weight_decay=False)}


class PositionsSpec(EmbeddingPartSpec):
    name = "toy_positions"
    implementation = "toy_mixer.layer:Positions"

    @staticmethod
    def parameters_of(model: ModelConfig) -> dict[str, PartParameter]:
        return {
            "table": PartParameter(shape=(MAX_POSITIONS, model.hidden_size), term="toy positions", split_dim=1),
            "strength": PartParameter(shape=(1,), term="toy positions", keep_wide=True),
        }

    @staticmethod
    def forward_flops_per_token(model: ModelConfig) -> float:
        return 2 * model.hidden_size


class ToySpec(MixerSpec):
    operator = SUM.name
    shared: ClassVar[tuple[type[PartSpec], ...]] = (ScalesSpec, PositionsSpec)

    @staticmethod
    def parameter_shapes(model: ModelConfig, layer: int) -> Shapes:
        d = model.hidden_size
        return {"in_proj.weight": (d, d), "out_proj.weight": (d, d)}

    @staticmethod
    def forward_flops_per_token(model: ModelConfig, layer: int, sequence_length: int) -> float:
        return 2 * 2 * model.hidden_size**2 + 2 * min(SUM.chunk_size, sequence_length) * model.hidden_size
