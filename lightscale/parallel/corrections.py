"""Corrections of Megatron core 0.16, each with a test that fails without it. Applied by the engine.

All concern checkpoints of the distributed optimizer. ``count_padding`` is needed always, the others when neither apex
nor Transformer Engine is installed, so that PyTorch's own AdamW runs underneath: that one keeps a ``step`` tensor per
parameter, which the fused optimizers do not have.
"""

import functools
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import nn


def _keep_step(original: Any) -> Any:
    """A checkpoint holds no ``step`` per parameter (it stands in the parameter groups): keep the one in place.

    Without this, loading raises ``KeyError: 'step'``.
    """

    @functools.wraps(original)
    def set_states(self: DistributedOptimizer, model_param: nn.Parameter, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        original(self, model_param, {"step": state["step"], **tensors} if "step" in state else tensors)

    return set_states


def _own_step(original: Any) -> Any:
    """Give every parameter a ``step`` of its own.

    Megatron hands one tensor to all of them; AdamW increments it once per parameter, and the bias correction runs away.
    """

    @functools.wraps(original)
    def load_state_dict(self: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    return load_state_dict


@functools.cache
def correct_megatron() -> None:
    """Apply the corrections once for this process; nothing to do where a fused optimizer is installed."""
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    name = "_set_main_param_and_optimizer_states"
    setattr(DistributedOptimizer, name, _keep_step(getattr(DistributedOptimizer, name)))
    DistributedOptimizer.load_state_dict = _own_step(DistributedOptimizer.load_state_dict)


def count_padding(model: DistributedDataParallel) -> None:
    """Have the padding at the end of each bucket of the flat buffers saved with the rest.

    For a checkpoint Megatron joins the buckets without their padding, then cuts parameters out at their places in the
    buffer, where the padding counts. All parameters after the first padded bucket are cut at a wrong place, and the
    end of the last one is zeros, in the fp32 weights too. With pipeline stages the embedding is such a parameter; on
    GPUs, where buckets are limited, any may be.
    """
    for buffer in model.buffers + model.expert_parallel_buffers:
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()


def create_optimizer_states(optimizer: ChainedOptimizer) -> None:
    """Give PyTorch's AdamW the states it would create at its first step.

    Megatron asks for the common ``step`` of all states also before the first step, to describe what it will load, and
    fails when there is none.
    """
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    for chained in optimizer.chained_optimizers:
        for group in chained.optimizer.param_groups:
            for parameter in group["params"]:
                chained.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0, dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
