"""The record keeps what its disk does not accept, whatever the error, and writes it later."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lightscale.config.schema import RunConfig
from lightscale.runs.metrics.jsonl import JsonlSink
from lightscale.runs.metrics.sink import Measurement, RunFacts
from lightscale.runs.run_directory import read_lines

NOW = "2026-01-01T00:00:00+00:00"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_for_a_while(
    error: int,
    tmp_path: Path,
    tiny_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sink = JsonlSink(RunFacts(directory=tmp_path, config=tiny_config()))
    write = os.write

    def failing(file: int, data: bytes) -> int:
        raise OSError(error, os.strerror(error))

    for step in range(1, 9):
        with monkeypatch.context() as patch:
            if step in (3, 4, 5):
                patch.setattr(os, "write", failing)
            sink.write(Measurement(step=step, attempt=1, time=NOW, fields={"loss": float(step)}))
    sink.write(Measurement(step=9, attempt=1, time=NOW, scalars={"a/b": 1.0}))  # only a curve
    assert os.write is write
    sink.close()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 9))
    assert capsys.readouterr().err.count("training continues, records are kept in memory") == 1


def test_a_disk_that_fails_to_the_end(
    tmp_path: Path,
    tiny_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sink = JsonlSink(RunFacts(directory=tmp_path, config=tiny_config()))

    def failing(file: int, data: bytes) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", failing)
    sink.write(Measurement(step=1, attempt=1, time=NOW, fields={"loss": 1.0}))
    sink.close()
    assert f"the last lines of {tmp_path / 'metrics.jsonl'} are lost: " in capsys.readouterr().err
