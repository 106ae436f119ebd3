"""Forks of a process that has imported everything and used no device: imports are most of what a small case takes."""

import os
import sys
import traceback
from collections.abc import Callable

import torch


def keep_devices_unused() -> None:
    """Call it before lightscale and Megatron are imported, which ask whether there is a GPU.

    Asking the device would count as using it, and PyTorch uses none in a fork of a process that has.
    """
    torch._C._cuda_getDeviceCount = _num_devices


def _num_devices() -> int:
    # As the device itself says: all, or none where CUDA is told to see none.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return 0 if visible is not None and visible[:1] in ("", "-") else int(os.environ["NULL_DEVICE_COUNT"])


def in_fork(action: Callable[[], object]) -> bool:
    """Whether ``action`` ended without an exception, in a fork of this process; an exception is printed."""
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1] == 0
    code = 1
    try:
        action()
        code = 0
    except BaseException:  # noqa: BLE001 - the end of this process, which has no other way to say it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of NCCL's watchdog are not waited for: there is nothing left to do.
        os._exit(code)
