"""What stands against a CUDA graph, and whether one is captured."""

import torch


class CannotCapture(RuntimeError):
    """A pass does what no CUDA graph repeats; the text is the reason, a clause."""


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the current stream: the host must not wait for the device then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
