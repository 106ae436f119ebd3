"""Memory of checkpoints: a save takes its copy of the rank's state and no more, a load far less."""

import ctypes
import gc
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]


def resident_bytes(name: str) -> int:
    """``VmRSS`` now, or ``VmHWM`` since ``forget_peak``."""
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) << 10


def forget_peak() -> int:
    """The memory that the process has now."""
    gc.collect()
    # What was freed and kept would hide what is taken.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def peaks(rank: int, world_size: int, init_method: str, folder: str) -> tuple[int, int, int]:
    """Bytes of the rank's state, and the most that a save and a load add to the process."""
    with tiny.engine_on(
        (1, 1, 1, 1), rank, init_method, hidden_size=512, intermediate_size=1024, vocab_size=4096
    ) as engine:
        tiny.train(engine, 0, 1)
        state = sum(shard.data.nbytes for shard in engine.owned_shards())
        before = forget_peak()
        saver = Saver(Path(folder), engine.mesh)
        saver.reserve(engine)
        saver.begin(engine, step=1, common={}, facts={})
        saver.finish()
        of_save = resident_bytes("VmHWM") - before
        saver._copies.clear()
        del saver
        before = forget_peak()
        assert Checkpoints(Path(folder), engine.mesh).restore(engine) is not None
        return state, of_save, resident_bytes("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory can be reset on Linux only")
def test_memory_of_a_save_and_a_load(run_ranks: RunRanks, tmp_path: Path) -> None:
    ((state, of_save, of_load),) = run_ranks(peaks, 1, str(tmp_path))
    assert state > 100 << 20
    assert 0.9 * state < of_save < 1.1 * state
    assert of_load < 0.7 * state
