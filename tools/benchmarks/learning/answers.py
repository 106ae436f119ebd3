"""From a small natural corpus to a model that answers: pretraining, fine-tuning on conversations, the same by LoRA.

The base is trained on the text of Python's standard library. All of its weights, and then adapters alone, are
trained on generated conversations. The share of right answers is that of held-out conversations, none of whose
questions is in the training.
"""

import argparse
import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from rich.table import Table

import lightscale
from benchmarks.command import run_lightscale
from benchmarks.learning.talks import KINDS, VOCAB_SIZE, talks, write_corpora
from benchmarks.turns import positive
from lightscale.config.files import load
from lightscale.errors import UserError
from lightscale.evaluation.inference.prompts import Sampling
from lightscale.models.accounting import parameter_shapes
from lightscale.models.adapters import trained_shapes

TALKS = """\
tokenizer = "tokenizer.json"
validation = 0.01
[duplicates]
near = false
[sources.talks]
paths = ["talks.jsonl"]
format = "chat"
chat = { template = "chatml", max_tokens = 256 }
"""
BASE = f"""\
[model]
mixer = ["gated-delta-net*3", "llama"]
norm = "rmsnorm"
glu_activation = "silu"
num_layers = 4
hidden_size = 192
num_heads = 3
intermediate_size = 512
vocab_size = {VOCAB_SIZE}
init_std = 0.08                # about 1 / sqrt(hidden_size), as a short run has no time to grow into it
[data]
store = "data/texts"
sequence_length = 256
validation = {{ held-out = {{ source = "stdlib-validation" }} }}
[optimizer]
lr = 3e-3
schedule = "cosine"
[train]
global_batch_size = 8
micro_batch_size = 8
[checkpoint]
every = 100
[guard]
max_loss_rise = "none"         # a step of few answers is no spike
max_grad_norm_ratio = "none"
"""
CHAT = [
    "task.name=sft",
    "data.store=data/talks",
    "data.packing=whole",
    "data.validation.held-out.source=talks-validation",
]
LORA = ["adapter.name=lora", "adapter.r=2", "adapter.lora_alpha=8"]


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is known after each model. UserError: a command failed; it has said why."""
    with contextlib.ExitStack() as stack:
        kept = args.folder is not None
        folder = args.folder.resolve() if kept else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True, parents=True)
        stack.enter_context(contextlib.chdir(folder))
        prepare(folder, args.talks)
        base = f"train.init_from=runs/base@{args.base_steps}"
        runs = {
            "base": length(args.base_steps),
            "fine-tuned": [*CHAT, base, *length(args.steps), f"optimizer.lr={args.rate}"],
            "LoRA": [*CHAT, base, *LORA, *length(args.lora_steps), f"optimizer.lr={args.lora_rate}"],
        }
        models = []
        for name, words in runs.items():
            directory = f"runs/{name.lower()}"
            every = f"train.validate_every={min(200, args.base_steps)}"
            command = ["train", "base.toml", "--processes", "1", *words, every, "--run", directory]
            # A run that is finished, or was interrupted in a folder of one's own, is not trained again.
            run_lightscale(*command)
            models.append(
                {"model": name, "command": " ".join(command), **facts(directory), **measured(directory, args)}
            )
            yield {"models": list(models)}


def length(steps: int) -> list[str]:
    """Of a run of ``steps``."""
    return [f"train.steps={steps}", f"optimizer.warmup_steps={min(30, steps // 10)}"]


def prepare(folder: Path, count: int) -> None:
    """The texts, ``count`` conversations and their stores; stores that are complete stay.

    Raises:
        UserError: ``folder`` has another number of conversations, or a store cannot be prepared.
    """
    commands = {
        "texts": ["--corpus", "stdlib", "--tokenizer", "tokenizer.json", "--validation", "0.02"],
        "talks": ["talks.toml"],
    }
    if Path("data/talks").exists():
        with Path("talks.jsonl").open(encoding="utf-8") as lines:
            there = sum(1 for _ in lines)
        if there != count:
            raise UserError(f"--folder {folder}: its store has {there} conversations, not {count}; use --talks {there}")
    missing = [name for name in commands if not Path(f"data/{name}").exists()]
    if missing:
        write_corpora(folder, count)
        Path("talks.toml").write_text(TALKS, encoding="utf-8")
    for name in missing:
        run_lightscale("data", "prepare", *commands[name], "--out", f"data/{name}")
    Path("base.toml").write_text(BASE, encoding="utf-8")


def facts(run: str) -> dict[str, int]:
    """Parameters of the model of ``run``, and those that it trains."""
    config = load(Path(run) / "config.toml")
    numbers = {"parameters": parameter_shapes(config.model), "trained": trained_shapes(config)}
    return {name: sum(prod(shape) for shape in shapes.values()) for name, shapes in numbers.items()}


def measured(run: str, args: argparse.Namespace) -> dict[str, Any]:
    """Answers that are right, of all questions and by kind, and conversations all of whose answers are."""
    model = lightscale.load(run)
    right, asked, whole = Counter[str](), Counter[str](), 0
    for turns in talks(args.held_out, seed=2, held_out=True):
        # A base has no template of its own.
        session = model.chat() if run != "runs/base" else model.chat(template="chatml")
        found = [session.ask(question, tokens=40, sampling=Sampling(temperature=0)) for _, question, _ in turns]
        marks = [answer == expected for answer, (_, _, expected) in zip(found, turns, strict=True)]
        asked.update(kind for kind, _, _ in turns)
        right.update(kind for (kind, _, _), is_right in zip(turns, marks, strict=True) if is_right)
        whole += all(marks)
    return {
        "conversations": args.held_out,
        "all_right": whole,
        "right": {kind: right[kind] for kind in KINDS},
        "asked": {kind: asked[kind] for kind in KINDS},
    }


def table(found: dict[str, Any]) -> Table:
    """For people."""
    made = Table(caption="right answers to the questions of held-out conversations")
    made.add_column("model")
    for name in ("trained parameters", "share", *KINDS, "all", "conversations"):
        made.add_column(name, justify="right")
    for one in found["models"]:
        shares = [(one["right"][kind], one["asked"][kind]) for kind in KINDS]
        shares.append((sum(one["right"].values()), sum(one["asked"].values())))
        figures = [f"{one['trained']:,}", f"{one['trained'] / one['parameters']:.2%}"]
        figures += [f"{right} of {asked}" for right, asked in shares]
        made.add_row(one["model"], *figures, f"{one['all_right']} of {one['conversations']}")
    return made


def draw(figures: dict[str, Any], path: Path) -> None:
    """Shares of right answers by kind."""
    # Optional, and slow to import. Figure instead of pyplot: there may be no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(figures["models"]), 1)
    for number, one in enumerate(figures["models"]):
        heights = [one["right"][kind] / max(one["asked"][kind], 1) for kind in KINDS]
        places = [place + number * width for place in range(len(KINDS))]
        label = f"{one['model']}, {one['trained'] / one['parameters']:.1%} of the parameters"
        axes.bar(places, heights, width=width, align="edge", label=label)
    axes.set_xticks([place + 0.4 for place in range(len(KINDS))], KINDS)
    axes.set_ylabel("share of right answers")
    axes.set_ylim(0, 1.05)
    figure.legend(loc="outside lower center", ncols=len(figures["models"]), fontsize=8)
    axes.set_title(f"Answers to held-out questions, {figures['machine']['date']}", fontsize=10)
    figure.savefig(path, dpi=120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py answers``."""
    add = parser.add_argument
    add("--talks", type=positive, default=20_000, metavar="N", help="conversations to learn from (default 20000)")
    add("--held-out", type=positive, default=200, metavar="N", help="held-out conversations (default 200)")
    add("--base-steps", type=positive, default=2000, metavar="N", help="steps of pretraining (default 2000)")
    add("--steps", type=positive, default=1500, metavar="N", help="steps of fine-tuning (default 1500)")
    add("--rate", type=float, default=2e-3, metavar="LR", help="its peak learning rate (default 2e-3)")
    add("--lora-steps", type=positive, default=2500, metavar="N", help="steps of LoRA (default 2500)")
    add("--lora-rate", type=float, default=1e-2, metavar="LR", help="its peak learning rate (default 1e-2)")
    add("--folder", type=Path, help="where its files and runs are kept; the same folder goes on (default: none are)")
