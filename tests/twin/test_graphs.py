"""CUDA graphs on the CUDA twin: what a capture refuses, races around a graph, and steps with graphs and without."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.twin, pytest.mark.timeout(1800)]
PROGRAM = Path(__file__).parent / "captures.py"
SMALL = (
    "model.num_layers=2",
    "model.num_heads=8",
    "model.vocab_size=128",
    "data.sequence_length=64",
    "train.micro_batch_size=2",
    'train.precision="fp32"',
    'train.kernels="chunked"',
)
# Of a small number of micro-batches, all of which have one shape.
CASES: dict[str, dict[str, Any]] = {
    "tnl, packed": {"config": "tnl-tiny"},
    "tnl, a document in a row": {"config": "tnl-tiny", "documents": False},
    "llama, a document in a row": {"config": "llama-tiny", "documents": False},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "llama, packed": ({"config": "llama-tiny", "last": 2}, "a layer reads the starts of documents on the host"),
    "hgrn2, which waits": ({"config": "hgrn2-tiny", "last": 2}, "operation not permitted when stream is capturing"),
}


def test_what_a_capture_refuses_and_what_races(cuda_twin: ModuleType) -> None:
    """By a program of PyTorch's own calls, which ends with an error where one of them is answered otherwise."""
    twin = cuda_twin.installation.installed()
    ended = cuda_twin.installation.run_in_twin(twin, [PROGRAM])
    assert ended.returncode == 0, ended.output


def test_steps_with_graphs_are_those_without(cuda_twin: ModuleType) -> None:
    """Losses, norms, gradients and weights, bit for bit; what cannot be captured tells so once and runs as before."""
    twin, computing = cuda_twin.installation.installed(), cuda_twin.computing_cases
    cases = [*CASES.values(), *(fields for fields, _ in REFUSED.values())]
    given = [{"overrides": list(SMALL), "micro_batches": 2, **one} for one in cases]
    without, found = (
        computing.run(twin, [{**one, "graphs": graphs} for one in given], ranks=1, on_gpus=True)
        for graphs in (False, True)
    )
    for name, (one,), (expected,) in zip([*CASES, *REFUSED], found, without, strict=True):
        assert repr(one["steps"]) == repr(expected["steps"]), name
        for mine, theirs in zip(one["steps"], expected["steps"], strict=True):
            for kind in ("gradients", "weights"):
                for key, tensor in mine[kind].items():
                    assert torch.equal(tensor, theirs[kind][key]), f"{name}: {kind} of {key}"
        if name in CASES:
            assert (one["refused"], one["replayed"]) == ([], 4), name
        else:
            (reason,) = one["refused"]
            assert REFUSED[name][1] in reason and one["replayed"] == 0, name


def test_a_run_with_graphs_launches_less_and_waits_no_more(cuda_twin: ModuleType) -> None:
    """Whole training steps with packed documents, on the null device: the third one captures nothing anew."""
    options = {"documents": 4, "steps": 3, "micro_batches": 4, "world_size": 2}
    given = [
        {"config": "tnl-tiny", "overrides": [f'train.cuda_graphs="{value}"', "train.micro_batch_size=1"], **options}
        for value in ("off", "auto")
    ]
    without, found = cuda_twin.null_cases.record(cuda_twin.installation.installed(), given)
    assert found["waits"]["races"] == [] and not found["faults"]
    (before, after) = (one["steps"][-1] for one in (without, found))
    # With data ranks, the two micro-batches between the first and the last.
    assert (before["launches"]["graph"], after["launches"]["graph"]) == (0, 2)
    assert after["launches"]["product"] * 2 == before["launches"]["product"]
    assert after["launches_in_all"] < 0.75 * before["launches_in_all"]
    assert after["host_waits_in_all"] == before["host_waits_in_all"]
