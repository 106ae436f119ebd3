"""Parts that a model holds once because a mixer needs them: their interface, and the layers' access to their results.

A mixer lists the specs of its parts in ``MixerSpec.shared``. Counts and the planner use only the specs; the language
model also uses these classes. Two kinds differ by their place:

- an ``EmbeddingPart`` changes the embedded tokens, on the first pipeline stage only (TPE);
- a ``StagePart`` gives a tensor that the layers read. Every pipeline stage holds a copy (HGRN2's lower bounds).
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightscale.config.model import ModelConfig
from lightscale.models.layers.context import SequenceContext
from lightscale.models.specs.interface import PartParameter, PartSpec
from lightscale.parallel.engine import share_over_stages
from lightscale.parallel.initialization import DrawWeights, set_initializer
from lightscale.parallel.megatron import (
    MegatronModule,
    ProcessGroupCollection,
    TransformerConfig,
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)


class SharedPart(MegatronModule, ABC):
    """A part of the model outside the layers. Its parameters are those of its spec, on this tensor rank.

    Args:
        config: the model's Megatron configuration.
        model: the shape of the whole model.
        groups: Megatron's process groups.
        stage: number of this copy's pipeline stage, virtual ones included.
    """

    spec: ClassVar[type[PartSpec]]
    """Its facts that need no torch, such as its name and its parameters."""

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, groups: ProcessGroupCollection, *, stage: int
    ) -> None:
        super().__init__(config)
        self.tp_group: dist.ProcessGroup = groups.tp
        self.stage = stage
        self._described, draws = self.spec.parameters_of(model), self.initial_values(model)
        assert self._described.keys() == draws.keys(), f"{self.spec.name}: initial values of {', '.join(draws)}"
        for name, described in self._described.items():
            self.register_parameter(name, self._parameter(described, draws[name], config))

    @staticmethod
    @abstractmethod
    def initial_values(model: ModelConfig) -> dict[str, DrawWeights]:
        """Initializer of each parameter of the spec, by its name."""

    def _parameter(self, described: PartParameter, draw: DrawWeights, config: TransformerConfig) -> nn.Parameter:
        shape, dim = list(described.shape), described.split_dim
        if dim is not None:
            shape[dim] //= self.tp_group.size()
        dtype = config.params_dtype
        if described.keep_wide:
            dtype = torch.promote_types(dtype, torch.float32)
        made: Any = nn.Parameter(torch.empty(shape, dtype=dtype, device=torch.cuda.current_device()))
        if dim is None:
            # Tensor ranks use it for other channels each: the engine sums its gradient over them.
            made.sequence_parallel = config.sequence_parallel
        else:
            made.tensor_model_parallel, made.partition_dim, made.partition_stride = True, dim, 1
        if not described.weight_decay:
            made.no_weight_decay = True
        set_initializer(made, draw)
        parameter: nn.Parameter = made
        return parameter

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description of the parameters: how they are split, and that the first stage's copy counts."""
        # Of the copies of a shard the one whose replica id is all zeros is written. The shards of a split parameter
        # differ between tensor ranks, which hold no copies of one another: there the tensor rank is not in the id.
        data_group = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        where = {"tp_group": self.tp_group, "dp_cp_group": data_group, "prepend_offsets": sharded_offsets}
        described = {}
        for name, parameter in self.named_parameters():
            key, dim = f"{prefix}{name}", self._described[name].split_dim
            if dim is None:
                replica = (self.stage, self.tp_group.rank(), data_group.rank())
                described[key] = make_sharded_tensor_for_checkpoint(parameter, key, replica_id=replica, **where)
            else:
                replica = (self.stage, 0, data_group.rank())
                described[key] = make_tp_sharded_tensor_for_checkpoint(parameter, key, dim, replica_id=replica, **where)
        return described


Shared = Tensor | tuple[Tensor, ...]
"""A result of a part for all layers."""


class EmbeddingPart(SharedPart):
    """A part that changes the embedded tokens. It stands in the embedding, which the first pipeline stage alone has.

    It works on all tokens of a sequence rank's segment for some channels: tensor ranks share the channels out, so that
    a part may scan along the sequence without an exchange between them. Its spec is an ``EmbeddingPartSpec``.
    """

    @abstractmethod
    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """x: (n, b, d / tensor), this tensor rank's channels of all tokens -> the same."""


class StagePart(SharedPart):
    """A part that layers of every pipeline stage read: each stage has a copy, whose gradients the engine sums.

    Its spec is a ``StagePartSpec``.
    """

    def __init__(
        self, config: TransformerConfig, model: ModelConfig, groups: ProcessGroupCollection, *, stage: int
    ) -> None:
        super().__init__(config, model, groups, stage=stage)
        if groups.pp.size() > 1:
            for parameter in self.parameters():
                share_over_stages(parameter, stage=stage)

    @abstractmethod
    def forward(self, context: SequenceContext) -> Shared:
        """What layers read under the part's name in ``SequenceContext.shared``: a tensor, or one for each layer."""


def for_all_layers(hidden: Tensor, value: Shared) -> tuple[Tensor, Shared]:
    """``hidden`` as it enters the layers, and ``value`` for the layers to read, with or without recomputation.

    Each layer with recomputed activations runs a separate backward pass. Through ``value`` every such pass would reach
    the inputs of ``value`` again, and hand a partial gradient to its reduction. Layers therefore read leaves, which
    collect their gradients. The sums are passed on when ``hidden`` gets its gradient, behind the last layer. They are
    zero if no layer reads a leaf.
    """
    values = value if isinstance(value, tuple) else (value,)
    # Autograd adds into a leaf's ``grad`` whatever the number and order of the layers' own backward passes.
    leaves = tuple(one.detach().requires_grad_(one.requires_grad) for one in values)
    passed: Tensor = _Collect.apply(hidden, leaves, *values)
    return passed, leaves if isinstance(value, tuple) else leaves[0]


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, leaves: tuple[Tensor, ...], *values: Tensor) -> Tensor:
        # The leaves are no inputs: these would wait for this node, which must run behind them. (The engine runs what
        # was created last first: all that leads from the layers to the leaves comes before.)
        ctx.leaves = leaves
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        collected = [leaf.grad for leaf in ctx.leaves]
        if all(one is None for one in collected):
            collected[0] = torch.zeros_like(ctx.leaves[0])
        return grad, None, *collected
