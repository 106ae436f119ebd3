"""An error of one rank is one of all: none waits for a rank that has left."""

import importlib
import pickle
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightscale
from lightscale.errors import UserError
from lightscale.parallel.agreement import Agreement
from lightscale.runs.lock import InUse

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]


def fail_on_one(rank: int, world_size: int, init_method: str) -> list[str]:
    """What each rank raises where rank 1 alone fails, by kind of error; then a result, to show that all are in step."""
    found = []
    with tiny.start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=init_method) as mesh:
        ranks = Agreement(mesh.saving)
        for error in (OSError(28, "No space left on device", "file"), UserError("wrong"), KeyError("a fault")):

            def act(error: Exception = error) -> int:
                if rank == 1:
                    raise error
                return rank

            try:
                ranks.on_all(act)
            except Exception as caught:  # noqa: BLE001 - what is looked at
                found.append(f"{type(caught).__name__}: {caught}")
        found.append(str(ranks.on_all(lambda: rank)))
        found.append(str(ranks.on_first(lambda: 10 + rank)))
    return found


def test_an_error_of_one_rank_is_raised_on_all(run_ranks: RunRanks) -> None:
    first, second = run_ranks(fail_on_one, 2)
    shared = ["OSError: [Errno 28] No space left on device: 'file'", "UserError: wrong"]
    assert first == [*shared, "RuntimeError: rank 1: KeyError: 'a fault'", "[0, 1]", "10"]
    assert second == [*shared, "KeyError: 'a fault'", "[0, 1]", "10"]


def test_errors_reach_other_ranks_whole() -> None:
    root = Path(next(iter(lightscale.__path__)))
    for path in root.rglob("*.py"):
        if "(UserError):" in path.read_text("utf-8"):
            importlib.import_module(".".join(path.relative_to(root.parent).with_suffix("").parts))
    kinds = UserError.__subclasses__()
    assert InUse in kinds
    for error in (InUse("held", job="7"), *(kind("wrong") for kind in kinds)):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), copy.args, vars(copy)) == (type(error), error.args, vars(error))
