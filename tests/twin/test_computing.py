"""The CUDA path computing: losses, gradients and weights of three steps are those of the CPU path.

All cases of as many ranks are run in one start of them.
"""

import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.twin, pytest.mark.timeout(3600)]
ARCHITECTURES = ("tnl", "hgrn2", "lightnet", "cosformer2", "llama")
OTHERS: dict[str, tuple[str, ...]] = {
    "lion-lit": ("lion-lit-tiny",),
    "lion-retnet": ("lion-retnet-tiny",),
    "lion-s": ("lion-s-tiny",),
    "lion-s, causal": ("lion-s-causal-tiny",),
    "lightnet, both ways": ("lightnet-tiny", "model.mixer_options.lightnet.causal=false", "task.name='masked'"),
    "llama, both ways": ("masked-tiny",),
    "causal-rn": ("causal-rn-tiny",),
    "bi-rn": ("bi-rn-tiny",),
    "like mamba2": ("mamba2-like-tiny",),
    "like retnet": ("retnet-like-tiny",),
}
"""Mixers that the scaling-law study does not know: the smallest model of each, and what makes it one."""
SMALL = (
    "model.num_layers=2",
    "model.num_heads=8",
    "model.vocab_size=128",
    "data.sequence_length=64",
    "train.micro_batch_size=2",
)
LEAST = ("model.num_layers=1", "model.num_heads=4", "data.sequence_length=32")
CHUNKED, TRITON = 'train.kernels="chunked"', 'train.kernels="triton"'
# The parity rule: the operations are the same, the strides of what comes out of them are not always.
FP32 = {"loss": 1e-6, "norm": 1e-5, "gradients": 1e-5, "later_gradients": 1e-4, "weights": 5e-5}
# One unit of bf16 is 2^-8 of a number; partial sums round apart.
BF16 = {"loss": 2e-3, "norm": 1e-2, "gradients": 2e-2, "later_gradients": 0.25, "weights": 5e-2}

Case = tuple[Any, ...]
"""A model, what may differ, and overrides."""
PRECISIONS = {"fp32": FP32, "bf16": BF16}

ONE_RANK: dict[str, Case] = {
    f"{one}, {name}": (one, limits, CHUNKED) for one in ARCHITECTURES for name, limits in PRECISIONS.items()
}
OTHERS_ON_ONE_RANK: dict[str, Case] = {
    f"{one}, {name}": (OTHERS[one][0], PRECISIONS[name], CHUNKED, *OTHERS[one][1:])
    for one, name in [(one, "fp32") for one in OTHERS]
    + [(one, "bf16") for one in ("lion-s", "lightnet, both ways", "causal-rn")]
}
# The interpreter computes bf16 wrongly: kernels are given fp32 there, rounded to bf16 behind each of them.
INTERPRETED: dict[str, Case] = {
    f"{one}, {name}": (one, limits, TRITON) for one in ARCHITECTURES for name, limits in PRECISIONS.items()
}
INTERPRETED |= {
    f"{one}, fp32": (OTHERS[one][0], FP32, TRITON, *OTHERS[one][1:])
    for one in ("lion-s", "lion-s, causal", "lightnet, both ways")
}
TWO_RANKS: dict[str, Case] = {
    "tnl, sequence": ("tnl", FP32, CHUNKED, "parallel.sequence=2"),
    "hgrn2, sequence, ring": ("hgrn2", FP32, CHUNKED, "parallel.sequence=2", 'parallel.exchange="ring"'),
    "lightnet, tensor": ("lightnet", FP32, CHUNKED, "parallel.tensor=2"),
    "llama, sequence": ("llama", FP32, CHUNKED, "parallel.sequence=2"),
    "cosformer2, pipeline": ("cosformer2", FP32, CHUNKED, "parallel.pipeline=2"),
    "tnl, data": ("tnl", FP32, CHUNKED),
    **{
        f"{one}, sequence": (OTHERS[one][0], FP32, CHUNKED, "parallel.sequence=2", *OTHERS[one][1:])
        for one in ("lion-s", "lightnet, both ways", "causal-rn", "bi-rn", "like mamba2")
    },
}
FOUR_RANKS: dict[str, Case] = {
    "hgrn2, pipeline and sequence": (
        *("hgrn2", FP32, CHUNKED, "parallel.pipeline=2", "parallel.sequence=2", 'train.recompute="full"'),
    ),
    "tnl, sequence, two levels": (
        *("tnl", FP32, CHUNKED, "parallel.sequence=4", 'parallel.exchange="two_level"', "parallel.ranks_per_node=2"),
    ),
}


def fields(model: str, limits: dict[str, float], *overrides: str) -> dict[str, Any]:
    precision = "bf16" if limits is BF16 else "fp32"
    config = f"{model}-tiny" if model in ARCHITECTURES else model
    return {"config": config, "overrides": [*SMALL, f'train.precision="{precision}"', *overrides]}


def check(cuda_twin: ModuleType, ranks: int, cases: dict[str, Case], *, interpreted: bool = False) -> None:
    twin, computing = cuda_twin.installation.installed(), cuda_twin.computing_cases
    given = [fields(*case) for case in cases.values()]
    if interpreted:
        # The interpreter takes seconds for a kernel.
        given = [{**one, "overrides": [*one["overrides"], *LEAST], "last": 1} for one in given]
    on_gpus = computing.run(twin, given, ranks=ranks, on_gpus=True, interpreted=interpreted)
    on_cpus = computing.run(twin, given, ranks=ranks, on_gpus=False, interpreted=interpreted)
    wrong = {}
    for name, found, expected in zip(cases, on_gpus, on_cpus, strict=True):
        assert all(rank["device"] == "cuda" and rank["computed"] > 1000 for rank in found)
        assert all(rank["device"] == "cpu" and rank["computed"] == 0 for rank in expected)
        off = computing.differences(found, expected)
        print(name, off)
        if any(off[kind] > limit for kind, limit in cases[name][1].items()):
            wrong[name] = off
    assert not wrong, wrong


def test_one_rank(cuda_twin: ModuleType) -> None:
    check(cuda_twin, 1, ONE_RANK)


def test_one_rank_of_other_mixers(cuda_twin: ModuleType) -> None:
    check(cuda_twin, 1, OTHERS_ON_ONE_RANK)


@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_triton_kernels(cuda_twin: ModuleType, case: str) -> None:
    """One case each: they take minutes, and can be run side by side (``-n``)."""
    check(cuda_twin, 1, {case: INTERPRETED[case]}, interpreted=True)


def test_two_ranks_that_exchange(cuda_twin: ModuleType) -> None:
    check(cuda_twin, 2, TWO_RANKS)


def test_four_ranks_that_exchange(cuda_twin: ModuleType) -> None:
    check(cuda_twin, 4, FOUR_RANKS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_pass_between_gpus_and_cpus(cuda_twin: ModuleType, tmp_path: Path, ranks: int) -> None:
    """Two steps on one, saved, and the third on the other; beside three on CPUs."""
    twin, computing = cuda_twin.installation.installed(), cuda_twin.computing_cases
    cases = {"lightnet": ("lightnet", FP32, CHUNKED)} if ranks == 1 else TWO_RANKS
    names = list(cases)
    # What is compared as a first step is the third.
    limits = {**FP32, "gradients": FP32["later_gradients"]}

    def steps(*, on_gpus: bool, saved_on: str, first: int, last: int) -> list[Any]:
        given = [
            {**fields(*cases[name]), "first": first, "last": last, "checkpoints": str(tmp_path / saved_on / name)}
            for name in names
        ]
        found: list[Any] = computing.run(twin, given, ranks=ranks, on_gpus=on_gpus)
        return found

    for saved_on in ("cpus", "gpus"):
        steps(on_gpus=saved_on == "gpus", saved_on=saved_on, first=0, last=2)
    whole = steps(on_gpus=False, saved_on="whole", first=0, last=3)
    for rank in itertools.chain(*whole):
        rank["steps"] = rank["steps"][-1:]
    wrong = {}
    for saved_on in ("cpus", "gpus"):
        resumed = steps(on_gpus=saved_on == "cpus", saved_on=saved_on, first=2, last=3)
        for name, found, expected in zip(names, resumed, whole, strict=True):
            assert all(rank["device"] == ("cuda" if saved_on == "cpus" else "cpu") for rank in found)
            off = computing.differences(found, expected)
            print(name, saved_on, off)
            if any(off[kind] > limit for kind, limit in limits.items()):
                wrong[name, saved_on] = off
    assert not wrong, wrong
