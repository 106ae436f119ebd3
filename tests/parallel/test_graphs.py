"""Which micro-batches are CUDA graphs, and why others are not; on CPUs, with a pass in the place of each graph.

The pass reads the graph's own buffers, so that buffers, boundaries of one size and the order of a step are those of a
GPU. Graphs themselves are in ``tests/twin``.
"""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lightscale.kernels.common.captures import CannotCapture
from lightscale.parallel.engine import Engine
from lightscale.parallel.graphs import GraphInputs, MicroBatchGraphs, _reason, why_not
from lightscale.parallel.micro_batch import GivenMicroBatch

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "helpers" / "tiny_engine.py")))

RunRanks = Callable[..., list[Any]]
STEPS, MICRO_BATCHES = 3, 3


def batches(step: int, engine: Engine, *, tokens: int = 24) -> list[GivenMicroBatch]:
    """Three micro-batches of this rank: the second has no document that starts within a row."""
    mesh, made = engine.mesh, []
    for number in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(100 * step + 10 * number + mesh.data_rank)
        ids = torch.randint(0, tiny.VOCAB_SIZE, (2, tokens + 1), generator=generator)
        begins = torch.zeros(2, tokens, dtype=torch.bool)
        begins[:, 0] = True
        if number != 1:
            begins.scatter_(1, torch.randint(1, tokens, (2, 2), generator=generator), True)
        slots = torch.arange(tokens).expand(2, -1)
        starts = begins.flatten().nonzero().flatten()
        made.append(
            GivenMicroBatch(
                tokens=ids[:, :-1],
                labels=ids[:, 1:],
                loss_mask=torch.rand(2, tokens, generator=generator).round(),
                positions=slots - torch.where(begins, slots, 0).cummax(dim=1).values,
                document_starts=(starts, torch.zeros_like(starts)),
            )
        )
    return made


def pass_of(graphs: MicroBatchGraphs, batch: Any, shape: Any) -> Callable[[Any], Any]:
    """In the place of ``MicroBatchGraphs._captured``: the same pass without a graph."""
    inputs = GraphInputs(batch, shape)
    # As a capture would, which runs nothing.
    graphs._compute(inputs)

    def replay(batch: Any) -> Any:
        inputs.fill(batch)
        graphs.replayed += 1
        return graphs._both_passes(inputs)

    return replay


def steps(rank: int, world_size: int, init_method: str, mixer: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    reported: list[str] = []
    for name in ("without", "with"):
        axes = (world_size, 1, 1, 1)
        with tiny.engine_on(axes, rank, f"{init_method}-{name}", mixer=mixer) as engine:
            graphs = MicroBatchGraphs(
                lambda inputs, engine=engine: engine._pass(engine.models[0], inputs),
                engine.models[0],
                engine.mesh,
                report=reported.append,
            )
            engine.graphs = graphs if name == "with" else None
            with mock.patch.object(MicroBatchGraphs, "_captured", pass_of):
                sums = []
                for step in range(STEPS):
                    sums.append(engine.forward_backward(batches(step, engine)))
                    engine.step(tiny.LR)
                    found.setdefault("replayed", []).append(graphs.replayed)
                found[name] = sums, tiny.own_state(engine)
                found["kept"] = len(graphs._graphs)
                engine.forward_backward(batches(STEPS, engine, tokens=12))
                found["kept behind another length"] = len(graphs._graphs)
    (sums, state), (other_sums, other_state) = found.pop("without"), found.pop("with")
    return {**found, "sums": sums == other_sums, "states": tiny.differing(state, other_state), "reported": reported}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_with_graphs_is_the_step_without(run_ranks: RunRanks, ranks: int) -> None:
    """Losses, weights and moments, bit for bit; with data ranks the first and the last micro-batch have no graph."""
    for found in run_ranks(steps, ranks, "tnl"):
        assert found["sums"] and found["states"] == []
        assert found["replayed"] == [0, 0, 0, 0, *((3, 6) if ranks == 1 else (1, 2))]
        assert (found["kept"], found["kept behind another length"]) == (2 if ranks == 1 else 1, 0)
        assert found["reported"] == []


def test_a_model_that_reads_documents_on_the_host_has_no_graphs(run_ranks: RunRanks) -> None:
    """It is told once, and runs as before."""
    (found,) = run_ranks(steps, 1, "llama")
    assert found["reported"] == ["a layer reads the starts of documents on the host"]
    assert found["sums"] and found["states"] == []
    assert found["replayed"] == [0] * 6 and found["kept"] == 0


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "axes", "recompute", "expected"),
    [
        (GPU, {"data": 8}, None, None),
        (torch.device("cpu"), {}, None, "CPUs"),
        (GPU, {"tensor": 2}, None, "parallel.tensor = 2"),
        (GPU, {"pipeline": 4}, None, "parallel.pipeline = 4"),
        (GPU, {"sequence": 8}, None, "parallel.sequence = 8"),
        (GPU, {}, "full", "recomputation"),
    ],
)
def test_what_stands_against_graphs(
    device: torch.device, axes: dict[str, int], recompute: str | None, expected: str | None
) -> None:
    sizes = {"tensor": 1, "pipeline": 1, "sequence": 1, "data": 1, **axes}
    mesh: Any = SimpleNamespace(device=device, axes=sizes)
    config: Any = SimpleNamespace(recompute_granularity=recompute)
    found = why_not(mesh, config)
    assert found is None if expected is None else expected in str(found)


def test_the_reason_of_a_refused_capture_is_one_line() -> None:
    assert _reason(CannotCapture("a layer")) == "a layer"
    assert _reason(RuntimeError("CUDA error: not permitted\nfor debugging")) == (
        "the capture failed: CUDA error: not permitted"
    )
