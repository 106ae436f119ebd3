"""Memory of this process."""

import resource
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_memory_bytes() -> int:
    """The largest resident main memory of this process so far, in bytes.

    Read from /proc on Linux: getrusage gives a started process at least the peak of the one that started it.
    """
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, which counts bytes


def measured_memory_bytes(device: torch.device) -> dict[str, int]:
    """What this process holds now and has held at most, in bytes, by name; waits for nothing on a GPU."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak": torch.cuda.max_memory_allocated(device),
        }
    # Resident main memory, of which Python and its packages are a part.
    now = {"resident": _status_bytes("VmRSS")} if _STATUS.exists() else {}
    return {**now, "peak": peak_memory_bytes()}


def _status_bytes(key: str) -> int:
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
