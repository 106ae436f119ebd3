"""Variables that CUDA, NCCL and PyTorch's allocator read when a process begins; imports no torch.

A run sets those that the user has not set. On CPUs nothing reads them.
"""

from collections.abc import Mapping, MutableMapping

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""PyTorch's name of it, and its older name."""


def device_settings(environ: Mapping[str, str], *, tensor: int = 1) -> dict[str, str]:
    """Variables to add to ``environ`` for a rank of a run with ``tensor`` tensor ranks; set ones stay unchanged."""
    settings = {
        # Exchanges and reductions run beside matrix products: their few blocks must not queue behind all of theirs.
        "TORCH_NCCL_HIGH_PRIORITY": "1",
    }
    if not any(name in environ for name in _ALLOCATOR):
        # Sequences of other lengths, a validation, a save: memory freed in one size is used in another.
        settings[_ALLOCATOR[0]] = "expandable_segments:True"
    if tensor > 1:
        # Megatron starts a collective and then the product that hides it, and relies on the GPU to begin both in this
        # order. Without tensor ranks one queue would only hold the exchanges' streams back.
        settings["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return {name: value for name, value in settings.items() if name not in environ}


def apply_device_settings(environ: MutableMapping[str, str], *, tensor: int = 1) -> None:
    """Set them; before CUDA is used, those of the allocator before torch is imported."""
    environ.update(device_settings(environ, tensor=tensor))


def describe_device_settings(environ: Mapping[str, str]) -> str:
    """The variables that are set, by a run or its user, for the log of a run."""
    names = (*_ALLOCATOR, "TORCH_NCCL_HIGH_PRIORITY", "CUDA_DEVICE_MAX_CONNECTIONS")
    return "device settings: " + (", ".join(f"{n}={environ[n]}" for n in names if n in environ) or "none")
