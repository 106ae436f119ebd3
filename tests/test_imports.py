"""Commands that compute nothing on tensors answer at once: none imports torch, and each takes a second at most."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightscale.cli import COMMANDS
from lightscale.config.files import load
from lightscale.data_pipeline.store.token_store import StoreWriter
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer
from lightscale.runs.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "megatron", "triton", "transformers")
# Of the CPU time of the imports that most commands share: a busy or slow machine changes both.
MOST_SHARES = 4.0
CODE = f"""
import json, os, resource, sys
import numpy, rich.progress, rich.table, zarr
import lightscale.config.schema
from lightscale.cli import main

def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

shared = cpu_s()
for line in sys.stdin:
    record, output, calls = json.loads(line)
    if (child := os.fork()) == 0:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1), os.dup2(descriptor, 2)
        began, codes = cpu_s(), []
        for arguments in calls:
            try:
                codes.append(main(arguments))
            except SystemExit as end:
                codes.append(end.code)
        sys.stdout.flush()
        found = {{"codes": codes, "heavy": sorted(set({HEAVY!r}) & set(sys.modules))}}
        found |= {{"cpu_s": shared + cpu_s() - began, "shared_s": shared}}
        open(record, "w").write(json.dumps(found))
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""

# What is called, the exit code, and a part of what it says.
COMMAND_LINES: list[tuple[str, int, str]] = [
    ("--help", 0, "commands:"),
    ("trian", 2, "invalid choice: 'trian'"),
    ("train", 2, "required: CONFIG\n"),
    ("train nowhere.toml", 78, "nowhere.toml"),
    ("train tiny-run.toml model.hidden_size=65", 78, "model.hidden_size = 65"),
    ("train tiny-run.toml data.store=nowhere", 78, "nowhere"),
    ("train tiny-run.toml --processes 3", 78, "train.global_batch_size = 4"),
    ("config tiny-run.toml", 0, "[model]"),
    ("config --describe", 0, "model.num_layers"),
    ("plan tiny-run.toml", 0, "parameters"),
    ("plan {root}/configs/lightnet-1b.toml --nodes 2", 0, "parallel.tensor="),
    ("plan {root}/configs/hgrn2-1b.toml --failures --gpus 16", 0, "goodput"),
    ("plan --study {root}/configs", 0, "all 24 agree"),
    ("study plan two-cores", 0, "70 cells"),
    ("study status two-cores", 78, "no study here"),
    ("study run two-cores", 78, "data/stdlib-512"),
    ("compare runs/first --out nowhere/page.html", 78, "no folder nowhere"),
    ("runs", 0, "runs/first"),
    ("logs runs/first", 0, "hello"),
    ("cancel runs/first", 0, "has no waiting or running job"),
    ("submit tiny-run.toml --dry-run --nodes 2 --time 1:00:00 --processes 1", 0, "#SBATCH"),
    ("data inspect store", 0, "text"),
    ("data trace runs/first", 0, "no skipped step"),
    ("data trace runs/first --spike 99", 78, "has steps 1 to"),
    ("data add store tiny-run.toml --out more", 78, "unknown key"),
    ("evaluate runs/first --tasks perplexiti", 2, "did you mean perplexity?"),
    ("evaluate runs/first --tasks lambada", 2, "lightscale downloads nothing"),
    ("evaluate runs/frist --tasks text.toml", 2, "did you mean runs/first?"),
    ("evaluate runs/first --tasks text.toml", 2, "nowhere.txt: no such file"),
    ("generate runs/first --file nowhere.jsonl", 2, "nowhere.jsonl: No such file"),
    ("generate runs/first --step 7", 2, "has no checkpoint of step 7"),
    ("chat runs/first", 78, "no chat template: the model was not trained on a store of conversations"),
    ("predict runs/first --file nowhere.jsonl", 2, "to continue texts, or --embed mean"),
    ("predict runs/first --file nowhere.jsonl --embed last", 2, "nowhere.jsonl: No such file"),
    ("checkpoint list runs/first", 0, "layout"),
    ("checkpoint show runs/first", 0, "embedding"),
    ("checkpoint prune runs/first", 0, "nothing removed"),
    ("export nowhere --to there", 78, "no run nowhere"),
    ("export runs/first --to there --shard-size 1", 2, "use a size of at least 1MB"),
    ("import nowhere --run there", 78, "no model; expected"),
    ("lr-find tiny-run.toml train.steps=3", 2, "lr-find sets train.steps by --steps; remove it"),
    ("average runs/first@3 --to there", 78, "no checkpoint of step 3"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_run_text: str) -> Path:
    """A configuration, its store, and a run of it with a checkpoint and output."""
    folder = tmp_path_factory.mktemp("imports")
    (folder / "tiny-run.toml").write_text(tiny_run_text, encoding="utf-8")
    ranks = {bytes([byte]): byte for byte in range(256)}
    special = {"<|endoftext|>": 256}
    tokenizer = TiktokenTokenizer(name="bytes", pat_str="(?s:.+)", mergeable_ranks=ranks, special_tokens=special)
    with StoreWriter(folder / "store", tokenizer) as store:
        store.source("text").append(np.arange(200, dtype=np.uint32), num_bytes=200)
        described = {"documents": 1, "bytes": 200, "tokens": 200, "bytes_per_token": 1.0}
        about = {"name": "bytes", "vocab_size": 257, "eot_id": 256, "sha256": tokenizer.sha256}
        entropy = {"train": 1.0}
        report = {"tokenizer": about, "sources": {"text": described}, "unigram_entropy_nats": entropy, "problems": {}}
        store.finish(report)
    run = RunDirectory(folder / "runs" / "first")
    run.create(load(folder / "tiny-run.toml"))
    golden = ROOT / "tests/training/checkpoints/golden/format-2/step-00000001"
    shutil.copytree(golden, run.checkpoints / golden.name)
    (folder / "text.toml").write_text('kind = "perplexity"\npaths = ["nowhere.txt"]\n', encoding="utf-8")
    output = run.logs / "launch-0001" / "rank-0.out"
    output.parent.mkdir(parents=True)
    output.write_text("hello\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def commands(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has imported the command and what most commands share, to be forked for each call."""
    with subprocess.Popen(
        [sys.executable, "-c", CODE], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.communicate(timeout=60)


def start(
    commands: subprocess.Popen[str], folder: Path, arguments: Sequence[Sequence[str]]
) -> tuple[str, dict[str, Any]]:
    """What a process says when it is called with each of `arguments`, and what it then is."""
    assert commands.stdin is not None and commands.stdout is not None
    record, output = folder / "found.json", folder / "output.txt"
    record.unlink(missing_ok=True)
    commands.stdin.write(json.dumps([str(record), str(output), arguments]) + "\n")
    commands.stdin.flush()
    status = commands.stdout.readline()
    assert status == "0\n", (status, output.read_text(encoding="utf-8"))
    return output.read_text(encoding="utf-8"), json.loads(record.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("line", "code", "says"), COMMAND_LINES, ids=[line for line, _, _ in COMMAND_LINES])
def test_a_command_answers_at_once(
    commands: subprocess.Popen[str], folder: Path, line: str, code: int, says: str
) -> None:
    output, found = start(commands, folder, [line.format(root=ROOT).split()])
    print(f"{found['cpu_s']:.2f} s of CPU, {found['shared_s']:.2f} s of them for imports")
    assert says in output
    assert (found["codes"], found["heavy"]) == ([code], [])
    assert found["cpu_s"] < MOST_SHARES * found["shared_s"]


def test_usage_is_answered_at_once(commands: subprocess.Popen[str], folder: Path) -> None:
    """Of all commands, by one process: what none of them imports together, each does not."""
    usages = [[name, word] for name in COMMANDS for word in ("--help", "--zebra")]
    output, found = start(commands, folder, usages)
    assert found["codes"] == [0, 2] * len(COMMANDS)
    assert all(f"usage: lightscale {name} " in output for name in COMMANDS)
    assert found["heavy"] == []
