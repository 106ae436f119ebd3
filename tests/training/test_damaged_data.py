"""A store that changes under a running job: it stops within steps, and says what changed."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.runs.run_directory import RunDirectory, read_metrics

# Two ranks on a machine that may be busy.
pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
def test_tokens_that_change_under_a_job_end_it_and_are_named(workplace: Path, start: Callable[..., Any]) -> None:
    """Every tenth token of half a shard, on two sequence ranks."""
    store = workplace / "changing"
    shutil.copytree(workplace / "store", store)
    running = start(
        "run.toml",
        "data.store=changing",
        "train.steps=100000",
        "parallel.sequence=2",
        "--processes",
        "2",
        "--run",
        "runs/damaged",
    )
    run = RunDirectory(workplace / "runs/damaged")
    running.wait_for_step(run, 5)
    shard = store / "words" / "tokens" / "c" / "0"
    before = run.progress()[0]
    with shard.open("r+b") as file:
        tokens = np.frombuffer(file.read(), dtype="<u4").copy()
        tokens[: len(tokens) // 2 : 10] ^= 1
        file.seek(0)
        file.write(tokens.tobytes())
        os.fsync(file.fileno())
    after = run.progress()[0]
    ended = running.end()
    assert ended.code == 78, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.last_line.startswith("error: ")
    assert "changing/words/tokens/c/0: source words, shard 0, block " in ended.last_line
    assert re.search(r"\(tokens [\d,]+ to [\d,]+\) has changed since preparation", ended.last_line)
    assert "`lightscale data verify changing`" in ended.last_line
    status = run.read_status()
    assert status is not None and status.status == "stopped"
    # What was read ahead before the change is trained on, and nothing more.
    assert before <= read_metrics(run.metrics)[-1]["step"] <= after + 4
