"""A sink that fails or hangs costs training nothing; it is said, counted, tried again, and nothing is there twice."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.config.files import load
from lightscale.config.schedules.step_tokens import StepTokens
from lightscale.config.schema import RunConfig
from lightscale.runs.metrics import background, registry
from lightscale.runs.metrics.background import BackgroundSink
from lightscale.runs.metrics.logger import MetricsLogger
from lightscale.runs.metrics.registry import open_sinks
from lightscale.runs.metrics.sink import Measurement, RunFacts, Sink
from lightscale.runs.run_directory import read_metrics

Config = Callable[..., RunConfig]


class Faulty(Sink):
    """Raises as often as it is told to: where it is opened, at the given steps, where it is closed."""

    def __init__(self, run: RunFacts, script: "Script") -> None:
        self.script = script
        script.opened.append(run.first_step)
        script.fail("open")

    def write(self, measurement: Measurement) -> None:
        self.script.fail(measurement.step)
        self.script.written.append(measurement.step)

    def go_back(self, step: int) -> None:
        self.script.written.append(-step)

    def close(self) -> None:
        self.script.fail("close")


class Script:
    def __init__(self, **faults: int) -> None:
        """`faults`: how often which method raises; `at_N`: writing the measurement of step N."""
        self.faults = {name.removeprefix("at_"): number for name, number in faults.items()}
        self.opened: list[int | None] = []
        self.written: list[int] = []
        self.said: list[str] = []

    def fail(self, where: str | int) -> None:
        if self.faults.get(str(where), 0) > 0:
            self.faults[str(where)] -= 1
            raise RuntimeError(f"no {where}")


@pytest.fixture
def facts(tmp_path: Path, tiny_config: Config) -> RunFacts:
    return RunFacts(directory=tmp_path, config=tiny_config(), first_step=5)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSES_S", (0.0, 0.001))


def run(script: Script, facts: RunFacts, steps: range = range(5, 11)) -> BackgroundSink:
    sink = BackgroundSink("faulty", lambda run: Faulty(run, script), facts, say=script.said.append)
    for step in steps:
        sink.write(Measurement(step=step, attempt=1, time="", scalars={"a/b": 1.0}))
    # Closing gives up at the first failure: all is tried before.
    await_(lambda: not sink._waiting)
    sink.close()
    return sink


def await_(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("faults", [{}, {"open": 3}, {"at_7": 2}, {"at_7": 1, "at_9": 4}])
def test_what_fails_for_a_while_is_written_once_and_in_order(faults: dict[str, int], facts: RunFacts) -> None:
    script = Script(**faults)
    sink = run(script, facts)
    assert script.written == list(range(5, 11))
    assert (sink.failures, sink.dropped) == (sum(faults.values()), 0)
    # The first that is opened hides what earlier attempts wrote of these steps; later ones must not hide its own.
    first = faults.get("open", 0) + 1
    assert script.opened == [5] * first + [None] * (len(script.opened) - first)
    episodes = len(faults)
    assert len([line for line in script.said if "training continues" in line]) == episodes, "once each time"
    assert len([line for line in script.said if "works again" in line]) == episodes


def test_a_measurement_that_cannot_be_written_is_dropped_and_counted(facts: RunFacts) -> None:
    script = Script(at_7=1000)
    sink = run(script, facts)
    assert script.written == [5, 6, 8, 9, 10]
    assert (sink.failures, sink.dropped) == (background.MOST_TRIES, 1)
    assert script.said[-1] == "metrics: sink faulty lost 1 measurements; metrics.jsonl has all"


def test_one_that_fails_at_its_end(facts: RunFacts) -> None:
    script = Script(close=1)
    sink = run(script, facts)
    assert (script.written, sink.failures) == (list(range(5, 11)), 1)
    assert script.said == [
        "metrics: sink faulty failed, RuntimeError: no close; training continues, the sink is retried"
    ]


def test_a_return_is_passed_on_in_order(facts: RunFacts) -> None:
    script = Script()
    sink = BackgroundSink("faulty", lambda run: Faulty(run, script), facts, say=script.said.append)
    for step in (5, 6):
        sink.write(Measurement(step=step, attempt=1, time=""))
    sink.go_back(5)
    sink.write(Measurement(step=6, attempt=2, time=""))
    sink.close()
    assert script.written == [5, 6, -5, 6]


def test_a_missing_package_switches_it_off(facts: RunFacts) -> None:
    def missing(run: RunFacts) -> Sink:
        raise ImportError("no package; pip install it")

    script = Script()
    sink = BackgroundSink("faulty", missing, facts, say=script.said.append)
    for step in (5, 6, 7):
        sink.write(Measurement(step=step, attempt=1, time=""))
    sink.close()
    assert sink.failures == 1
    assert sink.dropped == 3
    assert script.said[0] == "metrics: sink faulty is disabled: no package; pip install it"


def test_one_that_hangs_is_not_waited_for(facts: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST_WAITING", 50)
    released = threading.Event()

    class Hanging(Faulty):
        def write(self, measurement: Measurement) -> None:
            released.wait(60)

    script = Script()
    try:
        sink = BackgroundSink(
            "hanging", lambda run: Hanging(run, script), facts, say=script.said.append, close_timeout_s=0.2
        )
        began = time.monotonic()
        for step in range(1000):
            sink.write(Measurement(step=step, attempt=1, time=""))
        assert time.monotonic() - began < 5, "writing does not wait"
        assert len(sink._waiting) <= 50, "nor fills the memory"
        sink.close()
        assert time.monotonic() - began < 10
        assert sink.dropped == 1000
        assert "is abandoned" in script.said[0]
    finally:
        released.set()


@pytest.fixture
def faulty_sinks(monkeypatch: pytest.MonkeyPatch) -> Script:
    """All sinks but the record are faulty."""
    script = Script(open=2, at_3=1000, close=1000)
    real = registry._open

    def open_one(name: str, run: RunFacts) -> Sink:
        return real(name, run) if name == "jsonl" else Faulty(run, script)

    monkeypatch.setattr(registry, "_open", open_one)
    return script


def test_the_record_of_a_run_has_all_and_counts_the_failures(
    tmp_path: Path, tiny_config: Config, faulty_sinks: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["tensorboard", "jsonl"]
    options: dict[str, Any] = {
        "enabled": True,
        "attempt": 1,
        "first_step": 1,
        "total_steps": 20,
        "step_tokens": StepTokens(full=8),
    }
    with MetricsLogger(open_sinks(names, RunFacts(directory=tmp_path, config=tiny_config())), **options) as metrics:
        for step in range(1, 21):
            if step == 20:
                # The last record counts what has failed until then, and closing would not try again.
                await_(lambda: 19 in faulty_sinks.written)
            metrics.begin_step(8 * (step - 1))
            metrics.log_step(step, tokens=8 * step, loss=1.0, grad_norm=1.0, lr=1.0)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["sink_failures"] == 2 + background.MOST_TRIES
    assert faulty_sinks.written == [1, 2, *range(4, 21)]
    assert "sink tensorboard lost 1 measurements" in capsys.readouterr().err


class FromOutside(Faulty):
    script = Script()

    def __init__(self, run: RunFacts) -> None:
        super().__init__(run, type(self).script)


def test_a_sink_of_another_package(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by its entry point, and named in the configuration."""
    import importlib.metadata
    import sys
    import types

    from lightscale.config import sinks
    from lightscale.errors import UserError

    module = types.ModuleType("other_package_sink")
    module.FromOutside = FromOutside  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    point = importlib.metadata.EntryPoint("mine", f"{module.__name__}:FromOutside", sinks.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        sinks,
        "entry_points",
        lambda group, name=None: [point] if group == sinks.ENTRY_POINT_GROUP and name in (None, "mine") else [],
    )
    config = load(tiny_run, ['metrics.sinks=["jsonl", "mine"]'])
    jsonl, mine = open_sinks(config.metrics.sinks, RunFacts(directory=tmp_path, config=config))
    for sink in (jsonl, mine):
        sink.write(Measurement(step=1, attempt=1, time=""))
        sink.close()
    assert FromOutside.script.written == [1]
    with pytest.raises(UserError, match=r"unknown sink min; did you mean mine\?"):
        load(tiny_run, ['metrics.sinks=["jsonl", "min"]'])
