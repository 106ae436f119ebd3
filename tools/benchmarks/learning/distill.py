"""A trained softmax model that becomes a hybrid by distillation, beside conversion alone, at shares of its tokens.

One LLaMA is trained on the Python standard library; then hybrids that keep one of its layers begin from it by
``train.init_from``, twice for each share. *Conversion* trains the hybrid on the next token. *Distillation* spends half
of the tokens on the outputs of the replaced mixers, the other half on the teacher's distributions. Both take as many
steps for any share, and so larger batches for more tokens. Losses are nats per token of the chosen tokenizer: per
character with ``ascii``, per some three characters with ``sentencepiece``.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.command import run_lightscale
from benchmarks.turns import positive
from lightscale.runs.run_directory import RunDirectory, read_metrics

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
WAYS = ("conversion", "distillation")
TOKENIZERS = {"sentencepiece": (4096, 256), "ascii": (128, 512)}
"""Vocabulary and tokens of a sequence."""
TEACHER_BATCH = 8
KEPT_LAYER = 0
"""The layer whose replacement costs the teacher most, by the event ``sensitivity`` of a transfer of all layers."""
# Kept weights have learned already, new mixers have not.
KEPT = ["embedding.*", "*.mlp.*", "*layernorm*", f"decoder.layers.{KEPT_LAYER}.self_attention.*"]
WHOLE = ("optimizer.lr=1.5e-3", f"optimizer.groups.kept={{parameters={json.dumps(KEPT)},lr_factor=0.1}}")
MIXERS_ALONE = ("optimizer.lr=7e-3", "task.stage=layers")
RUN = f"""
extends = ["{CONFIGS}/arch/llama.toml", "{CONFIGS}/size/3M.toml", "{CONFIGS}/recipe/stdlib.toml"]
[model]
init_std = 0.07                # about 1 / sqrt(hidden_size), as a short run has no time to grow into it
[data.validation.stdlib]
source = "stdlib-validation"
sequences = 64
[optimizer]
lr = 3e-3
warmup_steps = 50
[train]
global_batch_size = {TEACHER_BATCH}
micro_batch_size = {TEACHER_BATCH}
[checkpoint]
every = 1_000_000              # the last step is saved
"""


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is known after each run. UserError: a command failed; it has said why."""
    with tempfile.TemporaryDirectory() as name:
        folder, store = Path(name), args.store
        vocab_size, length = TOKENIZERS[args.tokenizer]
        (folder / "run.toml").write_text(RUN, encoding="utf-8")
        if store is None:
            store = folder / "store"
            prepare = (
                f"data prepare --corpus stdlib --tokenizer {args.tokenizer} --validation 0.02 --out {store}".split()
            )
            prepare += [] if args.tokenizer == "ascii" else ["--vocab-size", str(vocab_size)]
            run_lightscale(*prepare)
        lightscale = ["train", str(folder / "run.toml"), "--processes", "1", f"data.store={store.resolve()}"]
        lightscale += [f"model.vocab_size={vocab_size}", f"data.sequence_length={length}"]

        def train(run: str, steps: int, *words: str) -> float:
            """The loss of validation at the end."""
            of_all = (f"train.steps={steps}", f"train.validate_every={steps}")
            run_lightscale(*lightscale, "--run", str(folder / run), *of_all, *words)
            lines = read_metrics(RunDirectory(folder / run).metrics)
            return [line["validation"]["stdlib"]["loss"] for line in lines if "validation" in line][-1]

        if args.teacher is None:
            train("teacher", args.source_steps)
        teacher = args.teacher or f"{folder}/teacher@{args.source_steps}"
        before = read_metrics(RunDirectory(Path(teacher.rpartition("@")[0])).metrics)[-1]
        tokens, best = before["tokens"], before["validation"]["stdlib"]["loss"]
        of_task = ("task.name=distill", f"task.teacher={teacher}")
        mixers = json.dumps(["llama", f"{args.mixer}*3"])
        runs: list[dict[str, Any]] = []
        for (number, share), way in product(enumerate(args.shares), WAYS):
            batch = max(1, round(share * tokens / length / args.steps))
            common = [f"model.mixer={mixers}", f"train.global_batch_size={batch}", f"train.micro_batch_size={batch}"]
            common += ["optimizer.warmup_steps=10"]
            directory, half = f"{way}-{number}", args.steps // 2
            if way == WAYS[0]:
                loss = train(directory, args.steps, *common, *WHOLE, "data.seed=1", f"train.init_from={teacher}")
            else:
                first = f"{directory}-layers"
                # Other windows in each half.
                train(first, half, *common, *of_task, *MIXERS_ALONE, "data.seed=1", f"train.init_from={teacher}")
                start = f"train.init_from={folder}/{first}@{half}"
                loss = train(directory, args.steps - half, *common, *of_task, *WHOLE, "data.seed=2", start)
            runs.append(
                {"way": way, "share": share, "tokens": batch * length * args.steps, "loss": loss, "behind": loss - best}
            )
            yield {"teacher": {"tokens": tokens, "loss": best}, "runs": list(runs)}


def table(found: dict[str, Any]) -> Table:
    """For people."""
    teacher = found["teacher"]
    made = Table(caption=f"the teacher's loss after {teacher['tokens']:,} tokens is {teacher['loss']:.3f} nats")
    made.add_column("way")
    for name in ("share of its tokens", "tokens", "loss", "behind the teacher"):
        made.add_column(name, justify="right")
    for one in found["runs"]:
        figures = f"{one['share']:.0%}", f"{one['tokens']:,}", f"{one['loss']:.3f}", f"{one['behind']:.3f}"
        made.add_row(one["way"], *figures)
    return made


def draw(figures: dict[str, Any], path: Path) -> None:
    """Distance from the teacher over its share of tokens."""
    # Optional, and slow to import. Figure instead of pyplot: there may be no display.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for way in WAYS:
        own = [one for one in figures["runs"] if one["way"] == way]
        axes.plot([one["tokens"] for one in own], [one["behind"] for one in own], "o-", label=way)
    axes.axhline(0.0, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("tokens of the hybrid")
    axes.set_ylabel("nats behind the teacher, in validation")
    axes.legend()
    axes.set_title(f"A hybrid of {figures['settings']['mixer']} from LLaMA, {figures['machine']['date']}", fontsize=10)
    figure.savefig(path, dpi=120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``bench.py distill``."""
    add = parser.add_argument
    add(
        "--tokenizer",
        choices=TOKENIZERS,
        default="sentencepiece",
        help="sentencepiece: vocabulary of 4096, sequences of 256 tokens; ascii: sequences of 512 characters (default "
        "sentencepiece)",
    )
    add("--mixer", default="hgrn2", metavar="NAME", help="mixer of three of four layers (default hgrn2)")
    add("--source-steps", type=positive, default=2000, metavar="N", help="steps of LLaMA's training (default 2000)")
    add("--steps", type=positive, default=800, metavar="N", help="steps of each hybrid (default 800)")
    add(
        "--shares",
        nargs="+",
        type=float,
        default=[0.05, 0.1, 0.2],
        metavar="X",
        help="shares of LLaMA's tokens that a hybrid gets (default 0.05 0.1 0.2)",
    )
    add(
        "--teacher",
        metavar="RUN@STEP",
        help="a LLaMA that this benchmark trained, at its last step (default: train one)",
    )
    add("--store", type=Path, help="token store (default: one made of the Python standard library)")
