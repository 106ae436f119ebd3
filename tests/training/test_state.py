"""Everything that a run is comes back from a checkpoint: nothing that training changes is missing, bit by bit."""

import itertools
import math
import os
import random
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.transformer import TransformerConfig

from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.data_pipeline.loading.samples import run_loader, step_content
from lightscale.parallel.mesh import Mesh, start_mesh
from lightscale.runs.run_directory import RunDirectory, read_metrics
from lightscale.training.checkpoints.directories import directory_name, list_steps
from lightscale.training.checkpoints.random_states import random_states
from lightscale.training.checkpoints.save_policy import SavePolicy
from lightscale.training.health.guard import Guard
from lightscale.training.health.heartbeat import Heartbeat
from lightscale.training.signals import StopSignal
from lightscale.training.train import Trainer

RunRanks = Callable[..., list[Any]]
VALIDATED, SKIPPED = 25, 20

# What differs between a trainer and a restored one, and why nothing is lost by that.
OF_THIS_PROCESS = {
    r"stop\b": "a stop is for one process",
    r"save_policy\.saver\._copies\b": "the memory that the last save was copied to",
    r"save_policy\.saver\.known_good\b": "what this process has verified; others verify again",
    r"save_policy\._interval\b": "the clock since this process's last save",
    r"(save_policy\._)?heartbeat\b": "how long this process's steps take",
    r".*optimizer\._norms\b": "norms of the last gradients, which come before each step",
    r"shape\b": "the shape of the last step, asked for anew",
    r".*optimizer\.clippings\b": "what the last step clipped, for its metrics",
    r"save_policy\._failures\b": "failures of this process's disk",
    r".*\._buffers\b": "memory that every batch is read into anew",
    r".*\._upcoming\b": "samples and documents found ahead, and found again",
    r".*\._last_values\b": "the last document ends of shards that this process has looked into",
    r".*\._known\b": "shards that this process has opened before",
}
PLAIN = (int, float, complex, str, bytes, bool, type(None), Enum, Path, torch.dtype, torch.device)


class StopAfter(StopSignal):
    """Stops when asked for the ``steps``-th time."""

    def __init__(self, steps: int) -> None:
        super().__init__(announce=False)
        self.steps = steps

    def should_stop(self, all_reduce_max: Callable[[int], int]) -> bool:
        self.steps -= 1
        return self.steps <= 0

    @property
    def reason(self) -> str:
        return "the test"


def leaves(value: Any, path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(path, value) of everything that can be told of what is reachable from ``value`` through lightscale's objects."""
    if isinstance(value, PLAIN):
        yield path, value
    elif isinstance(value, torch.Tensor):
        yield path, value.detach().clone()
    elif isinstance(value, np.ndarray | np.generic):
        yield path, torch.from_numpy(np.array(value, ndmin=1).view(np.uint8).copy())
    elif id(value) not in above:
        above = (*above, id(value))
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from leaves(item, f"{path}[{key!r}]", above)
        elif isinstance(value, list | tuple | deque | set | frozenset):
            items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            for number, item in enumerate(items):
                yield from leaves(item, f"{path}[{number}]", above)
        elif isinstance(value, torch.nn.Module):
            for name, tensor in value.state_dict().items():
                yield from leaves(tensor, f"{path}.{name}", above)
        elif isinstance(value, TransformerConfig):
            return
        elif type(value).__module__.startswith("megatron.core.optimizer"):
            chained = hasattr(value, "chained_optimizers")
            parts = value.chained_optimizers if chained else list(value.optimizer.state.values())
            yield from leaves(parts, path, above)
        elif type(value).__module__.startswith("lightscale"):
            for name, item in getattr(value, "__dict__", {}).items():
                yield from leaves(item, f"{path}.{name}".removeprefix("."), above)


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Paths of what is not the same in both."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return torch.equal(a, b)
        return type(a) is type(b) and bool(a == b)

    common = first.keys() & second.keys()
    return sorted((first.keys() ^ second.keys()) | {path for path in common if not same(first[path], second[path])})


def unexplained(paths: list[str]) -> list[str]:
    """Those that are not of ``OF_THIS_PROCESS`` or inside one that is."""
    return [path for path in paths if not any(re.match(own, path) for own in OF_THIS_PROCESS)]


def trainer_of(config: RunConfig, run: RunDirectory, mesh: Mesh, steps: int) -> Trainer:
    run.create_or_open(config)
    return Trainer(config, run, mesh, StopAfter(steps), Heartbeat(60.0, environ={}))


def compare(rank: int, world_size: int, init_method: str, folder: str) -> dict[str, Any]:
    """Paths that differ between a trainer after its steps, a fresh one, and a restored one."""
    os.chdir(folder)
    overrides = ["train.validate_every=2", "data.curriculum=[]", "optimizer.grad_clip=0"]
    overrides += ["optimizer.adaptive_clip.warmup_steps=2"]
    config = load(Path("run.toml"), overrides)
    run = RunDirectory(Path(folder) / "runs" / "state")
    with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=init_method) as mesh:
        trainer = trainer_of(config, run, mesh, 3)
        fresh = dict(leaves(trainer))
        assert trainer.run() == "resumable"
        trained = dict(leaves(trainer))
        generators = random_states()
        restored = dict(leaves(trainer_of(config, run, mesh, 3)))
        assert random_states() == generators, "of a resumed process"
        begun = []
        for name in ("one", "other"):
            random.seed(), np.random.seed(), torch.seed()
            trainer_of(config, RunDirectory(Path(folder) / "runs" / name), mesh, 3)
            begun.append(random_states())
        assert begun[0] == begun[1], "of runs that begin"
        # What the test is for: a counter that somebody adds and nobody saves.
        trainer.loader.forgotten = 7  # type: ignore[attr-defined]
        forgotten = dict(leaves(trainer))
    return {
        "changed": differing(fresh, trained),
        "lost": unexplained(differing(trained, restored)),
        "forgotten": unexplained(differing(forgotten, restored)),
        "limits": [(line["grad_clip_limit"], line["grad_clipped"]) for line in read_metrics(run.metrics)],
    }


def test_no_state_is_left_out_of_checkpoints(run_ranks: RunRanks, workplace: Path) -> None:
    (found,) = run_ranks(compare, 1, str(workplace))
    # The walk sees what training changes.
    for part in ("step", "loader.tokens", "exp_avg", "linear_fc1.weight"):
        assert any(part in path for path in found["changed"]), part
    assert found["lost"] == []
    assert [limit is None for limit, _ in found["limits"]] == [True, True, False]
    assert {clipped for _, clipped in found["limits"]} <= {0, 1}
    assert found["forgotten"] == [
        f"{place}.forgotten" for place in ("loader", "recovery._loader", "recovery._state['data']", "state['data']")
    ]


def run_to_the_end(
    rank: int, world_size: int, init_method: str, folder: str, overrides: list[str], names: list[str], saved: list[int]
) -> None:
    """The runs of these names, with checkpoints of the steps ``saved``; the loss of one step is not a number."""
    os.chdir(folder)
    config, judge = load(Path("run.toml"), overrides), Guard.judge
    for number, name in enumerate(names):
        run = RunDirectory(Path(folder) / "runs" / name)
        with start_mesh(device="cpu", rank=rank, world_size=world_size, init_method=f"{init_method}-{number}") as mesh:
            trainer = trainer_of(config, run, mesh, 10**9)

            def judge_one_as_bad(self: Guard, loss: float, norm: float, trainer: Trainer = trainer) -> str | None:
                return judge(self, math.nan if trainer.step + 1 == SKIPPED else loss, norm)

            with (
                mock.patch.object(Guard, "judge", judge_one_as_bad),
                mock.patch.object(SavePolicy, "is_due", lambda self, step: step in saved),
            ):
                trainer.run()


def at_step(run: RunDirectory, step: int) -> RunDirectory:
    """A copy of ``run`` as it would be, had it been killed after the checkpoint of ``step``."""
    copy = RunDirectory(run.path.with_name(f"{run.path.name}-from-{step}"))
    shutil.copytree(run.path, copy.path, ignore=shutil.ignore_patterns("step-*", "metrics.jsonl", "tensorboard"))
    shutil.copytree(run.checkpoints / directory_name(step), copy.checkpoints / directory_name(step))
    copy.status.unlink()
    return copy


def end_of_first_epoch(run: RunDirectory) -> int:
    """The last step before the first that has a sample of the second epoch."""
    _, loader = run_loader(run.path)
    epochs = (max(sample.epoch for sample in step_content(loader, step).samples) for step in itertools.count(1))
    return next(step for step, epoch in enumerate(epochs) if epoch > 0)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_hundred_steps_after_resuming_are_bitwise_the_same(
    run_ranks: RunRanks, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 1, from the end of an epoch, and right after a validation and a skipped step."""
    monkeypatch.chdir(workplace)  # where the store is
    overrides = [
        "train.global_batch_size=16",
        "train.micro_batch_size=16",
        "train.steps=130",
        "train.validate_every=25",
    ]
    overrides += ["checkpoint.every=1", "checkpoint.keep_every=1", "checkpoint.asynchronous=false"]
    epoch = RunDirectory(workplace / "runs" / "epoch")
    assert epoch.create_or_open(load(Path("run.toml"), overrides))
    steps = [1, end_of_first_epoch(epoch), SKIPPED, VALIDATED]
    assert 2 <= steps[1] <= 30
    run = RunDirectory(workplace / "runs" / "hundred")
    run_ranks(run_to_the_end, 1, str(workplace), overrides, ["hundred"], steps, timeout_s=200)
    reference = {line["step"]: line for line in read_metrics(run.metrics)}
    assert list_steps(run.checkpoints) == sorted({*steps, 130})
    assert [step for step, line in reference.items() if "skipped" in line] == [SKIPPED]
    copies = [at_step(run, step) for step in steps]
    run_ranks(run_to_the_end, 1, str(workplace), overrides, [copy.path.name for copy in copies], [], timeout_s=250)
    for step, copy in zip(steps, copies, strict=True):
        lines = read_metrics(copy.metrics)
        assert [line["step"] for line in lines] == list(range(step + 1, 131))
        assert len(lines) >= 100
        for line in lines:
            expected = reference[line["step"]]
            for key in ("loss", "grad_norm", "lr", "tokens", "validation", "skipped"):
                assert line.get(key) == expected.get(key), f"{key} of step {line['step']} after resuming at {step}"
