"""Memory of this process."""

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory_bytes() -> int:
    """The largest resident main memory of this process so far, in bytes.

    Read from /proc on Linux: getrusage gives a started process at least the peak of the one that started it.
    """
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, which counts bytes


def process_memory_bytes() -> dict[str, int]:
    """Resident main memory of this process, Python and its packages included: ``resident`` now, ``peak`` so far."""
    now = {"resident": _status_bytes("VmRSS")} if _STATUS.exists() else {}
    return {**now, "peak": peak_memory_bytes()}


def _status_bytes(key: str) -> int:
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
