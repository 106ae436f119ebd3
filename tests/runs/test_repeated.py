"""Work that a process repeats on a thread."""

import errno
import os
import threading
import time

import pytest

from lightscale.runs.repeated import Repeated


def test_work_is_repeated_until_stop_which_waits_for_it() -> None:
    calls: list[str] = []
    called, may_end = threading.Semaphore(0), threading.Event()

    def work() -> None:
        calls.append(threading.current_thread().name)
        called.release()
        may_end.wait()
        calls.append("ended")

    repeated = Repeated(work, period_s=0.001, name="renewal")
    assert not calls
    repeated.start()
    called.acquire()
    threading.Timer(0.05, may_end.set).start()
    repeated.stop()
    # The call in progress was complete, and no other has begun since.
    done = list(calls)
    assert done[:2] == ["renewal", "ended"]
    assert len(done) % 2 == 0
    time.sleep(0.02)
    assert calls == done


def test_a_limit_does_not_end_it_and_is_reported_once_while_it_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    """A watchdog without a file to spare watches again when there is one."""
    limit = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc/1/stat")
    outcomes = iter([limit, limit, None, limit, None])
    done = threading.Event()

    def work() -> None:
        outcome = next(outcomes, done)
        if outcome is done:
            done.set()
        elif isinstance(outcome, OSError):
            raise outcome

    repeated = Repeated(work, period_s=0.001, name="watchdog")
    repeated.start()
    assert done.wait(60)
    repeated.stop()
    line = "watchdog tries again after OSError: [Errno 24] Too many open files: '/proc/1/stat'; raise the limit of "
    assert capsys.readouterr().err.splitlines() == [f"{line}open files (`ulimit -n`)"] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_another_error_ends_it() -> None:
    ended = threading.Event()
    calls: list[int] = []

    def work() -> None:
        calls.append(len(calls))
        ended.set()
        raise KeyError("a bug")

    repeated = Repeated(work, period_s=0.001, name="watchdog")
    repeated.start()
    assert ended.wait(60)
    repeated.stop()
    assert calls == [0]
