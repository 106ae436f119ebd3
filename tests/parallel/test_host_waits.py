"""A host waits for its GPU where it reads the device's memory; here the reads of a step are counted on CPUs.

Of LLaMA: the other operators check and cut their documents on CPUs by reading them, which costs nothing there.
"""

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from lightscale.kernels.attention import read_starts

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))
RunRanks = Callable[..., list[Any]]

READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique2", "equal"}
"""Operators whose result, or its shape, the host needs."""


class Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name in READS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def reads(rank: int, world_size: int, init_method: str, given: bool) -> list[str]:
    """Of forward, backward and norm of a step of two micro-batches with documents."""
    with tiny.engine_on((1, 1, 1, 1), rank, init_method, mixer="llama") as engine:
        batches = []
        for batch in tiny.step_batches(0, engine.mesh):
            positions = batch.positions.clone()
            positions[:, 20:] -= 20
            starts = tuple(read_starts(positions)) if given else None
            batches.append(replace(batch, positions=positions, document_starts=starts))
        with Reads() as found:
            engine.forward_backward(batches)
            engine.gradient_norm()
    return found.found


def test_a_step_reads_one_number_before_the_optimizer(run_ranks: RunRanks) -> None:
    """Whether any token counts; two more reads, of losses and of norms, are copies without an operator."""
    (found,) = run_ranks(reads, 1, True)
    assert found == ["_local_scalar_dense"]


def test_documents_that_are_not_given_are_read(run_ranks: RunRanks) -> None:
    """So that the test above can fail."""
    (found,) = run_ranks(reads, 1, False)
    assert found.count("nonzero") == 2
