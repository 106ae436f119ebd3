"""From a file of conversations to a fine-tuned model by the commands: base, ``init_from``, validation, resumption."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightscale.runs.run_directory import RunDirectory, read_metrics

HELPERS = Path(__file__).parents[1] / "helpers"
commands = runpy.run_path(str(HELPERS / "rank_commands.py"))["commands"]
tuned = SimpleNamespace(**runpy.run_path(str(HELPERS / "tuned_runs.py")))
RunRanks = Callable[..., list[Any]]
STEPS = 6
CORPUS = """\
tokenizer = "ascii"
validation = 0.2
[sources.sums]
paths = ["sums.jsonl"]
format = "chat"
[sources.sums.chat]
template = "t.jinja"
max_tokens = 64
"""
RUN = f"""\
extends = ["{HELPERS.parents[1]}/configs/arch/tnl.toml", "{HELPERS.parents[1]}/configs/size/tiny.toml"]
{tuned.MODEL.format(mixer='"tnl"')}
[data]
store = "store"
sequence_length = 64
packing = "whole"
validation = {{held = {{source = "sums-validation", sequences = 8}}}}
[optimizer]
lr = 1e-2
warmup_steps = 1
[train]
steps = {STEPS}
global_batch_size = 4
validate_every = {STEPS}
[checkpoint]
every = {STEPS // 2}
"""
BASE = ["train", "run.toml", "--run", "runs/base"]
TUNE = ["train", "run.toml", "task.name=sft", f"train.init_from=runs/base@{STEPS}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    lines = [{"instruction": f"{one}+{two}", "output": f"{one + two}"} for one in range(1, 9) for two in range(9)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "t.jinja").write_text(tuned.TEMPLATE)
    (folder / "corpus.toml").write_text(CORPUS)
    (folder / "run.toml").write_text(RUN)
    return folder


def on_one_process(rank: int, world_size: int, init_method: str, folder: str) -> list[tuple[int, str]]:
    """Store, base, fine-tuning; the last once more from its first checkpoint, and with a store without a mask."""
    lines = [["data", "prepare", "corpus.toml", "--out", "store"], BASE, [*TUNE, "--run", "runs/tuned"]]
    found = commands(rank, world_size, f"{init_method}-whole", folder, lines)
    tuned.interrupted("runs/tuned", ("resumed", "elsewhere"), step=STEPS)
    again = [
        [*TUNE, "--run", "runs/resumed"],
        [*TUNE, "data.packing=concat", "--run", "runs/cut"],
        [*TUNE, "data.sequence_length=6", "metrics.position_buckets=2", "--run", "runs/cut"],
        [*TUNE, "model.vocab_size=100", "--run", "runs/cut"],
    ]
    return [*found, *commands(rank, world_size, f"{init_method}-again", folder, again)]


@pytest.mark.timeout(600)
def test_a_model_is_fine_tuned_and_resumes_bitwise_and_on_other_ranks(
    folder: Path, run_ranks: RunRanks, steps_of: Callable[..., dict[int, tuple[Any, ...]]]
) -> None:
    (results,) = run_ranks(on_one_process, 1, str(folder), timeout_s=400)
    assert [code for code, _ in results[:4]] == [0] * 4, results
    for (code, stderr), message in zip(
        results[4:],
        [
            'data.packing = "concat" cuts documents, but task.name = "sft" learns from whole ones; use "whole"',
            'more than data.sequence_length = 6, and task.name = "sft" learns from whole ones; use',
            "model.vocab_size = 100 is less than the 128 tokens of ascii",
        ],
        strict=True,
    ):
        assert code != 0 and message in stderr
    assert "sums.jsonl, bytes" in results[5][1], "the file and the place of the conversation"
    assert not (folder / "runs/cut").exists()
    # Before it trains, a run shows how its sequences are filled.
    assert "of them padding; its loss mask selects the labels that count" in results[2][1]
    metrics = {
        name: read_metrics(RunDirectory(folder / "runs" / name).metrics) for name in ("base", "tuned", "resumed")
    }
    losses = [line["loss"] for line in metrics["tuned"]]
    assert losses[-1] < losses[0] < metrics["base"][0]["loss"], "from the weights of the base"
    assert metrics["tuned"][-1]["validation"]["held"]["loss"] > 0
    assert steps_of(metrics["resumed"]) == steps_of(metrics["tuned"])
    lines = [[*TUNE, "parallel.sequence=2", "--run", "runs/elsewhere"]]
    for ((code, stderr),) in run_ranks(commands, 2, str(folder), lines, timeout_s=300):
        assert code == 0, stderr
    found = read_metrics(RunDirectory(folder / "runs/elsewhere").metrics)
    tuned.check_losses(found, metrics["tuned"], first=STEPS // 2, rel=1e-4)
    held, held_elsewhere = (lines[-1]["validation"]["held"]["loss"] for lines in (metrics["tuned"], found))
    assert held_elsewhere == pytest.approx(held, rel=1e-3)
