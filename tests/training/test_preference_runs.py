"""From a file of preferences to a run by the commands: pairs stay together, the reference is frozen, runs resume."""

import json
import math
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from lightscale.data_pipeline.loading.packing import WholeWindows
from lightscale.data_pipeline.loading.windows import PADDING
from lightscale.data_pipeline.store.token_store import TokenSource, TokenStore
from lightscale.data_pipeline.store.verify import verify_store
from lightscale.data_pipeline.tokenizers import load_tokenizer
from lightscale.runs.run_directory import RunDirectory, read_metrics
from lightscale.training.checkpoints.directories import directory_name
from lightscale.training.health.heartbeat import Heartbeat

HELPERS = Path(__file__).parents[1] / "helpers"
commands = runpy.run_path(str(HELPERS / "rank_commands.py"))["commands"]
tuned = SimpleNamespace(**runpy.run_path(str(HELPERS / "tuned_runs.py")))
RunRanks = Callable[..., list[Any]]
STEPS = 6
LENGTH = 64
CORPUS = """\
tokenizer = "ascii"
validation = 0.2
[sources.sums]
paths = ["sums.jsonl"]
format = "preference"
[sources.sums.chat]
template = "t.jinja"
"""
RUN = f"""\
{tuned.MODEL.format(mixer='"tnl"')}
[data]
store = "store"
sequence_length = {LENGTH}
packing = "whole"
validation = {{held = {{source = "sums-validation", sequences = 8}}}}
[optimizer]
lr = 1e-2
warmup_steps = 1
[train]
steps = {STEPS}
global_batch_size = 4
micro_batch_size = 2
validate_every = {STEPS}
[checkpoint]
every = {STEPS // 2}
"""
BASE = ["train", "run.toml", "train.steps=2", "train.validate_every=2", "--run", "runs/base"]
TUNE = ["train", "run.toml", "task.name=preference", "train.init_from=runs/base@2"]
STORED = [*TUNE, "task.reference=stored", "data.store=stored"]
REFERENCE = ["reference", *TUNE[1:]]
BRANCH = ["train.init_from=none", f"train.branch_from=runs/stored@{STEPS // 2}", "train.steps=4"]


def records() -> list[dict[str, Any]]:
    pairs = [(one, two) for one in range(1, 9) for two in range(9)]
    found: list[dict[str, Any]] = [
        {"prompt": f"{one}+{two}", "chosen": f"{one + two}", "rejected": f"{one + two + 1}, no"} for one, two in pairs
    ]
    # The same answers to another prompt, and the same pair once more.
    found[1]["chosen"] = found[0]["chosen"]
    found.append(found[0])
    messages = [{"role": "user", "content": "2+2"}]
    sides = {
        side: [*messages, {"role": "assistant", "content": text}] for side, text in (("chosen", "4"), ("rejected", "5"))
    }
    return [*found, sides]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, records())))
    (folder / "equal.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "b"}))
    (folder / "t.jinja").write_text(tuned.TEMPLATE)
    (folder / "corpus.toml").write_text(CORPUS)
    (folder / "equal.toml").write_text(CORPUS.replace("sums.jsonl", "equal.jsonl"))
    (folder / "run.toml").write_text(RUN)
    return folder


def on_one_process(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    lines = [
        ["data", "prepare", "corpus.toml", "--out", "store"],
        BASE,
        [*TUNE, "--run", "runs/dpo"],
        [
            *TUNE,
            "task.loss=simpo",
            "train.init_from=none",
            "train.steps=2",
            "train.validate_every=0",
            "--run",
            "runs/simpo",
        ],
        [*TUNE, "adapter.name=lora", "task.loss=ipo", "train.validate_every=0", "--run", "runs/lora"],
        [*REFERENCE, "--out", "stored"],
        [*STORED, "--run", "runs/stored"],
        # A branch has no train.init_from: what it is compared with is what its parent began from.
        [*STORED, *BRANCH, "--run", "runs/branch"],
    ]
    found = commands(rank, world_size, f"{init_method}-whole", folder, lines)
    of_dpo = [*REFERENCE, "train.init_from=runs/dpo@6", "--out", "of-dpo"]
    with mock.patch.object(Heartbeat, "beat") as beat:
        found += commands(rank, world_size, f"{init_method}-of-dpo", folder, [of_dpo])
    source = TokenStore(Path("of-dpo")).sources["sums"]
    # Else the launcher would take a long pass for a hang.
    assert beat.call_count > WholeWindows(source, LENGTH).num_windows // 2
    tuned.interrupted("runs/dpo", ("resumed", "elsewhere"), step=STEPS)
    again = [
        [*TUNE, "--run", "runs/resumed"],
        ["data", "prepare", "equal.toml", "--out", "other"],
        [*TUNE, "train.init_from=none", "--run", "runs/none"],
        [*TUNE, "task.name=sft", "--run", "runs/none"],
        [*TUNE, "data.sequence_length=16", "data.validation={}", "train.validate_every=0", "--run", "runs/none"],
        [*TUNE, "data.sequence_length=16", "--run", "runs/none"],
        [*TUNE, "train.init_from=none", "train.branch_from=runs/base@2", "--run", "runs/none"],
        [*TUNE, "task.gamma=0.2", "--run", "runs/none"],
        [*STORED, "data.store=store", "--run", "runs/none"],
        [*STORED, "train.init_from=runs/dpo@6", "--run", "runs/none"],
        [*STORED, "data.store=of-dpo", "train.steps=8", "--allow-change=data", "--run", "runs/stored"],
        [*STORED, *BRANCH, "data.store=of-dpo", "--allow-change=data", "--run", "runs/none"],
        [*STORED, "data.validation.held.store=of-dpo", "--run", "runs/none"],
        [*STORED, "train.micro_batch_size=4", "--run", "runs/none"],
        [*STORED, "task.loss=simpo", "train.init_from=none", "--run", "runs/none"],
        [*STORED, "data.curriculum=[{sequence_length = 32, until_tokens = 256}]", "--run", "runs/none"],
        [*REFERENCE, "data.store=stored", "--out", "again"],
        [*REFERENCE, "--out", "stored"],
        [*REFERENCE, "task.loss=simpo", "--out", "again"],
    ]
    return [*found, *commands(rank, world_size, f"{init_method}-again", folder, again)]


@pytest.mark.timeout(600)
def test_preferences_are_learned_and_resumed(
    folder: Path, run_ranks: RunRanks, steps_of: Callable[..., dict[int, tuple[Any, ...]]]
) -> None:
    (results,) = run_ranks(on_one_process, 1, str(folder), timeout_s=500)
    codes, outputs = zip(*results, strict=True)
    done = 10
    assert codes[:done] == (0,) * done, results
    assert all(codes[done:]), results
    for output, message in zip(
        outputs[done:],
        [
            "equal.jsonl, line 1: sources.sums: chosen and rejected are equal; remove the pair",
            "compares the model with the one that it begins from; set train.init_from",
            'holds pairs of answers, half of them rejected; use task.name = "preference"',
            "a pair of answers has",
            "sums-validation: a pair of answers has 20 tokens, and a sequence 16; use longer sequences",
            'train.branch_from = "runs/base@2": the run that it branches off has no frozen model',
            'gamma = 0.2 has no effect in loss = "dpo"; remove it',
            "source sums of store has no log-probabilities of a reference; write a store that has them",
            "and runs/none begins from another model",
            "and runs/stored begins from another model",
            "and runs/none begins from another model",
            "of-dpo/sums-validation are those of runs/dpo/checkpoints/step-00000006",
            "were computed with train.micro_batch_size = 2, here 4; compute them again",
            'reference = "stored" has no effect in loss = "simpo"; remove it',
            "is of sequences of one length; remove data.curriculum",
            "source sums has log-probabilities of runs/base/checkpoints/step-00000002; use the store that was prepared",
            "stored: it exists and is never overwritten",
            "no reference: use task.loss",
        ],
        strict=True,
    ):
        assert message in output
    metrics = {
        name: read_metrics(RunDirectory(folder / "runs" / name).metrics)
        for name in ("dpo", "resumed", "lora", "simpo", "stored")
    }
    # Log-probabilities from the store are those of the model, bitwise, and are no part of a checkpoint.
    assert steps_of(metrics["stored"]) == steps_of(metrics["dpo"])
    assert metrics["stored"][-1]["validation"] == metrics["dpo"][-1]["validation"]
    assert not verify_store(folder / "stored", lambda *_: None).faults
    # The model is its reference at the first step.
    assert metrics["dpo"][0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert metrics["lora"][0]["loss"] == pytest.approx(25.0, rel=1e-5)
    assert metrics["dpo"][-1]["loss"] < metrics["dpo"][0]["loss"]
    held = metrics["dpo"][-1]["validation"]["held"]
    assert held["loss"] < math.log(2) and held["accuracy"] > 0.5
    assert steps_of(metrics["resumed"]) == steps_of(metrics["dpo"])
    manifest = json.loads((folder / "runs/dpo/checkpoints" / directory_name(STEPS) / "MANIFEST.json").read_text())
    assert manifest["base"]["checkpoint"].endswith("base/checkpoints/step-00000002")
    lines = [[*TUNE, "parallel.sequence=2", "--run", "runs/elsewhere"]]
    for ((code, stderr),) in run_ranks(commands, 2, str(folder), lines, timeout_s=300):
        assert code == 0, stderr
    found = read_metrics(RunDirectory(folder / "runs/elsewhere").metrics)
    tuned.check_losses(found, metrics["dpo"], first=STEPS // 2, rel=1e-4)
    store = TokenStore(folder / "store")
    total = sum(check_pairs(store, store.sources[name]) for name in ("sums", "sums-validation"))
    assert total == len(records()) - 1, "the pair that is there twice is dropped, both documents of it"


def check_pairs(store: TokenStore, source: TokenSource) -> int:
    """Windows hold whole pairs, all of them once, and only the answers count; the number of pairs."""
    ends = source.document_ends(0, source.num_documents)
    starts = np.concatenate([[0], ends[:-1]])
    windows, seen, tokenizer = WholeWindows(source, LENGTH), list[int](), load_tokenizer(store.path)
    for window in range(windows.num_windows):
        slots, tokens = windows.document_ranges(window, 0, LENGTH)
        tokens = tokens[tokens != PADDING]
        numbers = np.searchsorted(starts, tokens)
        assert (starts[numbers] == tokens).all() and len(numbers) % 2 == 0
        assert (numbers[::2] + 1 == numbers[1::2]).all() and (numbers[::2] % 2 == 0).all()
        assert (np.diff(slots)[: len(numbers) - 1] == (ends - starts)[numbers][:-1]).all()
        # A sequence rank reads its part.
        here = windows.document_ranges(window, LENGTH // 2, LENGTH)
        assert set(here.slots.tolist()) <= set(slots.tolist())
        seen += numbers.tolist()
    assert sorted(seen) == list(range(source.num_documents))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        text = tokenizer.decode(source.read(start + 1, end))
        counted = source.loss_mask(start, end).astype(bool)
        assert counted.sum() == len(text) - text.index("=") - 1
        assert not counted[: text.index("=") + 2].any()
    return source.num_documents // 2


AXES = {
    "tensor": ["parallel.tensor=2"],
    "sequence": ["parallel.sequence=2"],
    "pipeline": ["parallel.pipeline=2", "train.micro_batch_size=1"],
    "data": ["task.loss=ipo"],
    "adapters": ["parallel.tensor=2", "adapter.name=lora", "adapter.lora_dropout=0.2"],
}


def on_two_processes(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    lines = [BASE]
    for name, words in AXES.items():
        lines.append([*REFERENCE, *words, "--out", f"stored-{name}"])
        lines.append([*TUNE, *words, "--run", f"runs/{name}-model"])
        stored = ["task.reference=stored", f"data.store=stored-{name}"]
        lines.append([*TUNE, *words, *stored, "--run", f"runs/{name}-stored"])
    # Those of one layout on another: refused, or taken by name.
    other = [*TUNE, "task.reference=stored", "data.store=stored-tensor", "parallel.sequence=2"]
    lines.append([*other, "--run", "runs/other"])
    lines.append([*other, "--allow-change", "task.reference", "--run", "runs/other"])
    return commands(rank, world_size, init_method, folder, lines)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_stored_log_probabilities_are_those_of_the_model_on_the_same_ranks(
    folder: Path, tmp_path: Path, run_ranks: RunRanks, steps_of: Callable[..., dict[int, tuple[Any, ...]]]
) -> None:
    for file in folder.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    ((prepared,),) = run_ranks(commands, 1, str(tmp_path), [["data", "prepare", "corpus.toml", "--out", "store"]])
    assert prepared[0] == 0, prepared
    for results in run_ranks(on_two_processes, 2, str(tmp_path), timeout_s=900):
        *done, (refused, output), (accepted, _) = results
        assert not [one for one in done if one[0]], results
        assert refused and "were computed with parallel.tensor = 2, here 1, parallel.sequence = 1, here 2" in output
        assert accepted == 0
    metrics = {path.name: read_metrics(RunDirectory(path).metrics) for path in (tmp_path / "runs").iterdir()}
    for name in AXES:
        model, stored = (metrics[f"{name}-{how}"] for how in ("model", "stored"))
        assert steps_of(stored) == steps_of(model), name
        assert stored[-1]["validation"] == model[-1]["validation"], name
    tuned.check_losses(metrics["other"], metrics["sequence-model"], first=0, rel=1e-4)
