"""A disk that fills up before or during a save: one clear error on every rank, and earlier checkpoints as they were."""

import re
import runpy
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from lightscale.errors import UserError
from lightscale.training.checkpoints.directories import directory_name
from lightscale.training.checkpoints.restore import Checkpoints
from lightscale.training.checkpoints.saving import Saver

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]


def leave_free(disk: Path, num_bytes: int) -> None:
    """Fill ``disk`` up to ``num_bytes``."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    ballast.write_bytes(b"x" * (shutil.disk_usage(disk).free - num_bytes))


def fill(rank: int, world_size: int, init_method: str, folder: str) -> tuple[str, list[tuple[int, str | None, float]]]:
    """The message of the check before a save; then, without it, for rising free space what the save said."""
    disk, found = Path(folder), []
    with tiny.engine_on((2, 1, 1, 2), rank, init_method) as engine:
        control, checkpoints = engine.mesh.control, Checkpoints(disk / "checkpoints", engine.mesh)
        saver = Saver(checkpoints.directory, engine.mesh)

        def attempt(free: int) -> tuple[str | None, float]:
            if rank == 0:
                leave_free(disk, free)
            dist.barrier(group=control)
            began = time.monotonic()
            try:
                saver.save(engine, step=2, common={}, facts={})
            except UserError as caught:
                left = [path.name for path in checkpoints.directory.iterdir()]
                return str(caught) if left == [directory_name(1)] else f"left: {left}", time.monotonic() - began
            finally:
                dist.barrier(group=control)
            return None, time.monotonic() - began

        saver.save(engine, step=1, common={}, facts={})
        good = tiny.own_state(engine)
        needed = sum(path.stat().st_size for path in (checkpoints.directory / directory_name(1)).iterdir())
        before, _ = attempt(16 << 20)
        assert before is not None
        Saver._check_space = lambda *args: None  # type: ignore[method-assign]
        # Each file in turn is the one that does not fit.
        first, middle = range(0, 32 << 10, 4 << 10), range(32 << 10, needed, 128 << 10)
        for free in [*first, *middle, needed - (16 << 10), needed + (64 << 10)]:
            found.append((free, *attempt(free)))
        tiny.train(engine, 0, 1)
        restored = checkpoints.restore(engine, step=1)
        assert restored is not None
        assert tiny.differing(good, tiny.own_state(engine)) == []
    return before, found


def test_a_full_disk_is_one_clear_error_on_all_ranks(run_ranks: RunRanks, small_disk: Path) -> None:
    for before, found in run_ranks(fill, 2, str(small_disk)):
        assert re.fullmatch(
            rf"cannot write {small_disk}/checkpoints/{directory_name(2)}: not enough space for a checkpoint: "
            r"it needs \d+ MB, 17 MB are free; free some space, or keep fewer checkpoints \(checkpoint\.keep\)",
            before,
        )
        *failed, (_, last, _) = found
        assert last is None, "with enough space the save must succeed"
        for free, message, seconds in failed:
            assert message is not None, f"{free} bytes were enough"
            assert "No space left on device" in message, f"{free} bytes free: {message}"
            assert message.startswith(f"cannot write {small_disk}/checkpoints/{directory_name(2)}: ")
            assert len(message.splitlines()) == 1
            assert seconds < 10, f"{free} bytes free: {message}"
