"""The benchmark of sequence parallelism: what ranks send against bytes worked out by hand, and its report of time."""

import argparse
import copy
import importlib
import io
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

pytestmark = pytest.mark.long
LENGTHS = (5, 24)
ROWS, HEADS, WIDTH = 2, 3, 8
# Numbers per row of one rank, by hand: (by gather, forward), (by two_level, forward), (state, as by ring and backward),
# (by two_level, backward). Three heads of 8; one node of two ranks takes shares of two heads. The encoding has 24
# channels of 8 decays.
NUMBERS = {
    "tnl": (3 * 64 + 3, 195 + (2 * 64 + 2) + 2 * 64, 192, 192 + 2 * 128),
    "hgrn2": (3 * 64 + 24, 216 + (2 * 64 + 16) + 2 * 64, 192, 192 + 2 * 128),
    "cosformer2": (3 * 128 + 3, 387 + (2 * 128 + 2) + 2 * 128, 384, 384 + 2 * 256),
    "lightnet": (3 * 136 + 1, 409 + (2 * 136 + 1) + 2 * 136, 408, 408 + 2 * 272),
    **dict.fromkeys(
        ("lion-lit", "lion-retnet", "lion-s"),
        # Two states of 8 x 9 and one decay for each head; by a ring half of them to the one neighbour.
        (3 * 144 + 3, 435 + (2 * 144 + 2) + 2 * 144, 432, 432 + 2 * 288),
    ),
    # A state of 8 x 9 and a decay for each head.
    "decay-attention": (3 * 72 + 3, 219 + (2 * 72 + 2) + 2 * 72, 216, 216 + 2 * 144),
    # A state of 8 x 8, and a matrix of 8 x 8 for what a segment does to it.
    **dict.fromkeys(
        ("delta-net", "gated-delta-net", "kimi-delta"), (6 * 64, 384 + 4 * 64 + 2 * 64, 192, 192 + 2 * 128)
    ),
    # A number for each of 24 channels, which ranks share out, and whether a document begins; and for either direction.
    "causal-rn": (24 + 1, 25 + (12 + 1) + 12, 24, 24 + 2 * 12),
    "bi-rn": (48 + 1, 49 + (24 + 1) + 24, 48, 48 + 2 * 24),
    "tpe": (24 * 8 + 8, 200 + (12 * 8 + 8) + 12 * 8, 192, 192 + 2 * 96),
}
SOFTMAX = ("llama", "llama-local")
BOTH_WAYS = ("lion-lit", "lion-retnet", "lion-s", "bi-rn")


@pytest.fixture(scope="module")
def bench(tools_path: Path) -> ModuleType:
    """The processes that it starts find it on the path too."""
    return importlib.import_module("benchmarks.sequence")


@pytest.fixture(scope="module")
def found(bench: ModuleType) -> dict[str, Any]:
    settings = bench.SequenceSettings(ranks=(2,), tokens=LENGTHS, rows=ROWS, heads=HEADS, width=WIDTH, repeats=2)
    record: dict[str, Any] = bench.run(settings)
    return record


def sent(found: dict[str, Any], kind: str, exchange: str) -> list[tuple[Any, Any]]:
    """(forward, backward) at each length: [calls, bytes] of every rank."""
    cases = [case for case in found["cases"] if (case["kind"], case["exchange"]) == (kind, exchange)]
    assert [case["tokens"] for case in cases] == list(LENGTHS)
    return [(case["forward"]["sent"], case["backward"]["sent"]) for case in cases]


@pytest.mark.parametrize("kind", NUMBERS)
def test_ranks_send_what_was_worked_out_by_hand_at_every_length(found: dict[str, Any], kind: str) -> None:
    gathered, two_level, state, back = (4 * ROWS * numbers for numbers in NUMBERS[kind])
    assert sent(found, kind, "gather") == [([[1, gathered]] * 2, [[1, state]] * 2)] * 2
    assert sent(found, kind, "two_level") == [([[3, two_level]] * 2, [[3, back]] * 2)] * 2
    if kind in BOTH_WAYS:
        half = [[1, state // 2]] * 2
        assert sent(found, kind, "ring") == [(half, half)] * 2
        return
    # Of two ranks in a ring the first sends forward, the second backward.
    assert sent(found, kind, "ring") == [([[1, state], [0, 0]], [[0, 0], [1, state]])] * 2


@pytest.mark.parametrize("kind", SOFTMAX)
def test_softmax_sends_keys_and_values_of_all_its_tokens(found: dict[str, Any], kind: str) -> None:
    keys = [4 * ROWS * tokens * 2 * HEADS * WIDTH for tokens in LENGTHS]
    assert sent(found, kind, "gather") == [([[1, size]] * 2, [[1, 2 * size]] * 2) for size in keys]
    assert {case["exchange"] for case in found["cases"] if case["kind"] == kind} == {"gather"}


def test_times_are_reported_of_every_case(found: dict[str, Any]) -> None:
    assert len(found["cases"]) == len(LENGTHS) * (3 * len(NUMBERS) + len(SOFTMAX))
    for case in found["cases"]:
        assert case["compute_s"] > 0 and case["exchange_s"] > 0
        assert case["waited_s"] >= 0 and 0 <= case["waited_to_compute"] < math.inf


def test_another_number_of_bytes_or_calls_is_an_error(bench: ModuleType, found: dict[str, Any]) -> None:
    case = next(case for case in found["cases"] if (case["kind"], case["exchange"]) == ("hgrn2", "ring"))
    bench.check(case)
    for index in (0, 1):
        wrong = copy.deepcopy(case)
        wrong["backward"]["sent"][1][index] += 1
        with pytest.raises(RuntimeError, match=r"hgrn2 by ring on 2 ranks with 5 tokens each, backward"):
            bench.check(wrong)


def test_table_has_a_line_for_every_case(bench: ModuleType, found: dict[str, Any]) -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(bench.table(found))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert sum("two_level" in line for line in lines) == len(LENGTHS) * len(NUMBERS)
    assert any("3 + 3" in line and "3,624" in line for line in lines)  # TNL: 4 bytes x 2 rows x 453


def test_command_line(bench: ModuleType) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    bench.add_arguments(parser)
    assert bench.settings_of(parser.parse_args([])) == bench.SequenceSettings()
    given = parser.parse_args(["--ranks", "1", "4", "--kinds", "tnl", "--repeats", "7", "--width", "16"])
    assert bench.settings_of(given) == bench.SequenceSettings(ranks=(1, 4), kinds=("tnl",), repeats=7, width=16)
    with pytest.raises(SystemExit, match=r"--ranks 3: .* --ranks-per-node 2"):
        bench.settings_of(parser.parse_args(["--ranks", "3"]))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 4])
def test_one_rank_and_two_nodes_of_two(bench: ModuleType, ranks: int) -> None:
    """One rank exchanges nothing."""
    shape = {"rows": ROWS, "heads": HEADS, "width": WIDTH}
    settings = bench.SequenceSettings(
        ranks=(ranks,), kinds=("tnl", "lightnet", "tpe"), tokens=LENGTHS, repeats=1, **shape
    )
    cases = bench.run(settings)["cases"]
    assert len(cases) == 3 * len(LENGTHS) * (1 if ranks == 1 else 3)
    for case in cases:
        if case["ranks"] == 1:
            assert (case["exchange"], case["forward"]["sent"], case["waited_s"]) == ("none", [[0, 0]], 0)
        elif (case["kind"], case["exchange"], case["ranks"]) == ("tnl", "two_level", 4):
            assert case["forward"]["sent"] == [[3, 4 * ROWS * NUMBERS["tnl"][1]]] * 4
