"""Work that a process repeats on a thread."""

import threading
import time

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
