"""Meshes that follow one another in a process."""

import gc
import runpy
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightscale.parallel.mesh import start_mesh

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))


class Engine:
    """What refers to itself, and to the groups of its mesh."""

    def __init__(self, groups: object) -> None:
        self.itself, self.groups = self, groups


def num_threads() -> int:
    """Those of gloo, of which every group has some."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo" in name for name in names)


def threads_in_each(rank: int, world_size: int, init_method: str) -> list[int]:
    """While the first, second, … mesh of a process stands."""
    found = []
    for number in range(4):
        with start_mesh(device="cpu", init_method=f"{init_method}-{number}", timeout_s=60) as mesh:
            Engine(mesh)
            found.append(num_threads())
    return found


def test_groups_of_a_mesh_that_has_ended_are_gone_when_the_next_begins(
    run_ranks: Callable[..., list[Any]],
) -> None:
    found = run_ranks(threads_in_each, 1)[0]
    assert found[0] > 10
    # One mesh's, where some of the last one may still be ending; without this two's, three's and four's. (On a busy
    # machine the first threads may not all have their names yet: 40 of 60 were seen.)
    assert max(found) < 2 * found[0], found


def engine_is_left(rank: int, world_size: int, init_method: str) -> bool:
    """Whether an engine that has trained stays in memory after its mesh."""
    # Its forget gate's bias has an initializer of the module's own.
    with tiny.engine_on((world_size, 1, 1, 1), rank, init_method, mixer="decay-attention") as engine:
        tiny.train(engine, 0, 1)
    left = weakref.ref(engine)
    del engine
    gc.collect()
    return left() is not None


def test_an_engine_with_an_optimizer_does_not_outlive_its_mesh(run_ranks: Callable[..., list[Any]]) -> None:
    # Megatron's optimizer and DDP own tensors in C++, and those refer to the engine.
    assert run_ranks(engine_is_left, 1) == [False]
