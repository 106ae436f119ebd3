"""Parallel training on Megatron core: process groups, sequence parallelism, the engine."""

import warnings

# Megatron says at import, many times over, which optional libraries it did not find. The run's log says it once
# (parallel/device/fused.py). What it calls of torch.distributed has new names, but not in the oldest torch we allow.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
    ".*is deprecated. Please use `torch.distributed",
    "`load_state_dict` is deprecated",
):
    warnings.filterwarnings("ignore", message=_message)
