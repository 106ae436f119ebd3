"""A process is the same one after its machine's clock was set."""

import os
from typing import Any

import psutil
import pytest

from lightscale.launch.local.queue import Process
from lightscale.runs.lock import Holder
from lightscale.runs.processes import started_s


@pytest.mark.parametrize("step_s", [-86400.0, -3600.0, 3600.0])
def test_the_clock_is_set(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    before, holder, process = started_s(os.getpid()), Holder.this_process(), Process.of(os.getpid())
    assert process is not None
    assert before > 0
    created, booted = psutil.Process.create_time, psutil.boot_time
    # As psutil says it then: it adds the start of the process to the time of boot, which moves with the clock.
    monkeypatch.setattr(psutil, "boot_time", lambda: booted() + step_s)

    def create_time(self: Any) -> float:
        return float(created(self)) + step_s

    monkeypatch.setattr(psutil.Process, "create_time", create_time)
    assert started_s(os.getpid()) == pytest.approx(before, abs=0.1)
    assert holder.is_running()
    assert process.is_running()
