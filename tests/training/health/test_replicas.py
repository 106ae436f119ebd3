"""Silent corruption: changed bits are found and blamed on the rank that has them, on any layout."""

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightscale.parallel.engine import Engine
from lightscale.training.health.copies import checksums
from lightscale.training.health.replicas import ReplicaCheck, ReplicaReport, SilentCorruption, find_faults

tiny = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "helpers" / "tiny_engine.py")))

Axes = tuple[int, ...]  # processes, tensor, pipeline, sequence, and virtual stages if any; data is the rest
RunRanks = Callable[..., list[Any]]
EVERY = 4


# ----- who is to blame, by the reports -------------------------------------------------------------------------------


def reports(
    written: Sequence[int], seen: Sequence[Sequence[int]], *, changed: Sequence[int] = (), groups: int = 1
) -> list[ReplicaReport]:
    """Of ranks in ``groups`` groups of neighbours."""
    size = len(written) // groups
    return [
        ReplicaReport(
            host=f"host-{rank}",
            group=tuple(range(rank // size * size, (rank // size + 1) * size)),
            written=written[rank],
            seen=tuple(seen[rank]),
            is_intact=rank not in changed,
        )
        for rank in range(len(written))
    ]


@pytest.mark.parametrize(
    ("found", "blamed"),
    [
        (reports([5, 6], [[5, 6], [5, 6]]), []),
        (reports([5, 6], [[5, 6], [5, 7]]), [1]),
        (reports([5, 6], [[5, 6], [7, 6]]), [1]),
        (reports([5, 6], [[5, 7], [5, 7]]), [1]),
        (reports([5, 6], [[7, 6], [5, 6]]), [0]),
        (reports([5, 6], [[5, 6], [5, 6]], changed=[1]), [1]),
        (reports([5], [[6]]), [0]),
        (reports([5, 6, 7], [[5, 6, 7], [5, 6, 7], [4, 6, 7]]), [2]),
        (reports([5, 6, 7, 8], [[5, 6], [5, 6], [7, 8], [7, 9]], groups=2), [3]),
        (reports([5, 6, 7, 8], [[1, 6], [5, 6], [7, 8], [2, 8]], groups=2), [0, 3]),
    ],
    ids=[
        "none", "own row", "another's row", "before it was gathered", "the first", "changed since", "one alone",
        "of three", "in the second group", "in both groups",
    ],
)  # fmt: skip
def test_whose_rows_are_wrong(found: list[ReplicaReport], blamed: list[int]) -> None:
    assert sorted({rank for fault in find_faults(found) for rank in fault.ranks}) == blamed


def test_whose_copies_are_wrong() -> None:
    def blamed(*checksums: int) -> list[tuple[tuple[int, ...], bool]]:
        found = [
            ReplicaReport(
                host="host", group=(rank,), written=1, seen=(1,), is_intact=True, copies=(("a", 1), ("norm", value))
            )
            for rank, value in enumerate(checksums)
        ]
        return [(fault.ranks, "no majority" in fault.what) for fault in find_faults(found)]

    assert blamed(3, 3, 3) == []
    assert blamed(3, 4, 3) == [((1,), False)]
    assert blamed(3, 4, 3, 5, 3) == [((1, 3), False)]
    assert blamed(3, 4) == [((0, 1), True)]
    assert blamed(3, 4, 4, 3) == [((0, 1, 2, 3), True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_every_bit_counts(dtype: torch.dtype, n: int) -> None:
    rows = torch.randn(3, n).to(dtype)
    before = checksums(rows)
    assert torch.equal(checksums(rows[1:2]), before[1:2]), "as a row by itself"
    words = rows.view(torch.int16)
    for column in range(words.size(1)):
        for bit in range(16):
            words[2, column] ^= -(1 << 15) if bit == 15 else 1 << bit
            changed = checksums(rows) != before
            assert changed.tolist() == [False, False, True], (column, bit)
            words[2, column] ^= -(1 << 15) if bit == 15 else 1 << bit


# ----- on ranks ------------------------------------------------------------------------------------------------------


def flip_bit(engine: Engine, row: int) -> None:
    """In this rank's copy of what the optimizer of data rank ``row`` writes."""
    flat = next(engine.flat_weights())
    words = flat[row].view(torch.int32)
    words[words.numel() // 2] ^= 1 << 12


def flip_state(engine: Engine, number: int, bit: int) -> None:
    """In a moment or fp32 weight of this rank, one of all that it owns."""
    tensors = list(engine.owned_state())
    words = tensors[number % len(tensors)].view(torch.int32)
    words[-1] ^= -(1 << 31) if bit == 31 else 1 << bit


def blame(
    engine: Engine,
    *,
    flip: tuple[int, int, int] | None,
    updated: int | None = None,
    state: tuple[int, int, int, int] | None = None,
) -> dict[str, Any]:
    """Which step names which ranks, when the bit ``flip`` (rank, row, step) changes; ``updated``: in the optimizer.

    ``state``: rank, number of the tensor, bit and step of a change in moments or fp32 weights.
    """
    check = ReplicaCheck(engine, every=EVERY)
    check.begin(0)
    for step in range(1, 3 * EVERY + 1):
        if flip is not None and (engine.mesh.rank, step) == flip[::2]:
            flip_bit(engine, flip[1])
        if state is not None and (engine.mesh.rank, step) == state[::3]:
            flip_state(engine, state[1], state[2])
        engine.forward_backward(tiny.step_batches(step, engine.mesh))
        check.observe()
        try:
            if check.is_due(step):
                check.compare(step)
        except SilentCorruption as error:
            return {"step": step, "ranks": error.ranks, "since": error.since, "text": str(error)}
        engine.step(tiny.LR)
        if (engine.mesh.rank, step) == (updated, 2):
            weight = next(p for p in engine.chunks[0].parameters() if not getattr(p, "tensor_model_parallel", False))
            weight.data.view(-1)[0] += 1.0
        check.remember()
    return {}


def flips(rank: int, world_size: int, init_method: str, jobs: list[tuple[Axes, list[Any]]], model: Any) -> list[Any]:
    found = []
    for number, (axes, cases) in enumerate(jobs):
        for index, case in enumerate(cases):
            with tiny.engine_on(axes, rank, f"{init_method}-{number}-{index}", **model) as engine:
                found.append(blame(engine, **case))
    return found


@pytest.mark.long
def test_a_changed_bit_names_its_rank_within_the_interval(run_ranks: RunRanks) -> None:
    nothing = {"flip": None}
    jobs: list[tuple[Axes, list[Any]]] = [
        ((2, 1, 1, 1), [nothing, {"flip": (1, 1, 6)}, {"flip": (1, 0, 5)}, {"flip": (0, 0, 8)}]),
        ((2, 1, 1, 2), [{"flip": (0, 1, 1)}]),
        ((2, 2, 1, 1), [nothing, {"flip": (1, 0, 3)}, {"flip": None, "updated": 1}]),
        ((2, 1, 2, 1), [nothing, {"flip": (1, 0, 4)}]),
    ]
    both = run_ranks(flips, 2, jobs, {"norm": "rmsnorm"}, timeout_s=200)
    assert both[0] == both[1], "all ranks find the same"
    expected = [{}, (8, [1]), (8, [1]), (8, [0]), (4, [0]), {}, (4, [1]), (4, [0, 1]), {}, (4, [1])]
    for found, wanted in zip(both[0], expected, strict=True):
        assert (found and (found["step"], found["ranks"])) == wanted
        if found:
            assert found["since"] == found["step"] - EVERY
            assert all(f"rank {rank} (" in found["text"] for rank in found["ranks"])
    assert "layernorm.weight differs, and no majority of ranks agrees" in both[0][7]["text"]


def test_one_rank_alone_notices_its_own_memory(run_ranks: RunRanks) -> None:
    cases = [{"flip": (0, 0, 2)}, {"flip": None, "state": (0, 1, 0, 6)}]
    ((weight, moment),) = run_ranks(flips, 1, [((1, 1, 1, 1), cases)], {})
    assert (weight["step"], weight["ranks"]) == (4, [0])
    assert (moment["step"], moment["since"], moment["ranks"]) == (8, 4, [0])
    assert "moments or fp32 weights changed between two steps" in moment["text"]


@pytest.mark.long
def test_any_bit_of_any_moment_names_its_rank(run_ranks: RunRanks) -> None:
    cases = [{"flip": None, "state": (number % 2, number, 11 * number % 32, 5)} for number in range(6)]
    jobs: list[tuple[Axes, list[Any]]] = [
        ((2, 1, 1, 1), cases),
        ((2, 2, 1, 1), [{"flip": None}, cases[1]]),
        ((2, 1, 2, 1), [cases[2]]),
        ((2, 1, 1, 2), [cases[5]]),
    ]
    both = run_ranks(flips, 2, jobs, {}, timeout_s=300)
    assert both[0] == both[1]
    expected = [case.get("state") and (8, [case["state"][0]]) for _, cases in jobs for case in cases]
    assert [(found["step"], found["ranks"]) if found else None for found in both[0]] == expected


REST = [pytest.param(mixer, marks=pytest.mark.soak) for mixer in ("hgrn2", "cosformer2", "llama")]


@pytest.mark.long
@pytest.mark.parametrize("mixer", ["tnl", "lightnet", *REST])
def test_no_false_alarm_on_four_ranks(run_ranks: RunRanks, mixer: str) -> None:
    layouts: list[Axes] = [(4, 2, 2, 1), (4, 2, 1, 1), (4, 1, 2, 1), (4, 1, 2, 2, 2)]
    cases = [{"flip": None}, {"flip": (3, 0, 6)}]
    for found in run_ranks(flips, 4, [(axes, cases) for axes in layouts], {"mixer": mixer}, timeout_s=300):
        assert found[::2] == [{}] * 4
        assert [(one["step"], one["ranks"]) for one in found[1::2]] == [(8, [3])] * 4
