"""Megatron core: the only file that imports it, so that one place shows all that lightscale takes of it.

Megatron decorates the fused functions of its own layers with ``torch.compile``, and the decorator alone loads Dynamo
and Inductor: nearly half of what a rank spends on imports. lightscale calls none of these functions, so the
decorator is put aside while Megatron is imported.
"""

from collections.abc import Callable
from typing import Any

import torch


def _leave_as_it_is(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """Stands in for ``torch.compile``, with and without arguments; compiles nothing."""
    return _leave_as_it_is if function is None else function


_compile = torch.compile
torch.compile = _leave_as_it_is  # type: ignore[assignment]
try:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed import param_and_grad_buffer as megatron_buffers
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.tensor_parallel import layers as tensor_parallel_layers
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.tensor_parallel.mappings import (
        all_to_all_hp2sp,
        all_to_all_sp2hp,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
        scatter_to_tensor_model_parallel_region,
    )
    from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer, TransformerLayerSubmodules
    from megatron.core.transformer.enums import ModelType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
    from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
finally:
    torch.compile = _compile

__all__ = [
    "MLP",
    "ChainedOptimizer",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "IdentityOp",
    "LanguageModule",
    "MLPSubmodules",
    "MegatronModule",
    "ModelType",
    "ModuleSpec",
    "OptimizerConfig",
    "ParamKey",
    "ParamPredicate",
    "ProcessGroupCollection",
    "RowParallelLinear",
    "ShardedTensor",
    "TransformerBlock",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "VocabParallelEmbedding",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "apply_factories",
    "copy_to_tensor_model_parallel_region",
    "ensure_metadata_has_dp_cp_group",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_forward_backward_func",
    "get_megatron_optimizer",
    "make_sharded_tensor_for_checkpoint",
    "make_sharded_tensors_for_checkpoint",
    "make_tp_sharded_tensor_for_checkpoint",
    "megatron_buffers",
    "megatron_random",
    "nested_values",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "tensor_parallel",
    "tensor_parallel_layers",
]
