"""The curves of runs are in the browser, also while they train."""

import json
import math
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lightscale import cli
from lightscale.config.files import load
from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.config.schema import RunConfig
from lightscale.launch.commands.monitor import forwarding, log_directory
from lightscale.runs.metrics.logger import MetricsLogger
from lightscale.runs.metrics.registry import open_sinks
from lightscale.runs.metrics.sink import RunFacts
from lightscale.runs.run_directory import RunDirectory

pytestmark = pytest.mark.timeout(600)

browser = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "browser.py")))

TIMEOUT_S = 200
# The points of the line in the card of a tag; null while the card is not there.
CURVE = """
(() => {
  const cards = [...document.querySelectorAll("scalar-card")];
  const card = cards.find(one => one.querySelector(`[title="train/loss"]`));
  const lines = card ? [...card.querySelectorAll(".series-view path")] : [];
  const shown = lines.filter(one => one.getAttribute("d") && getComputedStyle(one).display !== "none");
  return shown.map(one => one.getAttribute("d").match(/-?[0-9.]+,-?[0-9.]+/g).map(pair => pair.split(",").map(Number)));
})()
"""


@pytest.fixture
def make_run(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> Callable[..., RunDirectory]:
    """`make_run(name, "section.key=value", …)`: a run that has not begun."""

    def make_run(name: str, *overrides: str) -> RunDirectory:
        run = RunDirectory(tmp_path / "runs" / name)
        run.create(tiny_config(*overrides))
        return run

    return make_run


def loss(step: int) -> float:
    return 2.0 + math.exp(-step / 10)


def log(run: RunDirectory, first: int, last: int) -> None:
    """What training writes at these steps."""
    options: Any = {
        "enabled": True,
        "attempt": 1,
        "first_step": first,
        "total_steps": 100,
        "step_tokens": StepTokens(full=8),
    }
    facts = RunFacts(directory=run.path, config=load(run.config), first_step=first)
    with MetricsLogger(open_sinks(["tensorboard", "jsonl"], facts), **options) as metrics:
        for step in range(first, last + 1):
            metrics.begin_step(8 * (step - 1))
            metrics.log_step(step, tokens=8 * step, loss=loss(step), grad_norm=1.0, lr=1e-3)


@pytest.fixture
def monitor() -> Iterator[Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]]:
    """`monitor(RUN, …)`: the command, and what it says."""
    processes: list[subprocess.Popen[str]] = []

    def monitor(*words: object) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        command = [sys.executable, "-m", "lightscale", "monitor", "--json", "--port", "0", *map(str, words)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        processes.append(process)
        assert process.stdout is not None
        said: dict[str, Any] = json.loads(process.stdout.readline())
        return process, said

    yield monitor
    for process in processes:
        process.kill()
        process.communicate()


def runs_at(said: dict[str, Any]) -> list[str]:
    with urllib.request.urlopen(f"{said['url']}data/runs", timeout=TIMEOUT_S) as answer:
        runs: list[str] = json.load(answer)
    return sorted(runs)


@pytest.mark.long
def test_curves_of_runs_until_ctrl_c(
    make_run: Callable[..., RunDirectory], monitor: Callable[..., Any], wait_for: Callable[[Callable[[], bool]], None]
) -> None:
    first, second = make_run("first"), make_run("second")
    log(first, 1, 3)
    log(second, 1, 3)
    process, said = monitor(first.path, second.path)
    assert said["url"] == f"http://localhost:{said['port']}/"
    assert f"-L {said['port']}:localhost:{said['port']} " in said["forward"]
    wait_for(lambda: runs_at(said) == ["first", "second"])
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=TIMEOUT_S) == 0
    psutil.wait_procs(children, timeout=60)
    assert not [child for child in children if child.is_running()], "it left processes behind"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("localhost", said["port"]), timeout=10)


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    def wait_for(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.2)

    return wait_for


def test_which_curves(make_run: Callable[..., RunDirectory], tmp_path: Path) -> None:
    one, other = make_run("here/mine"), make_run("there/mine")
    with log_directory([one.path]) as logs:
        assert (logs / "mine").readlink() == one.tensorboard, "also where training has not begun"
    with log_directory([tmp_path / "runs" / "here"]) as logs:
        assert logs == tmp_path / "runs" / "here"
    log(one, 1, 1)
    with log_directory([one.path, other.path]) as logs:
        assert (logs / "here" / "mine").readlink() == one.tensorboard
        assert (logs / "there" / "mine").readlink() == other.tensorboard
    assert not logs.exists()


def test_mistakes(make_run: Callable[..., RunDirectory], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, without = make_run("mine"), make_run("without", 'metrics.sinks=["jsonl"]')
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, message in (
            ([str(tmp_path)], "is neither a run nor a folder of runs"),
            ([str(run.path), str(tmp_path)], "is not a run directory: it has no config.toml"),
            ([str(without.path)], "metrics.sinks lacks tensorboard"),
            ([str(run.path), str(run.path)], "the same run twice"),
            ([str(run.path), "--port", "65536"], "--port 65536"),
            ([str(run.path), "--port", port], f"--port {port} is used by another program"),
        ):
            assert cli.main(["monitor", *words]) == 78
            assert message in capsys.readouterr().err


def test_the_way_from_the_users_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu07")
    monkeypatch.setenv("LOGNAME", "ada")
    assert forwarding({}, host="localhost", port=6006) == "ssh -L 6006:localhost:6006 ada@gpu07"
    over_ssh = {"SSH_CONNECTION": "198.51.100.7 50000 203.0.113.9 22"}
    assert forwarding(over_ssh, host="localhost", port=6006) == "ssh -L 6006:localhost:6006 ada@203.0.113.9"
    job = {"LIGHTSCALE_JOB_ID": "7", "LIGHTSCALE_SUBMIT_HOST": "login2", **over_ssh}
    assert forwarding(job, host="localhost", port=6006) == "ssh -L 6006:localhost:6006 -J ada@login2 ada@gpu07"
    assert forwarding(job, host="0.0.0.0", port=6006) == "ssh -L 6006:gpu07:6006 ada@login2"


@pytest.mark.long
def test_a_browser_shows_the_loss_while_it_falls(
    make_run: Callable[..., RunDirectory], monitor: Callable[..., Any], tmp_path: Path, needs: Callable[..., None]
) -> None:
    if browser.find_chromium() is None:
        needs("chromium")
    run = make_run("mine")
    log(run, 1, 20)
    _, said = monitor(run.path)
    with browser.Page(said["url"], tmp_path / "profile") as page:
        assert follow_the_loss(page.wait_for(CURVE, lambda lines: has_points(lines, 20), TIMEOUT_S), 20)
        log(run, 21, 40)

        def has_more(lines: list[Any]) -> bool:
            if has_points(lines, 40):
                return True
            page.call("Page.reload")
            page.wait_for(CURVE, bool, TIMEOUT_S)
            return False

        assert follow_the_loss(page.wait_for(CURVE, has_more, TIMEOUT_S), 40)
        if "SCREENSHOT" in os.environ:
            page.screenshot(Path(os.environ["SCREENSHOT"]))


def has_points(lines: list[Any], number: int) -> bool:
    return any(len(line) == number for line in lines)


def follow_the_loss(lines: list[list[list[float]]], steps: int) -> bool:
    """Whether one of the lines, that which is not smoothed, has the loss of each step."""
    return any(is_loss(line) for line in lines if len(line) == steps)


def is_loss(points: list[list[float]]) -> bool:
    """Axes are linear: from the outermost points follows where each other one is, to a pixel."""
    (left, top), (right, bottom) = points[0], points[-1]
    assert right - left > 100 and bottom - top > 50, "a curve to look at, and it falls"
    steps = len(points)
    shares = [((n - 1) / (steps - 1), (loss(1) - loss(n)) / (loss(1) - loss(steps))) for n in range(1, steps + 1)]
    expected = [(left + along * (right - left), top + down * (bottom - top)) for along, down in shares]
    return all(math.dist(point, place) < 1 for point, place in zip(points, expected, strict=True))
