"""Which failures end a run: mistakes, not ranks that did not come. And which are the kernel's."""

import os
import signal
from pathlib import Path

import pytest

from lightscale.errors import UserError
from lightscale.launch.launcher import torchrun
from lightscale.launch.launcher.failures import RankFailure
from lightscale.launch.launcher.rendezvous import CannotStart


@pytest.mark.parametrize(("code", "mistake"), [(None, None), (CannotStart.EXIT_CODE, None), (UserError.EXIT_CODE, 78)])
def test_ranks_that_did_not_come_are_no_mistake(code: int | None, mistake: int | None) -> None:
    assert CannotStart.EXIT_CODE == os.EX_TEMPFAIL
    assert RankFailure(rank=1, summary="…", time_s=0.0, exit_code=code).mistake_code == mistake


@pytest.mark.parametrize("after", [4, 3, None])
def test_ranks_that_the_kernel_kills_for_memory_meet_a_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: int | None
) -> None:
    """Where the control group counts one more than before; a rank that raises has another cause."""
    killed = RankFailure(rank=0, summary="killed by SIGKILL", killer=signal.SIGKILL, time_s=1.0)
    raised = RankFailure(rank=1, summary="KeyError: a", traceback="…", time_s=2.0, is_recorded=True)
    monkeypatch.setattr(torchrun, "_launch", lambda *arguments: [killed, raised])
    monkeypatch.setattr(torchrun, "memory_kills", iter([None if after is None else 3, after]).__next__)
    report = torchrun.run_node(["rank"], processes=2, logs=tmp_path, hang_timeout_s=60.0, deadline_s=None)
    first, second = report.failures
    assert second == raised
    if after != 4:
        assert first == killed
        return
    assert first.limit is not None and first.limit.startswith("raise the memory of the job or container")
    assert first.summary == f"killed by SIGKILL, by the kernel for want of memory; {first.limit}"
