"""Executors hand out the same tasks, survive the death of workers, and end at the first error of a task."""

import functools
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from lightscale.data_pipeline.executors import Executor, ExecutorFactory, InProcess, ProcessPool, interface
from lightscale.data_pipeline.executors.ray_cluster import RayCluster
from lightscale.errors import UserError

HELPERS = Path(__file__).resolve().parents[1] / "helpers"


@pytest.fixture(scope="module")
def tasks() -> Iterator[ModuleType]:
    """Functions that workers can import, as they do lightscale's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HELPERS))
        patch.setenv("PYTHONPATH", str(HELPERS), prepend=os.pathsep)
        yield importlib.import_module("executor_tasks")


@pytest.fixture(scope="module")
def two_nodes(tasks: ModuleType) -> Iterator[Any]:
    """A Ray cluster of two nodes on this machine, to which this process is connected."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
        cluster.add_node(**options)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


RAY = pytest.param("ray", marks=[pytest.mark.long, pytest.mark.timeout(400)])


@pytest.fixture(params=["processes", RAY])
def make_executor(request: pytest.FixtureRequest) -> ExecutorFactory:
    if request.param == "processes":
        return functools.partial(ProcessPool, num_workers=2)
    request.getfixturevalue("two_nodes")
    return RayCluster


@pytest.fixture
def started(make_executor: ExecutorFactory, tasks: ModuleType, tmp_path: Path) -> Iterator[Executor]:
    with make_executor(functools.partial(tasks.make_context, tmp_path)) as executor:
        yield executor


def ignore(step: str, done: int, total: int) -> None:
    pass


def attempts(folder: Path) -> dict[int, int]:
    """How often each task has run to its end."""
    return {int(path.stem): len(path.read_text().split()) for path in folder.glob("*.pid")}


def test_every_task_is_done_once_and_progress_ends_at_all(started: Executor, tasks: ModuleType, tmp_path: Path) -> None:
    shown: list[tuple[str, int, int]] = []
    for step, items in (("first", range(30)), ("second", range(30, 40)), ("none", range(0))):
        started.run(step, tasks.write_slowly, items, [10] * len(items), lambda *numbers: shown.append(numbers))
    assert attempts(tmp_path) == dict.fromkeys(range(40), 1)
    assert len({path.read_text() for path in tmp_path.glob("*.pid")}) > 1
    for step, total in (("first", 300), ("second", 100), ("none", 0)):
        done = [found for name, found, of in shown if name == step and of == total]
        assert done == sorted(done) and (done[0], done[-1]) == (0, total)


def test_tasks_of_workers_that_die_are_done_by_others(started: Executor, tasks: ModuleType, tmp_path: Path) -> None:
    started.run("step", tasks.die_once, range(40), [1] * 40, ignore)
    assert set(attempts(tmp_path)) == set(range(40))
    assert len(list(tmp_path.glob("*.died"))) == 4


def test_a_worker_that_dies_while_another_starts_is_replaced(
    tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, killed = ProcessPoolExecutor._spawn_process, list[int]()

    def kill_the_first_meanwhile(pool: Any) -> None:
        if pool._processes and not killed:
            killed.extend(pool._processes)
            os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.5)  # for whoever watches it
        spawn(pool)

    monkeypatch.setattr(ProcessPoolExecutor, "_spawn_process", kill_the_first_meanwhile)
    with ProcessPool(functools.partial(tasks.make_context, tmp_path), num_workers=2) as executor:
        executor.run("step", tasks.write_slowly, range(4), [1] * 4, ignore)
    assert killed and set(attempts(tmp_path)) == set(range(4))


def test_a_task_whose_workers_always_die_is_given_up(
    started: Executor, tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(started, ProcessPool):  # each takes a new pool
        monkeypatch.setattr(interface, "MOST_LOSSES", 2)
    with pytest.raises(UserError, match=r"died .* finished work is kept: run the same command again"):
        started.run("step", tasks.die_always, range(1), [1], ignore)
    deaths = len((tmp_path / "deaths").read_text().split())
    assert 2 <= deaths <= 11


@pytest.mark.parametrize("name", ["fail", "refuse"])
def test_the_error_of_a_task_ends_the_step(started: Executor, tasks: ModuleType, tmp_path: Path, name: str) -> None:
    kind, message = {"fail": (LookupError, "nothing there"), "refuse": (UserError, "item 3: refused")}[name]
    with pytest.raises(kind, match=message) as caught:
        started.run("step", getattr(tasks, name), range(400), [1] * 400, ignore)
    assert type(caught.value) is kind
    if name == "fail":
        # The traceback of the worker, with the line that failed.
        assert 'raise LookupError("nothing there")' in str(caught.value.__cause__)
    assert len(attempts(tmp_path)) < 100, "the others were not cancelled"


def test_in_one_process_progress_is_that_of_the_tasks(tasks: ModuleType, tmp_path: Path) -> None:
    shown: list[int] = []
    with InProcess(lambda: tmp_path) as executor:
        executor.run("step", tasks.write, range(3), [10, 20, 30], lambda step, done, total: shown.append(done))
    assert shown == [0, 0, 10, 10, 20, 30, 40, 60]


def test_no_worker_outlives_the_process_that_hands_out(tmp_path: Path) -> None:
    """Killed with SIGKILL, it cannot end them."""
    script = tmp_path / "driver.py"
    script.write_text(
        "import sys, time\nfrom pathlib import Path\nfrom lightscale.data_pipeline.executors import ProcessPool\n"
        "def context(): return Path(sys.argv[1])\n"
        "def task(folder, item, advance): (folder / f'{item}.on').touch(); time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    with ProcessPool(context, 2) as pool: pool.run('step', task, range(2), [1, 1], lambda *_: None)\n"
    )
    with subprocess.Popen([sys.executable, script, tmp_path]) as driver:
        while len(list(tmp_path.glob("*.on"))) < 2:
            assert driver.poll() is None
            time.sleep(0.05)
        workers = psutil.Process(driver.pid).children()
        assert len(workers) >= 2
        driver.kill()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []
