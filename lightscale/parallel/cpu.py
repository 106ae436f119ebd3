"""Run Megatron core on processes without a GPU.

Megatron names the CUDA device in the few places listed in ``_redirections``. Each is replaced by its CPU equivalent for
the lifetime of the process, so that the same engine code serves tests and first runs on a laptop. There is no
emulation: tensors are on the CPU, and collectives use gloo. Those of a single data rank, which would copy all weights
and gradients onto themselves, are skipped. The module is imported only on machines without a GPU, and refuses to act on
others.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from lightscale.parallel.megatron import megatron_buffers, megatron_random

_CPU = torch.device("cpu")

# Functions that create tensors and that Megatron calls with device="cuda".
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "zeros_like", "empty_like")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        # Only CUDA is redirected: "meta" tensors, for instance, stay what they are.
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


def _cuda_type_name(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    # The optimizers compare `parameter.type()` with "torch.cuda.FloatTensor" to tell fp32 from bf16 parameters.
    @functools.wraps(tensor_type)
    def name_or_cast(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is None:
            return tensor_type(self).replace("torch.", "torch.cuda.", 1)
        return tensor_type(self, dtype, **kwargs)

    return name_or_cast


def _of_several(collective: Callable[..., Any]) -> Callable[..., Any]:
    # NCCL copies nothing for one rank whose part is in place; gloo does: 1 % of a step of 3M parameters.
    @functools.wraps(collective)
    def run(output: torch.Tensor, part: torch.Tensor, *args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
        if dist.get_world_size(group) == 1 and output.data_ptr() == part.data_ptr():
            return None
        return collective(output, part, *args, group=group, **kwargs)

    return run


def _redirections() -> list[tuple[object, str, Any]]:
    """(where, name, replacement) for every place that Megatron core reaches a GPU through."""

    def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    generator = torch.Generator(device="cpu")

    return [
        # Buffers, embeddings and pipeline receives are allocated on `torch.cuda.current_device()`.
        (torch.cuda, "current_device", lambda: _CPU),
        # Loss sums, norms and found-inf flags are created with device="cuda" or moved there.
        *((torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES),
        (torch.Tensor, "cuda", stay),
        (torch.Tensor, "type", _cuda_type_name(torch.Tensor.type)),
        # Point-to-point exchanges and checkpoint writers wait for the device; the CPU has nothing outstanding.
        (torch.cuda, "synchronize", nothing),
        # Layers are built, and activations recomputed, under saved and restored states of the device's generator.
        # A generator beside the CPU's own stands for it, so that the two are distinct, as on a GPU.
        (torch.cuda, "get_rng_state", lambda *args, **kwargs: generator.get_state()),
        (torch.cuda, "manual_seed", generator.manual_seed),
        (megatron_random, "_get_cuda_rng_state", lambda *args, **kwargs: generator.get_state()),
        (megatron_random, "_set_cuda_rng_state", lambda state, *args, **kwargs: generator.set_state(state)),
        *(
            (megatron_buffers, name, _of_several(getattr(megatron_buffers, name)))
            for name in ("dist_all_gather_func", "dist_reduce_scatter_func")
        ),
    ]


# Once: a second call would wrap the wrappers. There is no way back, because by then Megatron's modules hold them.
@functools.cache
def redirect_megatron_to_cpu() -> None:
    """Apply the redirections once for this process. Raises RuntimeError where a GPU is visible."""
    if torch.cuda.is_available():
        raise RuntimeError(
            "redirecting Megatron to the CPU would hide this machine's GPU; hide it with CUDA_VISIBLE_DEVICES= instead"
        )
    # The functions that `with torch.device(…)` sends to its device, by identity; PyTorch keeps what it finds when it
    # first asks. Were that later, it would keep the replacements, and what they call would stay on the CPU:
    # transformers then leaves a model that it makes on "meta" without some of its buffers.
    _device_constructors()
    for owner, name, replacement in _redirections():
        setattr(owner, name, replacement)
