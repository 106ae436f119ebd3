"""Parameters of a mixer's heads or channels that are no matrix product, split over the tensor ranks by their rows."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightscale.parallel.initialization import DrawWeights, set_initializer
from lightscale.parallel.megatron import (
    MegatronModule,
    TransformerConfig,
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)


class HeadParameter(MegatronModule):
    """One parameter, ``name`` of the module: (rows / tensor, …).

    Args:
        config: Megatron's.
        name: of the parameter in this module.
        shape: of the whole parameter.
        draw: its initial values.
        group: the tensor ranks.
        wide: kept in fp32 in half-precision models, and without weight decay: decays, which act many times over.
    """

    def __init__(
        self,
        config: TransformerConfig,
        name: str,
        shape: tuple[int, ...],
        draw: DrawWeights,
        group: dist.ProcessGroup,
        *,
        wide: bool = False,
    ) -> None:
        super().__init__(config)
        self.name, self.tp_group = name, group
        dtype = torch.promote_types(config.params_dtype, torch.float32) if wide else config.params_dtype
        own = (shape[0] // group.size(), *shape[1:])
        value = nn.Parameter(torch.empty(own, dtype=dtype, device=torch.cuda.current_device()))
        value.tensor_model_parallel = True  # type: ignore[attr-defined]
        value.partition_dim, value.partition_stride = 0, 1  # type: ignore[attr-defined]
        if wide:
            value.no_weight_decay = True  # type: ignore[attr-defined]
        set_initializer(value, draw)
        self.register_parameter(name, value)

    def forward(self) -> Tensor:
        """The rows of this tensor rank."""
        value: Tensor = self.get_parameter(self.name)
        return value

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description for checkpoints: split along dim 0."""
        return make_sharded_tensors_for_checkpoint(
            {self.name: self.get_parameter(self.name)},
            prefix,
            {self.name: 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
