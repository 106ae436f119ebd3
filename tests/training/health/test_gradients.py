"""Ranks that compute wrong: found by the rank that computes the same, and named, on any layout."""

import runpy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lightscale.launch.chaos.poisoned_training import WrongProducts
from lightscale.parallel.engine import Engine
from lightscale.training.health.gradients import Computed, GradientCheck, PassPart, find_faults
from lightscale.training.health.replicas import SilentCorruption

HELPERS = Path(__file__).parents[2] / "helpers"
tiny, parity = (SimpleNamespace(**runpy.run_path(str(HELPERS / f"{name}.py"))) for name in ("tiny_engine", "parity"))

Axes = tuple[int, ...]  # processes, tensor, pipeline, sequence, and virtual stages if any; data is the rest
RunRanks = Callable[..., list[Any]]
EVERY, STEPS = 2, 4
ERROR = 1e-3

# ----- who is to blame, by what ranks computed -----------------------------------------------------------------------


def blamed(own: Sequence[str], other: Sequence[str], *, stages: int = 1) -> list[tuple[tuple[int, ...], str]]:
    """Of ``stages`` times as many data ranks: a letter is what a rank's parts of a pass are, first the last stage's.

    ``a``: right; ``f``, ``b``: other outputs in the forward pass, other gradients.
    """
    data = len(own) // stages
    reports, passes = [], []
    for rank, letters in enumerate(zip(own, other, strict=True)):
        stage, data_rank = divmod(rank, data)
        # The micro-batches of each data rank give other numbers.
        given = [data_rank, (data_rank - 1) % data]
        computed = [
            [
                PassPart((0, 0, stage, 0), "embedding", 10 * batch),
                PassPart((0, 0, stage, 1), "layer", 10 * batch + (letter == "f")),
                PassPart((1, 0, -stage, 0), "weight", 10 * batch + (letter != "a")),
            ]
            for letter, batch in zip(letters, given, strict=True)
        ]
        passes.append((computed[0], computed[1]))
        reports.append(
            Computed(
                host="host", data_rank=data_rank, place=(stage, 0, 0), own=repr(computed[0]), other=repr(computed[1])
            )
        )
    return [(fault.ranks, fault.what.split("first in ")[1]) for fault in find_faults(reports, passes)]


@pytest.mark.parametrize(
    ("own", "other", "stages", "expected"),
    [
        ("aaa", "aaa", 1, []),
        # Once, in its own micro-batches, or in the neighbour's.
        ("aba", "aaa", 1, [((1, 2), "weight, backward pass; one of these ranks is wrong")]),
        ("aaa", "aba", 1, [((0, 1), "weight, backward pass; one of these ranks is wrong")]),
        # Each time.
        ("afa", "afa", 1, [((1,), "layer, forward pass")]),
        ("aaab", "aaab", 1, [((3,), "weight, backward pass")]),
        ("af", "af", 1, [((0, 1), "layer, forward pass; one of these ranks is wrong")]),
        # One data rank, which computes twice.
        ("b", "a", 1, [((0,), "weight, backward pass")]),
        # The first stage is wrong in the forward pass, and the second goes on with it; backward the other way round.
        ("afaafa", "afaafa", 2, [((1,), "layer, forward pass")]),
        ("abaaba", "abaaba", 2, [((4,), "weight, backward pass")]),
        ("aaaaba", "aaaaaa", 2, [((4, 5), "weight, backward pass; one of these ranks is wrong")]),
    ],
)  # fmt: skip
def test_who_is_named(own: str, other: str, stages: int, expected: list[Any]) -> None:
    assert blamed(own, other, stages=stages) == expected


# ----- on ranks ------------------------------------------------------------------------------------------------------


@contextmanager
def flipped_gradient(engine: Engine, step: int, wanted: int | None, every: int) -> Iterator[None]:
    """A bit of a gradient flips behind the last backward pass of the own micro-batches, before any sum over ranks."""
    passes = [0]

    def flip_before(reduction: Callable[..., None]) -> Callable[..., None]:
        def flip(*arguments: Any, **kwargs: Any) -> None:
            passes[0] += 1
            # In a compared step those of the neighbour come first.
            if step == wanted and passes[0] == 1 + (every > 0):
                words = list(engine.chunks[-1].parameters())[-1].main_grad.view(-1).view(torch.int32)
                words[0] ^= 1 << 20
            reduction(*arguments, **kwargs)

        return flip

    at_once, later = engine.config.finalize_model_grads_func, engine._keep_reduction
    with (
        mock.patch.object(engine.config, "finalize_model_grads_func", flip_before(at_once)),
        mock.patch.object(engine, "_keep_reduction", flip_before(later)),
    ):
        yield


def step_batches(step: int, mesh: Any) -> list[Any]:
    """Two micro-batches of this data rank: its own."""
    alone = SimpleNamespace(sequence=mesh.sequence, sequence_rank=mesh.sequence_rank, data_rank=0, data=1)
    found: list[Any] = tiny.step_batches(10 * step + mesh.data_rank, alone)
    return found


def train(
    engine: Engine,
    *,
    every: int,
    wrong: int | None = None,
    since: int = 1,
    flip: tuple[int, int] | None = None,
    save: int | None = None,
) -> dict[str, Any]:
    """The weights' bits behind all steps, or who was named.

    Args:
        every: steps between comparisons.
        wrong: a rank whose products are wrong from step ``since`` on.
        flip: rank and step in which a bit of its gradient flips.
        save: a step behind which a checkpoint would be written.
    """
    check, rank = GradientCheck(engine, every=every), engine.mesh.rank
    check.begin(0)
    losses = []
    for step in range(1, STEPS + 1):
        flipping = flipped_gradient(engine, step, flip[1] if flip and flip[0] == rank else None, every)
        products = WrongProducts(ERROR) if rank == wrong and step >= since else nullcontext()
        try:
            with flipping, products:
                losses.append(check.forward_backward(step, step_batches(step, engine.mesh)).mean)
                engine.step(tiny.LR)
                if step == save:
                    check.check(step)
        except SilentCorruption as error:
            return {"step": step, "ranks": error.ranks, "since": error.since, "text": str(error)}
    return {"losses": losses, "weights": [flat.clone() for flat in engine.flat_weights()]}


def cases_on(rank: int, world_size: int, init_method: str, jobs: list[tuple[Axes, list[Any]]], model: Any) -> list[Any]:
    found = []
    for number, (axes, cases) in enumerate(jobs):
        for index, case in enumerate(cases):
            with tiny.engine_on(axes, rank, f"{init_method}-{number}-{index}", **model) as engine:
                found.append(train(engine, **case))
    return found


def is_same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found["losses"] == expected["losses"] and all(map(torch.equal, found["weights"], expected["weights"]))


NEVER, CHECKED = {"every": 0}, {"every": EVERY}


def test_two_data_ranks(run_ranks: RunRanks) -> None:
    cases = [
        NEVER,
        CHECKED,
        {**NEVER, "flip": (1, 2)},
        {**CHECKED, "flip": (1, 2)},
        {**NEVER, "wrong": 0, "since": 3},
        {**CHECKED, "wrong": 0, "since": 3},
        {**CHECKED, "wrong": 1, "since": 3, "save": 3},
    ]
    for found in run_ranks(cases_on, 2, [((2, 1, 1, 1), cases)], {}):
        plain, checked, flipped, found_flip, wrong, found_wrong, before_save = found
        assert is_same(checked, plain), "the check changes no bit"
        # Without it, training goes on with other numbers.
        assert not is_same(flipped, plain) and not is_same(wrong, plain)
        assert (found_flip["step"], found_flip["since"], found_flip["ranks"]) == (2, 0, [0, 1])
        assert "backward pass; one of these ranks is wrong" in found_flip["text"]
        assert (found_wrong["step"], found_wrong["since"], found_wrong["ranks"]) == (4, 2, [0, 1])
        assert "forward pass; one of these ranks is wrong" in found_wrong["text"]
        assert (before_save["step"], before_save["since"]) == (3, 2), "no checkpoint has it"


@pytest.mark.long
def test_one_data_rank_finds_what_does_not_happen_again(run_ranks: RunRanks) -> None:
    cases = [NEVER, CHECKED, {**CHECKED, "flip": (0, 2)}, {**NEVER, "wrong": 0}, {**CHECKED, "wrong": 0}]
    ((plain, checked, flipped, wrong, repeated),) = run_ranks(cases_on, 1, [((1, 1, 1, 1), cases)], {})
    assert is_same(checked, plain)
    assert (flipped["step"], flipped["ranks"]) == (2, [0])
    # Nobody else has these weights, and it is wrong in the same way again.
    assert is_same(repeated, wrong) and not is_same(wrong, plain)


@pytest.mark.long
def test_every_axis(run_ranks: RunRanks) -> None:
    """Two data ranks with two ranks each along one axis: the rank and its counterpart are named, and no other."""
    # Ranks are laid out tensor fastest, then sequence, data, pipeline.
    layouts = {(4, 2, 1, 1): [1, 3], (4, 1, 1, 2): [1, 3], (4, 1, 2, 1): [2, 3], (4, 1, 2, 1, 2): [2, 3]}
    cases = [NEVER, CHECKED, *({**CHECKED, "wrong": rank, "since": 3} for rank in (1, 2)), {**CHECKED, "flip": (3, 2)}]
    jobs = [(axes, cases) for axes in layouts]
    for found in run_ranks(cases_on, 4, jobs, {"norm": "rmsnorm"}, timeout_s=300):
        for number, (axes, pair) in enumerate(layouts.items()):
            plain, checked, first, second, flipped = found[number * len(cases) :][: len(cases)]
            assert is_same(checked, plain), axes
            of_one = {rank: next(p for p in (pair, sorted({0, 1, 2, 3} - set(pair))) if rank in p) for rank in range(4)}
            assert (first["step"], first["ranks"]) == (4, of_one[1]), axes
            assert (second["step"], second["ranks"]) == (4, of_one[2]), axes
            assert (flipped["step"], flipped["ranks"]) == (2, of_one[3]), axes


@pytest.mark.long
def test_three_data_ranks_name_the_wrong_one(run_ranks: RunRanks) -> None:
    cases = [NEVER, CHECKED, *({**CHECKED, "wrong": rank} for rank in range(3))]
    for plain, checked, *wrong in run_ranks(cases_on, 3, [((3, 1, 1, 1), cases)], {}, timeout_s=200):
        assert is_same(checked, plain)
        assert [(one["step"], one["ranks"]) for one in wrong] == [(2, [rank]) for rank in range(3)]


def beside(rank: int, world_size: int, init_method: str, cases: list[str]) -> list[Any]:
    """Losses and weights of each case without comparisons and with them."""
    found = []
    for number, text in enumerate(cases):
        case = parity.Case.of(text)
        for every in (0, EVERY):
            with parity.engine_on(case, rank, world_size, f"{init_method}-{number}-{every}", torch.float32) as engine:
                check = GradientCheck(engine, every=every)
                check.begin(0)
                losses = []
                for step in range(1, STEPS + 1):
                    batches = parity.step_batches(step, engine.mesh, case)
                    losses.append(check.forward_backward(step, batches).mean)
                    engine.step(tiny.LR)
                    if step % EVERY:
                        # As before a checkpoint, between a step and the next one's weights.
                        check.check(step)
                found.append({"losses": losses, "weights": list(parity.weights(engine).values())})
    return found


@pytest.mark.long
def test_gradients_that_are_reduced_beside_the_computation(run_ranks: RunRanks) -> None:
    cases = ["tnl overlap=1", "tnl sequence=2 overlap=1", "hgrn2 recompute=full overlap=1"]
    for found in run_ranks(beside, 2, cases, timeout_s=200):
        for number, text in enumerate(cases):
            assert is_same(found[2 * number + 1], found[2 * number]), text


@pytest.mark.long
@pytest.mark.parametrize("mixer", ["tnl", "llama", "gated-delta-net"])
def test_other_precisions_and_mixers(run_ranks: RunRanks, mixer: str) -> None:
    jobs = [((2, 1, 1, 1), [NEVER, CHECKED, {**CHECKED, "wrong": 1}])]
    for found in run_ranks(cases_on, 2, jobs, {"mixer": mixer, "precision": "bf16"}, timeout_s=200):
        plain, checked, wrong = found
        assert is_same(checked, plain)
        assert (wrong["step"], wrong["ranks"]) == (2, [0, 1])
