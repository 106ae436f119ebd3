"""What holds the device's memory when most of it is held: by the line of lightscale that allocated it."""

from collections import Counter
from typing import Any

import torch

from cuda_twin.recorded.records import short_name


def begin() -> None:
    """Note every allocation of PyTorch's allocator from now on, with its stack."""
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=2**31)


def end(*, since_us: int = 0) -> dict[str, int]:
    """Bytes at the peak by line, the most first; what was noted is forgotten.

    Args:
        since_us: microseconds of Unix time: what is held before then counts, a peak before then does not.
    """
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    now = most = place = 0
    for number, event in enumerate(events):
        now += _change(event)
        if now > most and event["time_us"] >= since_us:
            most, place = now, number
    held: dict[int, dict[str, Any]] = {}
    for event in events[: place + 1]:
        if event["action"] == "alloc":
            held[event["addr"]] = event
        elif event["action"] == "free_completed":
            held.pop(event["addr"], None)
    found: Counter[str] = Counter()
    for event in held.values():
        found[_line(event["frames"])] += event["size"]
    return dict(found.most_common())


def _change(event: dict[str, Any]) -> int:
    size: int = event["size"]
    return size if event["action"] == "alloc" else -size if event["action"] == "free_completed" else 0


def _line(frames: list[dict[str, Any]]) -> str:
    """Of the innermost frames in lightscale and, inside of it, in Megatron."""
    lines: list[str] = []
    # Innermost first. The backward pass has frames of lightscale only where its own functions run.
    for frame in frames:
        name = frame["filename"]
        if "/lightscale/" in name:
            return " via ".join([f"{short_name(name)}:{frame['line']}", *lines])
        if "/megatron/" in name and not lines:
            lines.append(f"{short_name(name)}:{frame['line']}")
    return lines[0] if lines else "PyTorch's backward pass"
