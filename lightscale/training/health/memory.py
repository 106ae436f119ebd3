"""Memory of this process."""

import ctypes
import os
import resource
from collections.abc import Mapping
from pathlib import Path

_STATUS = Path("/proc/self/status")
# Options of glibc's mallopt, and the largest number that it takes.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _LARGEST = -1, -4, 2**31 - 1


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Keep freed blocks of main memory in the process, for the next step: True where the C library does so from now on.

    glibc maps each block above 32 MiB anew, and gives back what is free at the end of its heap: the system clears pages
    that the step before has used. A run of equal steps needs them all again; its peak stays as it is. Variables by
    which the user sets glibc's allocator have precedence.
    """
    if any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # None: another C library
    return mallopt is not None and all(mallopt(*one) == 1 for one in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _LARGEST)))


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
