"""Identity of a process in a record, also after a change of the clock or a reused process id."""

import socket
from pathlib import Path

import psutil


def started_s(process_id: int) -> float:
    """Start of the process, in seconds from the machine's boot. Raises psutil.NoSuchProcess."""
    process = psutil.Process(process_id)
    # psutil counts from the epoch, and the time of boot moves with the clock: a process known by its start would be
    # another one after a correction of the clock. First the boot: some versions remember it for what follows.
    booted_s = psutil.boot_time()
    return process.create_time() - booted_s


def boot_id() -> str:
    """Id of this boot of this machine, unique among all machines."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()}, started {psutil.boot_time():.0f}"
