"""wandb for real, offline: what it has of a run that was resumed and one that went back, each step once."""

import importlib.util
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightscale.config.schema import RunConfig
from lightscale.config.sinks import check_installed
from lightscale.errors import UserError
from lightscale.runs.metrics.sink import Measurement, RunFacts

Config = Callable[..., RunConfig]

HAS_WANDB = importlib.util.find_spec("wandb") is not None
needs_wandb = pytest.mark.skipif(not HAS_WANDB, reason="needs the package wandb (the extra `wandb`)")

# wandb's offline file is a LevelDB log: a header, then blocks with records, which may be cut at the ends of blocks.
HEADER_BYTES, BLOCK_BYTES = 7, 1 << 15
FULL, FIRST, LAST = 1, 2, 4


def records(path: Path) -> Iterator[bytes]:
    data, at, parts = path.read_bytes(), HEADER_BYTES, b""
    while at < len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < HEADER_BYTES:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + HEADER_BYTES : at + HEADER_BYTES + length]
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield parts
        at += HEADER_BYTES + length


def history(folder: Path) -> list[dict[str, Any]]:
    """What wandb has of all attempts, in order: a row each."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[import-not-found,unused-ignore]

    rows = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda one: one.stat().st_mtime_ns):
        for data in records(path):
            record = Record.FromString(data)
            if record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({key: json.loads(value) for key, value in items.items()})
    return rows


@pytest.fixture
def open_sink(tmp_path: Path, tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`open_sink(first_step)`: the sink of an attempt at one run, whose settings come from wandb's variables."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "of the environment")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def open_sink(first_step: int) -> Any:
        from lightscale.runs.metrics.wandb import WandbSink

        config = tiny_config("metrics.wandb.name=mine")
        return WandbSink(RunFacts(directory=tmp_path, config=config, command="train", first_step=first_step))

    return open_sink


def write(sink: Any, steps: range, attempt: int) -> None:
    for step in steps:
        at = {"step": step, "attempt": attempt, "time": ""}
        sink.write(Measurement(**at, scalars={"train/loss": 10.0 * attempt + step}))
        # Of the same step; and one that only the record has.
        sink.write(Measurement(**at, scalars={"validation/held": float(step)}))
        sink.write(Measurement(**at, fields={"text": "a"}))


@needs_wandb
def test_each_step_is_there_once(open_sink: Callable[..., Any], tmp_path: Path) -> None:
    sink = open_sink(1)
    assert (sink._run.settings.project, sink._run.settings.run_name) == ("of the environment", "mine")
    assert sink._run.config["optimizer"]["lr"] == 1e-3
    write(sink, range(1, 6), 1)
    sink.close()
    # Resumed from step 3, as the same run of wandb; then it goes back to 4, and on to 8.
    again = open_sink(4)
    assert again._run.id == sink._run.id
    write(again, range(4, 8), 2)
    again.go_back(4)
    assert again._run.summary["void steps"] == "5 to 7"
    write(again, range(5, 9), 3)
    again.go_back(7)
    assert again._run.summary["void steps"] == "5 to 7, 8 to 8"
    again.close()
    rows = [row for row in history(tmp_path) if "train/loss" in row]
    shown = [(row["_step"], row["train/loss"], row["validation/held"]) for row in rows]
    attempts = {1: range(1, 6), 2: range(6, 8), 3: range(8, 9)}
    assert shown == [(step, 10.0 * attempt + step, step) for attempt, steps in attempts.items() for step in steps]
    assert all(math.isfinite(value) for _, value, _ in shown)


@pytest.mark.skipif(HAS_WANDB, reason="wandb is installed")
def test_a_run_that_names_it_without_the_package_does_not_begin(tmp_path: Path) -> None:
    check_installed(["jsonl", "tensorboard"])
    with pytest.raises(UserError, match=r"the package wandb is not installed; pip install 'lightscale\[wandb\]'"):
        check_installed(["jsonl", "wandb"])
    with pytest.raises(ImportError, match=r"pip install 'lightscale\[wandb\]'"):
        import lightscale.runs.metrics.wandb  # noqa: F401
