"""The most memory that a stretch of work takes: of a GPU what PyTorch allocates, of the CPU what the process holds."""

from pathlib import Path

import torch

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"


class MemoryPeak:
    """Begins to measure when it is made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
            return
        try:
            # Linux then counts the peak anew.
            _CLEAR.write_text(_RESET_PEAK)
            self.before = _kept("VmRSS")
        except OSError:
            self.before = None

    def num_bytes(self) -> int | None:
        """The most since then beyond what was held then; None where the system does not count it."""
        if self.before is None:
            return None
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _kept("VmHWM")
        return max(peak - self.before, 0)


def _kept(name: str) -> int:
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
